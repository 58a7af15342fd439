"""The parts of a post-mortem that are about the run: its incidents, rules that spoke, skip list, environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import msgspec

from sentinel.daemon.alert_contexts import identities_of
from sentinel.errors import SentinelError
from sentinel.explain.drawing import spans
from sentinel.explain.skip_list import skip_list
from sentinel.incident import Incident
from sentinel.ingest.incarnation import Incarnation
from sentinel.monitor_config import MonitorConfig, as_reported
from sentinel.postmortem.happenings import utc
from sentinel.postmortem.report_document import (
    NOTE,
    Block,
    Grid,
    Items,
    NamedTexts,
    Preformatted,
    Prose,
    ReportPart,
    cells,
    listed,
    missing,
    shown,
    with_count,
)
from sentinel.postmortem.run_material import RunMaterial
from sentinel.postmortem.spool_reading import SpoolReading
from sentinel.rank_identity import LABEL

MOST_INCIDENTS = 100
MOST_RULES = 60
MOST_SKIPS = 100
MOST_RANKS = 64
MOST_SETTINGS = 120
_NAMES = ("torch", "python", "kernel", "boundary")
"""What of a descriptor's environment is told; the rest names the process."""


def incident_table(incidents: Sequence[Incident], material: RunMaterial) -> ReportPart:
    """Return all incidents in a table. incidents: in the order in which they are shown."""
    own = [one for one in incidents if one.state != "merged"]
    if not own:
        return ReportPart(title="Incidents", blocks=(Prose("None is on record."),))
    rows = [
        cells(one.id, one.severity.value, one.state, utc(material.opened(one.id)), one.steps, one.title, one.root_name,
              one.suspected, f"{one.num_members:,}")
        for one in own[:MOST_INCIDENTS]
    ]  # fmt: skip
    grid = Grid(
        heads=("Incident", "Severity", "State", "Opened (UTC)", "Steps", "What", "First cause", "Suspected", "Anomalies"),
        rows=tuple(rows), tones=tuple(one.severity.value for one in own[:MOST_INCIDENTS]),
    )  # fmt: skip
    blocks = with_count([grid], len(own) - len(rows), "incidents, none graver than these,")
    num_merged = len(incidents) - len(own)
    merged = f"{num_merged:,} that were taken for incidents of their own at first are part of these."
    return ReportPart(title="Incidents", blocks=(*blocks, *([Prose(merged)] if num_merged else [])))


def rules_part(material: RunMaterial, counts: Counter[str] | None) -> ReportPart:
    """Return the rules that spoke. counts: rule -> anomalies."""
    if not counts:
        return ReportPart(title="Rules that spoke", blocks=(Prose("None did."),))
    known = {} if material.pack is None else {one.name: one for one in material.pack.rules}
    rows = []
    for name, num in counts.most_common(MOST_RULES):
        rule = known.get(name)
        if rule is None:
            rows.append(cells(name, f"{num:,}"))
            continue
        args = ", ".join(f"{key}={value}" for key, value in rule.args.items())
        rows.append(
            cells(
                name, f"{num:,}", rule.severity.value, f"{rule.detector}({args})", ", ".join(rule.actions), rule.description
            )
        )
    heads = (
        ("Rule", "Anomalies") if not known else ("Rule", "Anomalies", "Severity", "Detector", "Actions", "What it looks for")
    )
    blocks = with_count(
        [Grid(heads=heads, rows=tuple((*row, *[""] * (len(heads) - len(row))) for row in rows))],
        len(counts) - len(rows), "rules",
    )  # fmt: skip
    lacking = [] if known else [missing("the text of the rules: there is no journal that keeps it.")]
    pack = [Prose(f"Hash of the rules in force: {material.pack.pack_hash}.")] if material.pack is not None else []
    return ReportPart(title="Rules that spoke", blocks=(*blocks, *pack, *lacking))


def skip_part(material: RunMaterial, incident: str | None) -> ReportPart:
    """Return the batches to skip; of one incident, or of all of the run."""
    title = "Skip list of samples"
    try:
        found = skip_list(material.run_dir)
    except SentinelError as error:
        return ReportPart(title=title, blocks=(missing(f"a skip list: {shown(str(error))}"),))
    skips = [one for one in found if incident in (None, one.incident)]
    if not skips:
        return ReportPart(title=title, blocks=(Prose("No batch is suspected."),))
    rows = []
    for one in skips[:MOST_SKIPS]:
        ranks = spans(one.ranks, most=8) if one.ranks else "all"
        samples = ", ".join(map(str, one.samples[:16])) + (
            f", and {len(one.samples) - 16:,} more" if len(one.samples) > 16 else ""
        )
        rows.append(cells(one.attempt, one.step, ranks, samples, one.incident, one.reason))
    grid = Grid(heads=("Attempt", "Step", "Ranks", "Samples", "Incident", "Why"), rows=tuple(rows))
    blocks = with_count([grid], len(skips) - len(rows), "batches")
    lacking = [] if any(one.samples for one in skips) else [missing("the ids of samples (monitor.log(sample_ids=...)).")]
    return ReportPart(title=title, blocks=(*blocks, *lacking))


def environment_part(material: RunMaterial, reading: SpoolReading, attempt: int | None) -> ReportPart:
    """Return where and with what the run ran, and the configuration in force. attempt: None: the newest."""
    title = "Environment and configuration in force"
    attempts = reading.attempts
    chosen = [one for at in (attempt, -1) for one in attempts.get(at, ())] if attempt is not None else []
    chosen = chosen or (attempts[max(attempts)] if attempts else [])
    described = [one for one in chosen if one.descriptor is not None]
    if not described:
        return ReportPart(title=title, blocks=(missing("the environment: no spool could be read."),))
    return ReportPart(title=title, blocks=(*_environment(described, reading), *_configuration(described, material)))


def _environment(described: Sequence[Incarnation], reading: SpoolReading) -> tuple[Block, ...]:
    number = described[0].attempt
    pairs: list[tuple[str, str]] = [("attempt", "not known" if number is None else str(number))]
    descriptors = [one.descriptor for one in described if one.descriptor is not None]
    pairs.append(("sentinel", ", ".join(dict.fromkeys(one.version for one in descriptors))))
    for name in _NAMES:
        said = dict.fromkeys(one.environment[name] for one in descriptors if one.environment.get(name))
        if said:
            pairs.append((name, ", ".join(list(said)[:8])))
    place = descriptors[0].place
    axes = ", ".join(f"{axis} {place.size(axis)}" for axis in ("pp", "dp", "tp", "cp", "ep"))
    pairs.append(("layout", f"{place.world_size:,} ranks: {axes}{f', schedule {place.schedule}' if place.schedule else ''}"))
    labels = dict.fromkeys(
        f"{name.removeprefix(LABEL)}={value}"
        for one in descriptors
        for name, value in one.environment.items()
        if name.startswith(LABEL)
    )
    if labels:
        pairs.append(("labels", ", ".join(list(labels)[:16])))
    blocks: list[Block] = [NamedTexts(tuple((name, shown(text)) for name, text in pairs))]
    identities = list(identities_of(described, number if number is not None else 0).values())
    rows = [cells(one.rank, one.in_words, one.job) for one in identities[:MOST_RANKS]]
    blocks += with_count(
        [Grid(heads=("Rank", "Host and GPU", "Job"), rows=tuple(rows))],
        max(len(identities), place.world_size) - len(rows),
        "ranks",
    )
    if reading.is_cut:
        blocks.append(Prose("The spool is larger than a report reads: other ranks may have said more.", NOTE))
    return tuple(blocks)


def _configuration(described: Sequence[Incarnation], material: RunMaterial) -> tuple[Block, ...]:
    descriptor = described[0].descriptor
    assert descriptor is not None
    usual = as_reported(MonitorConfig())
    own = {key: value for key, value in descriptor.settings.items() if usual.get(key, msgspec.UNSET) != value}
    where = (
        f"{descriptor.config_path} (hash {descriptor.config_hash})"
        if descriptor.config_path
        else "from code, or the usual one"
    )
    blocks: list[Block] = [Prose(f"Configuration of the trainer, as rank {described[0].rank} had it: {shown(where)}.")]
    if not descriptor.settings:
        blocks.append(missing("its keys."))
    elif own:
        lines = [f"{key}: {json.dumps(value, default=str)}" for key, value in sorted(own.items())]
        blocks += [Prose("Keys that differ from the usual ones:"), Preformatted(listed(lines, MOST_SETTINGS))]
    else:
        blocks.append(Prose("Every key has its usual value."))
    reloads = [one for one in material.audit if one.action == "reload"]
    if reloads:
        said = [f"{utc(one.time)} UTC: {json.dumps(one.details, default=str)}" for one in reloads[-8:]]
        blocks += [Prose("Reloads of the daemon's rules and configuration:"), Items(listed(said, 8))]
    blocks.append(missing("the daemon's configuration: it is a file of whoever runs the daemon."))
    return tuple(blocks)
