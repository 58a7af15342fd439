"""A post-mortem put together: of one incident, or of a run with its gravest incidents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sentinel.anomaly import Severity
from sentinel.errors import SentinelError
from sentinel.explain.anomaly_files import anomaly_files
from sentinel.explain.story import SentAlert, Story, story_of
from sentinel.incident import Incident
from sentinel.postmortem.before_after import ValuesAround, keys_of
from sentinel.postmortem.happenings import of_anomalies, of_incident, of_run, timeline, utc
from sentinel.postmortem.incident_part import causes_of, incident_parts
from sentinel.postmortem.report_document import NOTE, Block, Prose, ReportDocument, ReportPart, shown
from sentinel.postmortem.run_material import RunMaterial, Standing
from sentinel.postmortem.run_part import environment_part, incident_table, rules_part, skip_part
from sentinel.postmortem.spool_reading import SpoolReading
from sentinel.recorded_incidents import find_incident
from sentinel.report.links import NO_LINKS, MessageLinks
from sentinel.version import VERSION

MOST_TOLD = 5
"""Incidents of a run that are told whole; the others are in its table. Too small: what was grave is a line; too large:
nobody reads it, and each of them reads all anomaly files once (chosen: within the bounds of 5 s and 3 MB)."""
MOST_READ_BYTES = 2**29
"""Bytes of anomaly files that are read for the incidents that are told whole, each of which reads all; a bound on time."""
MOST_MEMBERS = 10_000
"""Anomalies of all incidents that are told whole; a bound on time: each takes some 100 us. Of more the earliest are read."""
BEFORE = 2000
"""Steps before an incident in which a checkpoint is looked for."""
BEHIND = 60


def postmortem(
    run_dir: Path,
    wanted: str | None,
    now: float,
    standing: Standing,
    alerts: Sequence[tuple[str, SentAlert]] = (),
    links: MessageLinks = NO_LINKS,
) -> ReportDocument:
    """Return the post-mortem of a run, or of the incident that an id, a prefix, `worst` or `latest` means.

    now: seconds since the epoch. alerts: (incident id, alert), of all incidents.
    ConfigError where there is no such incident.
    """
    material = RunMaterial(run_dir, now, standing, alerts)
    if wanted is not None:
        revisions = [one for own in material.revisions.values() for one in own]
        told = [material.newest[find_incident(sorted(revisions, key=lambda one: one.time), wanted)]]
    else:
        told = [one for one in _gravest(material) if one.severity is not Severity.INFO][: _most_told(run_dir)]
    stories = [_story(material, one, MOST_MEMBERS // max(1, len(told))) for one in told]
    spans = [(max(0, one.opened_step - BEFORE), max(one.last_step, one.active_step) + BEHIND) for one in told]
    reading = SpoolReading(run_dir, spans, _ranks_first(told), takes_all=wanted is None)
    values = ValuesAround(material, reading)
    wanted_keys = [key for story in stories for key in keys_of(causes_of(story), "")]
    if wanted is not None:
        parts = incident_parts(stories[0], material, reading, values, wanted_keys, links, is_alone=True)
        return _document(told[0], material, (*parts, *_of_incident(told[0], stories[0], material, reading)))
    inner = [
        ReportPart(
            title=f"{one.severity.value.upper()} {one.id}: {shown(one.title, 300)}",
            parts=incident_parts(story, material, reading, values, wanted_keys, links, is_alone=False),
        )
        for one, story in zip(told, stories, strict=True)
    ]
    return _document(None, material, _of_run(inner, stories, material, reading, values))


def _gravest(material: RunMaterial) -> list[Incident]:
    """Return the incidents that are not part of others, the gravest and of these the earliest first."""
    own = [one for one in material.newest.values() if one.state != "merged"]
    return sorted(own, key=lambda one: (-one.severity.level, not one.paged, one.attempt, one.opened_step, one.id))


def _most_told(run_dir: Path) -> int:
    """Return how many incidents of a run are told whole: one at least."""
    try:
        num_bytes = sum(path.stat().st_size for path in anomaly_files(run_dir))
    except (SentinelError, OSError):
        num_bytes = 0
    return min(MOST_TOLD, max(1, MOST_READ_BYTES // max(num_bytes, 1)))


def _ranks_first(told: Sequence[Incident]) -> list[int]:
    return [0, *(rank for one in told for rank in one.ranks[:8])]


def _story(material: RunMaterial, incident: Incident, most: int) -> Story:
    return story_of(material.run_dir, incident.id, material.alerts, most)


def _of_incident(incident: Incident, story: Story, material: RunMaterial, reading: SpoolReading) -> tuple[ReportPart, ...]:
    return (
        environment_part(material, reading, incident.attempt), rules_part(material, Counter(story.by_rule)),
        skip_part(material, incident.id),
    )  # fmt: skip


def _of_run(
    inner: Sequence[ReportPart],
    stories: Sequence[Story],
    material: RunMaterial,
    reading: SpoolReading,
    values: ValuesAround,
) -> tuple[ReportPart, ...]:
    gravest = _gravest(material)
    happened: list[Block] = [Prose(_summary(gravest, material))]
    happened += [Prose(shown(line)) for line in material.standing.lines]
    happenings = of_run(material, reading)
    for one in gravest:
        happenings += of_incident(material.revisions[one.id])
    for story in stories:
        happenings += of_anomalies(story, is_alone=False)
    merged = [one for one in material.newest.values() if one.state == "merged"]
    hidden = sum(one.severity is not Severity.INFO for one in gravest) - len(inner)
    told = [*inner]
    if hidden > 0:
        said = f"{hidden:,} more incidents are in the table alone; sentinel report RUN INCIDENT tells one of them."
        told.append(ReportPart(title="Others", blocks=(Prose(said, NOTE),)))
    return (
        ReportPart(title="What happened", blocks=tuple(happened)),
        ReportPart(title="Before and after", blocks=values.whole_run()),
        incident_table([*gravest, *merged], material),
        *told,
        ReportPart(title="Timeline", blocks=timeline(happenings, reading)),
        environment_part(material, reading, None), rules_part(material, material.rule_counts), skip_part(material, None),
    )  # fmt: skip


def _summary(gravest: Sequence[Incident], material: RunMaterial) -> str:
    if not gravest:
        return "No incident is on record."
    num = Counter(one.severity.value for one in gravest)
    counted = ", ".join(f"{num[one.value]:,} {one.value}" for one in reversed(Severity) if num[one.value])
    num_open = sum(one.state == "open" for one in gravest)
    noun = "incident" if len(gravest) == 1 else "incidents"
    return (
        f"{len(gravest):,} {noun} ({counted}), {num_open:,} of them open, of {material.num_anomalies:,} anomalies. "
        f"The gravest, at step {gravest[0].opened_step:,}: {shown(gravest[0].title)}."
    )


def _document(incident: Incident | None, material: RunMaterial, parts: Sequence[ReportPart]) -> ReportDocument:
    name = shown(material.run_dir.name, 200)
    notices = []
    if material.is_live:
        notices.append(
            f"The run is LIVE: process {shown(material.standing.judged_by, 100)} judges it. This is how it stood at "
            f"{utc(material.now)} UTC."
        )
    if incident is not None and incident.state == "merged":
        notices.append(f"This incident is part of {incident.merged_into}, which tells more.")
    if not material.has_journal:
        notices.append(
            "No journal of the run could be read (nobody judged it, or it is gone): commands and messages are not told here."
        )
    notices += [f"Incomplete: {shown(one)}." for one in material.problems]
    gravest = max((one.severity for one in material.newest.values() if one.state != "merged"), key=_level, default=None)
    tone = incident.severity if incident is not None else gravest
    return ReportDocument(
        title=f"Post-mortem of run {name}" if incident is None else f"Post-mortem of incident {incident.id} of run {name}",
        tone="" if tone is None else tone.value,
        about=(f"made {utc(material.now)} UTC", f"Sentinel {VERSION}", "times are UTC, steps as the trainer counts them"),
        notices=tuple(notices),
        parts=tuple(parts),
    )


def _level(severity: Severity) -> int:
    return severity.level
