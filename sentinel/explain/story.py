"""The story of one incident: what came first, what the black box knew, what escalation added, what followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.anomaly_words import place_words
from sentinel.command import EnableMonitoring
from sentinel.explain.anomaly_files import anomaly_files
from sentinel.explain.cascade import Cascade, cascade_of
from sentinel.explain.drawing import WIDTH, draw, rank_words, spans, way
from sentinel.explain.topk import topk
from sentinel.incident import Incident
from sentinel.kinds import MODULE_KINDS, labels
from sentinel.order.causal import sort_key
from sentinel.order.causes import BlastRadius, blast_radius
from sentinel.recorded_incidents import find_incident, incident_members, incident_revisions

MAX_CAUSES_SHOWN = 8
MAX_COUNTS_SHOWN = 12
_REFINED = "refined at step"


class SentAlert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert about an incident, as the outbox knows it."""

    sink: str
    change: str
    """`opened`, `raised`, `refined`, `resolved`, ..."""
    revision: int
    is_page: bool
    outcome: str
    """Empty: it still waits."""
    time: float = 0.0
    """Seconds since the epoch at which it was due; 0: not known."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one incident."""

    incident: Incident
    """Its newest revision, with every member's id."""
    num_revisions: int
    root: Anomaly | None
    """None: its record is no longer there."""
    first_causes: tuple[Anomaly, ...]
    borders: tuple[Anomaly, ...]
    """Borders of the black box that were bad at the root's step, in causal order."""
    inside: tuple[Anomaly, ...]
    """What module monitoring saw of it after the root's step."""
    commands: tuple[EnableMonitoring, ...]
    followed: BlastRadius
    """Its members but for the first causes."""
    num_missing: int
    """Members whose record is not in the anomaly files."""
    num_unread: int = 0
    """Members that were left out because there are more than were asked for; what came first is not among them."""
    cascade: Cascade | None = None
    """How it spread; None where nothing of it is about a step's arithmetic, or its records are gone."""
    reach: tuple[BlastRadius, ...] = ()
    """What each of the first causes alone can have made, those that are shown."""
    alerts: tuple[SentAlert, ...] = ()
    by_rule: dict[str, int] = {}
    """Rule -> its members that are of it, the most first."""

    @property
    def facts(self) -> tuple[str, ...]:
        """Evidence that was known at once, whatever is suspected."""
        return tuple(line for line in self.incident.facts if _REFINED not in line)

    @property
    def refined(self) -> tuple[str, ...]:
        """Evidence that escalation added."""
        return tuple(line for line in self.incident.evidence if _REFINED in line)

    def as_object(self) -> dict[str, Any]:
        """Return the story as JSON-able data: its fields, what the text makes of the incident's, and the text itself."""
        one = self.incident
        result: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return result | {
            "steps": one.steps, "diagnosis": one.suspected, "reasons": list(one.reasons), "to_do": one.to_do,
            "facts": list(self.facts), "refined": list(self.refined), "text": render(self),
        }  # fmt: skip


def story_of(run_dir: Path, wanted: str, alerts: Sequence[tuple[str, SentAlert]] = (), most: int | None = None) -> Story:
    """Return the story of the incident that an id, a prefix or `latest` means. ConfigError when there is none.

    alerts: (incident id, alert), of all incidents, as far as they are known. most: anomalies that are looked at, the
    earliest ones; None: all.
    """
    revisions = incident_revisions(run_dir)
    found = find_incident(revisions, wanted)
    own = sorted((one for one in revisions if one.id == found), key=lambda one: one.revision)
    ids = incident_members(revisions, found)
    members: list[Anomaly] = []
    if ids and anomaly_files(run_dir):
        k = len(ids) if most is None else min(most, len(ids))
        members = [entry.anomaly for entry in topk(run_dir, max(1, k), incident=found).entries]
    members.sort(key=sort_key)
    incident = msgspec.structs.replace(own[-1], members=tuple(sorted(ids)))
    by_id = {one.id: one for one in members}
    root = by_id.get(incident.root or "")
    causes = sorted((by_id[one] for one in incident.first_causes if one in by_id), key=sort_key)
    num_absent = len(ids) - len(by_id)
    # Fewer than were asked for: all that there are were read.
    num_unread = num_absent if most is not None and len(by_id) >= most else 0
    step = incident.opened_step
    commands = [
        one
        for one in _commands(run_dir)
        if step < one.at_step and one.at_step <= incident.last_step + (one.for_steps or 0) + 1
    ]
    return Story(
        incident=incident,
        num_revisions=len(own),
        root=root,
        first_causes=tuple(causes),
        borders=tuple(one for one in members if one.border and one.step == step),
        inside=tuple(one for one in members if not one.border and one.step > step and _is_of_module(one)),
        commands=tuple(commands),
        followed=blast_radius(members, causes or members[:1]),
        num_missing=num_absent - num_unread,
        num_unread=num_unread,
        cascade=cascade_of(members, causes or members[:1]),
        reach=tuple(blast_radius(members, [cause]) for cause in causes[:MAX_CAUSES_SHOWN]),
        alerts=tuple(notified for about, notified in alerts if about == found),
        by_rule=dict(Counter(one.rule for one in members).most_common()),
    )


_OF_MODULE = labels(MODULE_KINDS)


def _is_of_module(anomaly: Anomaly) -> bool:
    return anomaly.kind in _OF_MODULE


def _commands(run_dir: Path) -> list[EnableMonitoring]:
    result = []
    for path in sorted((run_dir / "control").glob("*.json")):
        try:
            result.append(msgspec.json.decode(path.read_bytes(), type=EnableMonitoring))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
            continue
    return result


def render(story: Story, width: int = WIDTH) -> str:
    """Return the story in plain words, without a last line feed. width: columns that its drawing may take."""
    return "\n".join(
        line
        for section in (
            _head(story),
            _first(story),
            _suspected(story),
            _black_box(story),
            _escalation(story),
            _spread(story, width),
            _followed(story),
            _notified(story),
        )
        for line in section
    )


def _head(story: Story) -> list[str]:
    one = story.incident
    is_single = one.opened_step == max(one.last_step, one.active_step)
    steps = f"step {one.opened_step}" if is_single else f"steps {one.steps}"
    state = f"{one.state} into {one.merged_into}" if one.merged_into else one.state
    facts = [f"incident {one.id}", one.severity.value, state, f"run {one.run}, attempt {one.attempt}", steps]
    facts.append(_count(one.num_members, "anomaly", "anomalies"))
    facts.append(f"diagnosis: {one.suspected}")
    return [one.title, "; ".join(facts)]


def _first(story: Story) -> list[str]:
    lines = ["", "What came first"]
    is_alike = all(reach == story.reach[0] for reach in story.reach)
    for at, cause in enumerate(story.first_causes[:MAX_CAUSES_SHOWN]):
        call = "" if cause.call_id is None else f", call {cause.call_id}"
        lines.append(f"  {place_words(cause)} (pp_stage {cause.pp_stage}{call}; rule {cause.rule})")
        if len(story.first_causes) > 1 and not is_alike:
            lines.append(f"    it reaches {_reach_words(story.reach[at])}")
    if len(story.first_causes) > 1 and is_alike:
        lines.append(f"    each of them reaches {_reach_words(story.reach[0])}")
    hidden = len(story.incident.first_causes) - min(len(story.first_causes), MAX_CAUSES_SHOWN)
    if not story.first_causes:
        lines.append(f"  {story.incident.root_name or 'unknown'} (its record is no longer there)")
    elif hidden > 0:
        lines.append(f"  and {hidden} more that nothing else explains")
    if story.first_causes and story.incident.root_name:
        lines.append(f"  so it came from {story.incident.root_name}")
    return lines


def _suspected(story: Story) -> list[str]:
    one = story.incident
    if not one.reasons and not one.to_do:
        return []
    lines = ["", f"What is suspected: {one.suspected}", *(f"  {reason}" for reason in one.reasons)]
    lines += [f"  to do: {one.to_do}"] if one.to_do else []
    if one.skip_steps:
        of = f", the part of {_named('rank', one.skip_ranks)}" if one.skip_ranks else ""
        lines.append(f"  batches to skip: {_named('step', one.skip_steps)}{of}")
    if one.skip_samples:
        shown = ", ".join(map(str, one.skip_samples[:8])) + (", ..." if len(one.skip_samples) > 8 else "")
        lines.append(f"  samples to skip: {shown}")
    return lines


def _black_box(story: Story) -> list[str]:
    if not story.facts and not story.borders:
        return []
    lines = ["", "What was known at once"]
    lines += [f"  {fact}" for fact in story.facts]
    if story.borders:
        names = list(dict.fromkeys(f"{one.kind} of {one.tag_name}" for one in story.borders))
        shown = ", ".join(names[:6]) + (f", and {len(names) - 6} more" if len(names) > 6 else "")
        lines.append(f"  borders of the black box gone bad, in order: {shown}")
    return lines


def _escalation(story: Story) -> list[str]:
    if not story.commands and not story.refined:
        return []
    lines = ["", "What escalation added"]
    for one in story.commands:
        span = "until told" if one.for_steps is None else f"for {one.for_steps} steps"
        ranks = "all ranks" if not one.ranks else "rank" + ("s " if len(one.ranks) > 1 else " ") + _list(one.ranks)
        why = f" ({one.reason})" if one.reason else ""
        lines.append(f"  from step {one.at_step}: {', '.join(one.kinds)} on {ranks}, {span}{why}")
    if story.inside:
        num = _count(len(story.inside), "anomaly", "anomalies")
        lines.append(f"  seen from inside: {num}, the first {place_words(story.inside[0])}")
    lines += [f"  {line}" for line in story.refined]
    return lines


def _spread(story: Story, width: int) -> list[str]:
    cascade = story.cascade
    if cascade is None or not story.followed.num_anomalies:
        return []
    return ["", "How it spread", *way(cascade, width), "", *draw(cascade, width)]


def _reach_words(radius: BlastRadius) -> str:
    if not radius.num_anomalies:
        return "nothing else"
    ranks, stages = sorted(radius.by_rank), sorted(radius.by_stage)
    steps = sorted(radius.by_step)
    words = [_count(radius.num_anomalies, "anomaly", "anomalies")]
    words += [f"on {rank_words(ranks)}"] if ranks else []
    words.append(("stage " if len(stages) == 1 else "stages ") + spans(stages))
    words.append(("step " if len(steps) == 1 else "steps ") + spans(steps))
    return ", ".join(words)


def _followed(story: Story) -> list[str]:
    radius = story.followed
    lines = ["", "What followed"]
    if not radius.num_anomalies:
        lines.append("  nothing else")
    else:
        lines.append(f"  {_count(radius.num_anomalies, 'anomaly', 'anomalies')}")
        lines.append(f"  by kind: {_counts(radius.by_kind)}")
        lines.append(f"  by pp_stage: {_counts(radius.by_stage)}")
        if radius.by_rank:
            lines.append(f"  by rank: {_counts(radius.by_rank)}")
        lines.append(f"  by step: {_counts(radius.by_step)}")
    if story.num_missing:
        lines.append(f"  {_count(story.num_missing, 'record', 'records')} of it no longer in the anomaly files")
    return lines


def _notified(story: Story) -> list[str]:
    if not story.alerts:
        return []
    lines = ["", "Who was notified"]
    for one in story.alerts:
        page = ", a page" if one.is_page else ""
        lines.append(f"  {one.sink}: {one.change} (revision {one.revision}{page}): {one.outcome or 'waiting'}")
    return lines


def _count(num: int, one: str, many: str) -> str:
    return f"{num} {one if num == 1 else many}"


def _named(word: str, values: Sequence[int]) -> str:
    return f"{word}{'s' if len(values) > 1 else ''} {_list(values)}"


def _list(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:MAX_COUNTS_SHOWN]))
    return shown + (f", ... ({len(values)})" if len(values) > MAX_COUNTS_SHOWN else "")


def _counts(counts: dict[Any, int]) -> str:
    shown = ", ".join(f"{key}: {num}" for key, num in list(counts.items())[:MAX_COUNTS_SHOWN])
    left = list(counts.values())[MAX_COUNTS_SHOWN:]
    return shown + (f", {len(left)} more: {sum(left)}" if left else "")
