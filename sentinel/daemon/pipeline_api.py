"""`/api/v1/pipeline`: one step as its ranks ran it, and an incident's anomalies along the causal order; bounded in all."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.daemon.kept_steps import KeptSteps, LookedUpStep
from sentinel.daemon.series_api import Busy, whole_number
from sentinel.errors import MALFORMED, ConfigError, NotThere
from sentinel.explain.cascade import cascade_of
from sentinel.explain.drawing import rank_words, way
from sentinel.explain.pass_order import MicroPass, RankOrder, places_of, words_of
from sentinel.explain.spread import SpreadEvent, spread_of
from sentinel.incident import Incident
from sentinel.known_words import nearest
from sentinel.messages import EndStep
from sentinel.order.causal import sort_key
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

READ_S = 10.0
"""Seconds that spools are read for one answer; a bound on what is taken from whoever judges."""
WAIT_S = 10.0
"""One step is looked up at a time; the next waits so long."""
SINGLE_RANKS = 64
"""Ranks up to which each has a row of its own; past it those that did alike, and fared alike, share one."""
MOST_ROWS = 256
MOST_EVENTS = 500
MOST_WAITS = 40
MOST_LISTED = 64
"""Rows of an event that are listed."""
PARAMETERS = ("run", "step", "incident")

EQUAL_WIDTHS = (
    "When a pass began and ended is not recorded, so that the order alone is drawn: each pass is as wide as the others, and "
    "stands as early as the program order of its rank and the way of its micro-step through the stages allow."
)
FOLDED = (
    "The micro-steps of this step are folded into one row each, so that their order is not known. per_micro_step: true in "
    "the trainer's configuration keeps them apart."
)
ROWS_AWAY = (
    "What {ranks} recorded in this step lies on their machines: `sentinel node` and `sentinel worker` send the rows of what "
    "is looked at closely alone, so that the order of passes is not known. With `sentinel ship` to the join it is."
)
NO_WAITS = "No rank recorded how long it waited for others in this step."
NO_CALLS = (
    "Who waited for whom, call by call, is known where probes: {comm: {log_only: true}} in the trainer's configuration "
    "records the calls of torch.distributed."
)


class PipelineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for."""

    run: str
    step: int | None = None
    """None: that in which the incident opened, else the newest that was judged."""
    incident: str = ""
    """Empty: what was found in the step, of any incident."""

    @classmethod
    def parse(cls, parameters: Sequence[tuple[str, str]]) -> PipelineRequest:
        """Return the request that the parameters of a URL are. ConfigError says what was expected."""
        given: dict[str, list[str]] = {}
        for name, text in parameters:
            if name not in PARAMETERS:
                raise ConfigError(f'unknown parameter "{name[:80]}"{nearest(name[:80], PARAMETERS)}')
            given.setdefault(name, []).append(text)
            if len(given[name]) > 1:
                raise ConfigError(f"{name}: expected it once, got it {len(given[name])} times")
        if "run" not in given:
            raise ConfigError("run: expected the name of a run, got none")
        step = whole_number(given, "step", 0) if "step" in given else None
        return cls(run=given["run"][0], step=step, incident=given.get("incident", [""])[0])


class PipelineSource(Protocol):
    """What of a served run is asked."""

    name: str
    paths: RunPaths
    journal: Journal


class PipelineQueries:
    """Answers requests, from any thread, one at a time: looking a step up reads a file of every rank."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._steps = KeptSteps()

    def answer(self, run: PipelineSource, request: PipelineRequest, newest: int | None) -> dict[str, Any]:
        """Return the step, and what was found in it. newest: the step that was judged last; None: none was.

        NotThere for an incident that the run does not have; Busy while another step is looked up.
        """
        revisions = _revisions(run, request.incident)
        opened = revisions[-1].opened_step if revisions else newest
        asked = request.step if request.step is not None else opened
        members, causes, num_found = _found(run, revisions, asked)
        recorded, notes = self._recorded(run, asked, newest)
        return _answer(request, asked, recorded, spread_of(members, causes), num_found, notes) | {
            "way": _way(members, causes)
        }

    def _recorded(self, run: PipelineSource, asked: int | None, newest: int | None) -> tuple[LookedUpStep | None, list[str]]:
        """Return the step as it lies in the spool, else the newest judged one; and what is to be said of it."""
        deadline = time.monotonic() + READ_S
        notes: list[str] = []
        for step in dict.fromkeys(one for one in (asked, newest) if one is not None):
            found = self._steps.known(run.paths.run_dir, step) or self._looked_up(run.paths.run_dir, step, deadline)
            if found.num_unread:
                seconds = f"the spools were read for {READ_S:g} s"
                notes.append(f"Of {found.num_unread} processes nothing is here: {seconds}.")
            if found.orders:
                return found, notes
            if step == asked:
                there = "" if newest in (None, asked) else f" What is drawn is the schedule of step {newest}."
                notes.append(f"Step {asked} is no longer in the spool, or no rank recorded it.{there}")
        return None, notes

    def _looked_up(self, run_dir: Path, step: int, deadline: float) -> LookedUpStep:
        if not self._asking.acquire(timeout=WAIT_S):
            raise Busy("another step is being looked up; try again in a moment")
        try:
            # Whoever waited may have waited for this one.
            return self._steps.known(run_dir, step) or self._steps.look_up(
                run_dir, step, lambda: time.monotonic() < deadline
            )
        finally:
            self._asking.release()


def _revisions(run: PipelineSource, incident: str) -> list[Incident]:
    if not incident:
        return []
    bodies = run.journal.found.incident_revisions(incident)
    if not bodies:
        raise NotThere(
            f'incident "{incident[:80]}": expected one of run "{run.name}", got none; what is older than the retention is '
            "deleted"
        )
    return [msgspec.json.decode(body, type=Incident) for body in bodies]


def _found(
    run: PipelineSource, revisions: Sequence[Incident], step: int | None
) -> tuple[list[Anomaly], frozenset[str], int]:
    """Return the anomalies of an incident, the first in the causal order; without one those of a step; and how many."""
    if revisions:
        causes = revisions[-1].first_causes
        ids = dict.fromkeys(one for revision in revisions for one in (*revision.first_causes, *revision.members))
        bodies = run.journal.found.anomaly_bodies([*dict.fromkeys((*causes, *ids))][: 4 * MOST_EVENTS])
        num_found = max(len(ids), revisions[-1].num_members)
    elif step is not None:
        causes = ()
        bodies = [body for _, body in run.journal.found.newest_anomalies(4 * MOST_EVENTS, step=step)]
        num_found = len(bodies)
    else:
        return [], frozenset(), 0
    members = sorted(filter(None, map(_anomaly, bodies)), key=sort_key)
    onsets = [one for one in members if one.event == "onset"]
    num_found -= 0 if revisions else len(members) - len(onsets)
    return onsets[:MOST_EVENTS], frozenset(causes), max(num_found, len(onsets))


def _anomaly(body: bytes) -> Anomaly | None:
    try:
        return msgspec.json.decode(body, type=Anomaly)
    except MALFORMED:
        return None


def _way(members: Sequence[Anomaly], causes: frozenset[str]) -> list[str]:
    if not causes:
        return []
    cascade = cascade_of(members, [one for one in members if one.id in causes])
    return [] if cascade is None else [line.strip() for line in way(cascade, 10_000)]


def _answer(
    request: PipelineRequest,
    asked: int | None,
    recorded: LookedUpStep | None,
    events: Sequence[SpreadEvent],
    num_found: int,
    notes: list[str],
) -> dict[str, Any]:
    is_recorded = recorded is not None and bool(recorded.orders)
    orders = list(recorded.orders) if recorded is not None and is_recorded else _orders_of(events)
    places = places_of(orders)
    ends = recorded.ends if recorded is not None else {}
    distinct: dict[tuple[tuple[MicroPass, ...], tuple[int, ...]], int] = {}
    order_at = {one.rank: distinct.setdefault((one.passes, places[one.rank]), len(distinct)) for one in orders}
    groups = _groups(orders, order_at, events)
    row_of = {rank: at for at, ranks in enumerate(groups) for rank in ranks}
    by_rank = {one.rank: one for one in orders}
    waits = recorded.waits if recorded is not None else ()
    return {
        "run": request.run,
        "incident": request.incident or None,
        "asked_step": asked,
        "step": recorded.step if is_recorded and recorded is not None else asked,
        "is_recorded": is_recorded,
        "attempt": recorded.attempt if recorded is not None else 0,
        "num_ranks": len(orders),
        "num_columns": max((at[-1] + 1 for at in places.values() if at), default=0),
        "orders": [
            [[one.way, one.vpp_stage, one.micro_step, at] for one, at in zip(passes, columns, strict=True)]
            for passes, columns in distinct
        ],
        "orders_in_words": [words_of(passes) for passes, _ in distinct],
        "rows": [_row(ranks, by_rank[ranks[0]].pp_stage, order_at[ranks[0]], ends) for ranks in groups[:MOST_ROWS]],
        "num_rows": len(groups),
        "events": [_event(one, row_of) for one in events],
        "num_events": num_found,
        "waits": msgspec.to_builtins(waits[:MOST_WAITS]),
        "notes": [*notes, *_away(recorded), *_notes(orders, ends, is_recorded, bool(waits))],
    }


def _orders_of(events: Sequence[SpreadEvent]) -> list[RankOrder]:
    """Return what of each rank's order the anomalies alone show: the passes in which something of it was found."""
    passes: dict[int, dict[MicroPass, None]] = {}
    stages: dict[int, tuple[int, set[int]]] = {}
    for one in events:
        for rank in one.ranks:
            own = passes.setdefault(rank, {})
            stages.setdefault(rank, (one.pp_stage, set()))[1].add(one.vpp_stage)
            if one.way and one.micro_step is not None:
                own.setdefault(MicroPass(one.way, one.vpp_stage, one.micro_step))
    return [
        RankOrder(
            rank=rank, lane=(rank,), pp_stage=stages[rank][0],
            depths=tuple((chunk, chunk) for chunk in sorted(stages[rank][1])), passes=tuple(passes[rank]),
        )
        for rank in sorted(passes)
    ]  # fmt: skip


def _groups(orders: Sequence[RankOrder], order_at: Mapping[int, int], events: Sequence[SpreadEvent]) -> list[list[int]]:
    """Return the ranks of each row: stage by stage; of many ranks those that did alike, and fared alike, together."""
    if len(orders) <= SINGLE_RANKS:
        return [[one.rank] for one in sorted(orders, key=lambda one: (one.pp_stage, one.rank))]
    hits: dict[int, set[tuple[object, ...]]] = {}
    for one in events:
        for rank in one.ranks:
            hits.setdefault(rank, set()).add((one.step, one.phase, one.vpp_stage, one.micro_step, one.mark))
    groups: dict[tuple[object, ...], list[int]] = {}
    for order in orders:
        key = (order.pp_stage, order_at[order.rank], frozenset(hits.get(order.rank, ())))
        groups.setdefault(key, []).append(order.rank)
    # Few are named before the many that are like each other.
    return [ranks for _, ranks in sorted(groups.items(), key=lambda one: (one[0][0], len(one[1]), one[1][0]))]


def _row(ranks: Sequence[int], pp_stage: int, order: int, ends: Mapping[int, EndStep | None]) -> dict[str, Any]:
    ended = [end for rank in ranks if (end := ends.get(rank)) is not None]
    waits = [end.wait_s for end in ended if end.wait_s >= 0]
    return {
        "label": rank_words(ranks),
        "first_rank": ranks[0],
        "num_ranks": len(ranks),
        "pp_stage": pp_stage,
        "order": order,
        "step_time_s": max((end.step_time_s for end in ended), default=None),
        "wait_s": [min(waits), max(waits)] if waits else None,
        "num_ended": len(ended),
    }


def _event(one: SpreadEvent, row_of: Mapping[int, int]) -> dict[str, Any]:
    rows = Counter(at for rank in one.ranks if (at := row_of.get(rank)) is not None and at < MOST_ROWS)
    made: dict[str, Any] = msgspec.to_builtins(one)
    return made | {
        "ranks": rank_words(one.ranks),
        "num_ranks": len(one.ranks),
        "rows": sorted(rows)[:MOST_LISTED],
    }


def _away(recorded: LookedUpStep | None) -> list[str]:
    if recorded is None or not recorded.num_without_rows:
        return []
    num_ranks, num_away = len(recorded.orders), recorded.num_without_rows
    return [ROWS_AWAY.format(ranks="the ranks" if num_away == num_ranks else f"{num_away} of {num_ranks} ranks")]


def _notes(orders: Sequence[RankOrder], ends: Mapping[int, EndStep | None], is_recorded: bool, has_waits: bool) -> list[str]:
    notes = []
    if any(one.passes for one in orders):
        notes.append(EQUAL_WIDTHS)
    if any(one.is_folded for one in orders):
        notes.append(FOLDED)
    if is_recorded and len(orders) > 1:
        if not any(end is not None and end.wait_s >= 0 for end in ends.values()):
            notes.append(NO_WAITS)
        if not has_waits:
            notes.append(NO_CALLS)
    return notes
