"""The timeline of a run: attempts, incidents and their changes, first anomalies, commands, checkpoints, people, ends."""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.anomaly_words import place_words
from sentinel.explain.drawing import rank_words
from sentinel.explain.story import Story
from sentinel.incident import Incident
from sentinel.postmortem.report_document import Block, Grid, cells, missing, shown, with_count
from sentinel.postmortem.run_material import RunMaterial
from sentinel.postmortem.spool_reading import SpoolReading
from sentinel.run_end import GOODBYE, end_words

MOST_ROWS = 200
"""Rows of a timeline; past it the least weighty are left out, and counted."""
MOST_STEPS = 40
"""Steps of one incident whose anomalies have a row of their own."""
RUN, PERSON, CRITICAL, COMMAND, WARNING, CHECKPOINT, ANOMALY, INFO = range(8)
"""What a happening weighs: the lower, the longer it stays."""
_QUIET = frozenset({"command.armed", "not_escalated"})
_WEIGHTS = {Severity.CRITICAL: CRITICAL, Severity.WARNING: WARNING, Severity.INFO: INFO}


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    time: float = 0.0
    """Seconds since the epoch; 0: not known."""
    step: int = -1
    """-1: of no step, or not known."""
    what: str
    weight: int
    tone: str = ""


def utc(seconds: float) -> str:
    """`2026-11-22 14:30:05`; empty where the time is not known, or none that a clock shows."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}" if 0 < seconds < 4e9 else ""


def timeline(happenings: Iterable[Happening], reading: SpoolReading) -> tuple[Block, ...]:
    """Return the table of what happened, in order."""
    given = list(happenings)
    if not given:
        return (missing("anything that happened."),)
    kept = sorted(range(len(given)), key=lambda at: (given[at].weight, at))[:MOST_ROWS]
    ordered = _in_order([given[at] for at in sorted(kept)], reading)
    ended = {one.end.step: utc(one.time) for one in reversed(reading.steps)}
    grid = Grid(
        heads=("UTC", "Step", "What"),
        rows=tuple(
            cells(utc(one.time) or ended.get(one.step), f"{one.step:,}" if one.step >= 0 else None, one.what)
            for one in ordered
        ),
        tones=tuple(one.tone for one in ordered),
    )
    return with_count([grid], len(given) - len(kept), "less weighty entries of this timeline")


def of_run(material: RunMaterial, reading: SpoolReading, attempts: Collection[int] | None = None) -> list[Happening]:
    """Return what happened to the run itself. attempts: those that are wanted; None: all."""
    found = [
        Happening(
            time=min(one.first_wall_ns for one in processes) / 1e9,
            step=max((one.descriptor.resumed_step for one in processes if one.descriptor is not None), default=-1),
            what=_began(attempt, [one.rank for one in processes], processes[0].descriptor is not None
                        and max(one.descriptor.resumed_step for one in processes if one.descriptor is not None) >= 0),
            weight=RUN,
        )
        for attempt, processes in reading.attempts.items()
        if attempts is None or attempt in attempts or attempt < 0
    ]  # fmt: skip
    for end in material.ends:
        if attempts is None or end.attempt in attempts:
            who = "every rank" if end.ended.rank is None else f"rank {end.ended.rank}"
            tone = "" if end.ended.how == GOODBYE else "warning"
            what = f"attempt {end.attempt} ended: {who} {end_words(end.ended)}"
            found.append(Happening(time=end.time, step=end.ended.step, what=what, weight=RUN, tone=tone))
    return found + _checkpoints(reading, attempts) + _ordered(material, attempts)


def of_incident(revisions: Sequence[Incident]) -> list[Happening]:
    """Return how an incident went on."""
    first, newest = revisions[0], revisions[-1]
    name = f"{first.id}: {first.title}"
    found = [_changed(first, f"incident {name}, {first.severity.value}")]
    for before, now in pairwise(revisions):
        words = []
        if now.severity is not before.severity:
            words.append(f"is now {now.severity.value}")
        if now.num_worse > before.num_worse:
            words.append("became several times worse")
        if now.root_name != before.root_name and now.root_name:
            words.append(f"began in {now.root_name}")
        if now.suspected != before.suspected:
            words.append(f"suspected: {now.suspected}")
        if now.state != before.state:
            words.append(f"{now.state} into {now.merged_into}" if now.merged_into else now.state)
        if words:
            found.append(_changed(now, f"incident {first.id} {'; '.join(words)}"))
    for act in newest.acts:
        found.append(Happening(time=act.time, what=f"incident {first.id} {act.in_words}", weight=PERSON))
    return found


def of_anomalies(story: Story, *, is_alone: bool) -> list[Happening]:
    """Return what first anomalies an incident has, and where it is told alone how many there are in each step."""
    causes = story.first_causes or ((story.root,) if story.root is not None else ())
    found = [
        Happening(
            time=one.time, step=one.step, weight=ANOMALY, tone=one.severity.value,
            what=f"anomaly that came first: {place_words(one)} (rule {one.rule})",
        )
        for one in causes[:8]
    ]  # fmt: skip
    if is_alone:
        steps = list(story.followed.by_step.items())
        for step, num in steps[:MOST_STEPS]:
            found.append(Happening(step=step, what=f"{num:,} anomal{'y' if num == 1 else 'ies'} of it", weight=ANOMALY))
    return found


def of_alerts(material: RunMaterial, incidents: Collection[str]) -> list[Happening]:
    """Return what was told to people of some incidents, a row for each moment of each."""
    told: dict[tuple[str, float, str], Counter[str]] = {}
    for incident, one in material.alerts:
        if incident in incidents:
            told.setdefault((incident, one.time, one.change), Counter())[f"{one.sink} {one.outcome or 'waiting'}"] += 1
    return [
        Happening(time=time, what=f"incident {incident} told ({change}): {', '.join(sinks)}", weight=ANOMALY)
        for (incident, time, change), sinks in told.items()
    ]


def _began(attempt: int, ranks: Sequence[int], is_resumed: bool) -> str:
    name = f"attempt {attempt}" if attempt >= 0 else "an attempt that its ranks could not number"
    resumed = ", from a saved state" if is_resumed else ""
    return f"{name} began: {rank_words(sorted(set(ranks)))}{resumed}"


def _checkpoints(reading: SpoolReading, attempts: Collection[int] | None) -> list[Happening]:
    """Return a row for each step at which ranks said that they were at a checkpoint."""
    found: dict[tuple[int, int], Happening] = {}
    for one in sorted(reading.checkpoints):
        if attempts is None or one.attempt in attempts or one.attempt < 0:
            what = f"checkpoint (rank {one.rank} said so first)"
            found.setdefault((one.attempt, one.step), Happening(time=one.time, step=one.step, what=what, weight=CHECKPOINT))
    return list(found.values())


def _ordered(material: RunMaterial, attempts: Collection[int] | None) -> list[Happening]:
    """Return what the audit says: commands and what became of them, reloads, silences, refusals."""
    found = []
    for one in material.audit:
        details: dict[str, Any] = one.details if isinstance(one.details, dict) else {}
        if one.action in _QUIET or "incident" in details or (one.action == "ack" and one.actor.startswith("rank ")):
            continue
        given = details.get("command")
        command: dict[str, Any] = given if isinstance(given, dict) else {}
        attempt = command.get("attempt", -1)
        if attempts is not None and attempt not in (-1, *attempts):
            continue
        at_step = command.get("at_step")
        step = at_step if isinstance(at_step, int) else -1
        words = _command_words(command) if command else _detail_words(one.action, given, details)
        weight = COMMAND if one.action.startswith("command.") else PERSON
        found.append(Happening(time=one.time, step=step, what=f"{one.actor}: {words}", weight=weight))
    return found


def _command_words(command: dict[str, Any]) -> str:
    kinds = command.get("kinds") or command.get("changed") or command.get("action") or ""
    named = ", ".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)
    ranks = command.get("ranks") or []
    whose = f" on {rank_words(ranks)}" if ranks and all(isinstance(rank, int) for rank in ranks) else ""
    for_steps = f", for {command['for_steps']} steps" if command.get("for_steps") else ""
    reason = f" ({command['reason']})" if command.get("reason") else ""
    return f"{command.get('type', 'command')} {command.get('id', '')}: {named}{whose}{for_steps}{reason}"


def _detail_words(action: str, command: object, details: dict[str, Any]) -> str:
    if isinstance(command, str):
        answers = details.get("answers")
        said = ", ".join(f"{num} {word}" for word, num in answers.items()) if isinstance(answers, dict) else ""
        why = f": {details['reason']}" if details.get("reason") else ""
        return f"{action.removeprefix('command.')} {command}{f' ({said})' if said else ''}{why}"
    return f"{action} {json.dumps(details, default=str)}" if details else action


def _changed(revision: Incident, what: str) -> Happening:
    step = max(revision.last_step, revision.active_step) if revision.revision > 1 else revision.opened_step
    return Happening(
        time=revision.time, step=step, what=what, weight=_WEIGHTS[revision.severity], tone=revision.severity.value
    )


def _in_order(happenings: Sequence[Happening], reading: SpoolReading) -> list[Happening]:
    """Return them by time; what has none stands where its step does."""
    moments = [(one.step, one.time) for one in happenings if one.step >= 0 and one.time > 0]
    moments += [(one.end.step, one.time) for one in reading.steps]
    # Of a step that several ranks, or attempts, had: its end for the first of them.
    first: dict[int, float] = {}
    for step, time in sorted(moments):
        first.setdefault(step, time)
    steps = sorted(first)

    def moment(one: Happening) -> tuple[float, int]:
        if one.time > 0 or one.step < 0:
            return one.time, one.step
        at = bisect.bisect_right(steps, one.step) - 1
        return (first[steps[at]] if at >= 0 else 0.0), one.step

    return sorted((msgspec.structs.replace(one, what=shown(one.what)) for one in happenings), key=lambda one: moment(one))
