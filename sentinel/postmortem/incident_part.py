"""The parts of a post-mortem that tell one incident, in the order in which a person who was paged reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sentinel.anomaly import Anomaly
from sentinel.anomaly_words import short_number
from sentinel.control.command_words import orders_in_words
from sentinel.daemon.alert_contexts import identities_of
from sentinel.explain.drawing import draw, spans, way
from sentinel.explain.story import MAX_CAUSES_SHOWN, Story
from sentinel.incident import CLOSED_STATES, Incident
from sentinel.order.causes import BlastRadius
from sentinel.postmortem.before_after import Key, ValuesAround
from sentinel.postmortem.happenings import of_alerts, of_anomalies, of_incident, of_run, timeline, utc
from sentinel.postmortem.replay_plan import replay_plan
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
from sentinel.postmortem.runbook_pages import pages_of
from sentinel.postmortem.spool_reading import SpoolReading
from sentinel.report.alert import Alert
from sentinel.report.alert_context import context_of
from sentinel.report.links import MessageLinks
from sentinel.report.message import AlertMessage, message_of

MOST_REASONS = 40
MOST_COUNTS = 24
DRAWN_WIDTH = 100

WHEN = ("since", "steps", "now", "merged into")
WHERE = ("began with", "module", "segment", "ranks", "machines", "job", "labels")
"""What of a message's fields says when and where; under their own headings they are all there is of it."""


def message_about(incident: Incident, material: RunMaterial, reading: SpoolReading, links: MessageLinks) -> AlertMessage:
    """Return what the incident's page and every message say of it."""
    identities = identities_of(reading.incarnations, incident.attempt)
    alert = Alert(
        key="", sink="", change=incident.state if incident.state in CLOSED_STATES else "opened", incident=incident,
        context=context_of(incident, identities, material.opened(incident.id)), created=material.now,
    )  # fmt: skip
    return message_of(alert, orders_in_words(material.commands, incident), links.of(alert))


def incident_parts(
    story: Story,
    material: RunMaterial,
    reading: SpoolReading,
    values: ValuesAround,
    wanted: Sequence[Key],
    links: MessageLinks,
    *,
    is_alone: bool,
) -> tuple[ReportPart, ...]:
    """Return what is told of an incident. is_alone: the report is about it, and has the timeline of its attempt."""
    incident = story.incident
    message = message_about(incident, material, reading, links)
    fields = dict(message.fields)
    parts = [
        ReportPart(title="What happened", blocks=_what(story, message, fields)),
        ReportPart(title="When", blocks=_when(story, material, fields)),
        ReportPart(title="Where", blocks=_where(fields)),
        ReportPart(title="Diagnosis", blocks=_diagnosis(incident)),
        ReportPart(title="Before and after", blocks=values.curves(incident, causes_of(story), wanted)),
        ReportPart(title="First causes", blocks=_first_causes(story)),
        ReportPart(title="Blast radius", blocks=_blast_radius(story)),
    ]
    if is_alone:
        happenings = [
            *of_run(material, reading, {incident.attempt}), *of_incident(material.revisions[incident.id]),
            *of_anomalies(story, is_alone=True), *of_alerts(material, {incident.id}),
        ]  # fmt: skip
        parts.append(ReportPart(title="Timeline", blocks=timeline(happenings, reading)))
    parts += [
        ReportPart(title="What was done", blocks=_done(story, material, fields)),
        ReportPart(title="What to do next", blocks=_to_do(incident, message, fields)),
        ReportPart(title="Replay plan", blocks=replay_plan(story, material, reading)),
    ]
    return tuple(parts)


def causes_of(story: Story) -> tuple[Anomaly, ...]:
    """Return what came first, as far as its records are there."""
    return story.first_causes or ((story.root,) if story.root is not None else ())


def _what(story: Story, message: AlertMessage, fields: dict[str, str]) -> tuple[Block, ...]:
    blocks: list[Block] = [Prose(message.headline(), story.incident.severity.value)]
    pairs = tuple((name, fields[name]) for name in ("how bad", "cause") if name in fields)
    blocks += [NamedTexts(pairs)] if pairs else []
    if story.cascade is not None and story.cascade.waves:
        # Unwrapped: each leg of the way is a sentence.
        legs = [line.strip() for line in way(story.cascade, width=10**6)]
        blocks.append(Items(listed(legs, MOST_REASONS), is_numbered=True))
    return tuple(blocks)


def _when(story: Story, material: RunMaterial, fields: dict[str, str]) -> tuple[Block, ...]:
    newest = story.incident
    ended = utc(newest.time) if newest.state in CLOSED_STATES else ""
    pairs = [(name, fields[name]) for name in WHEN if name in fields]
    pairs += [("over", f"{ended} UTC")] if ended else [("over", "not yet")]
    blocks: list[Block] = [NamedTexts(tuple(pairs))]
    if not utc(material.opened(newest.id)):
        blocks.append(missing("at what time it opened."))
    return tuple(blocks)


def _where(fields: dict[str, str]) -> tuple[Block, ...]:
    pairs = tuple((name, fields[name]) for name in WHERE if name in fields)
    blocks: list[Block] = [NamedTexts(pairs)] if pairs else []
    lacking = [
        words
        for name, words in (("ranks", "ranks"), ("machines", "hosts and GPUs"), ("job", "the id of a job"))
        if name not in fields
    ]
    return (*blocks, *([missing(f"{', '.join(lacking)}.")] if lacking else []))


def _diagnosis(incident: Incident) -> tuple[Block, ...]:
    blocks: list[Block] = [Prose(f"Suspected: {shown(incident.suspected)}.")]
    blocks += [Items(listed(incident.reasons, MOST_REASONS))] if incident.reasons else [missing("a reason for it.")]
    if incident.facts:
        blocks += [Prose("Its evidence:"), Items(listed(incident.facts, MOST_REASONS))]
    return tuple(blocks)


def _first_causes(story: Story) -> tuple[Block, ...]:
    causes = story.first_causes[:MAX_CAUSES_SHOWN]
    if not causes:
        root = story.incident.root_name or "unknown"
        return (missing(f"the record of the first cause, {shown(root)}: it is no longer in the anomaly files."),)
    rows = []
    for at, one in enumerate(causes):
        place = f"{one.pp_stage}" if not one.vpp_stage else f"{one.pp_stage}.{one.vpp_stage}"
        value = one.value_text or ("" if one.value is None else short_number(one.value))
        reach = story.reach[at].num_anomalies if at < len(story.reach) else None
        rank = ", ".join(map(str, one.ranks[:8])) if one.rank is None else one.rank
        baseline = None if one.baseline is None else short_number(one.baseline)
        rows.append(
            cells(one.step, one.micro_step, rank, place, one.tag_name, f"{one.kind} {one.statistic}", value, baseline,
                  one.rule, reach)
        )  # fmt: skip
    heads = ("Step", "Micro-step", "Rank", "Stage", "Tensor or value", "Kind", "Value", "Baseline", "Rule", "Reaches")
    grid = Grid(heads=heads, rows=tuple(rows), tones=tuple(one.severity.value for one in causes))
    said = [Prose(shown(one.message)) for one in causes[:1] if one.message]
    return with_count([grid, *said], len(story.incident.first_causes) - len(causes), "first causes")


def _blast_radius(story: Story) -> tuple[Block, ...]:
    radius: BlastRadius = story.followed
    blocks: list[Block] = []
    if not radius.num_anomalies:
        blocks.append(Prose("Nothing else was anomalous because of it, as far as is known."))
    else:
        pairs: list[tuple[str, str]] = [("anomalies", f"{radius.num_anomalies:,}")]
        pairs.append(("steps", spans(sorted(radius.by_step), most=8)))
        for name, counts in (("by kind", radius.by_kind), ("by stage", radius.by_stage), ("by rank", radius.by_rank)):
            if counts:
                pairs.append((name, _counted(counts)))
        blocks.append(NamedTexts(tuple((name, shown(text)) for name, text in pairs)))
    if story.cascade is not None and story.followed.num_anomalies:
        blocks.append(Preformatted(tuple(shown(line, 400) for line in draw(story.cascade, DRAWN_WIDTH))))
    if story.num_unread:
        num = sum(story.by_rule.values())
        blocks.append(
            Prose(f"Counted among the {num:,} of its anomalies that came first; {story.num_unread:,} came later.", NOTE)
        )
    if story.num_missing:
        blocks.append(missing(f"{story.num_missing:,} of its anomalies: their records are no longer in the files."))
    return tuple(blocks)


def _counted(counts: dict[Any, int]) -> str:
    given = list(counts.items())
    words = ", ".join(f"{key}: {num:,}" for key, num in given[:MOST_COUNTS])
    left = given[MOST_COUNTS:]
    return words + (f", {len(left)} more: {sum(num for _, num in left):,}" if left else "")


def _done(story: Story, material: RunMaterial, fields: dict[str, str]) -> tuple[Block, ...]:
    lines = [f"Ordered: {fields['done']}"] if "done" in fields else []
    lines += [f"Refined: {line}" for line in story.refined]
    lines += [act.in_words for act in story.incident.acts]
    sinks: dict[str, list[str]] = {}
    for one in story.alerts:
        page = ", a page" if one.is_page else ""
        sinks.setdefault(one.sink, []).append(f"{one.change}{page} ({one.outcome or 'waiting'})")
    lines += [f"Told {sink}: {'; '.join(said[:12])}" for sink, said in sinks.items()]
    if lines:
        return (Items(listed(lines, MOST_REASONS)),)
    if not material.has_journal:
        return (missing("what was ordered and who was told: the run has no journal."),)
    return (Prose("Nobody was told, and nothing was ordered.", NOTE),)


def _to_do(incident: Incident, message: AlertMessage, fields: dict[str, str]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if incident.to_do:
        blocks.append(Prose(shown(incident.to_do)))
    else:
        blocks.append(missing("an advice of the diagnosis."))
    if "batches to skip" in fields:
        blocks.append(Prose(f"Batches to skip: {fields['batches to skip']}."))
    linked = tuple(one for one in message.links if one.url.startswith(("http://", "https://")))
    blocks += [Items(linked)] if linked else []
    pages = ", ".join(f"docs/runbooks/{page}.md" for page in pages_of(incident))
    blocks.append(Prose(f"Runbooks that come with Sentinel: {pages}."))
    if "commands" in fields:
        blocks.append(Preformatted(tuple(fields["commands"].split("; "))))
    return tuple(blocks)
