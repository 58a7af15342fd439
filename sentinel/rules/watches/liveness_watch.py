"""LivenessWatch: a rule on ranks and the time that passes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.detect import LivenessDetector, Scores
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.watch import Watch
from sentinel.run_end import GOODBYE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sentinel.decision import RankFacts, Tick
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import StepView

_ONE = np.zeros(1, dtype=np.int64)
"""The only episode that can be open: what hangs together is one hang."""


class _Then(msgspec.Struct, frozen=True):
    """Where a rank stood when it was blamed."""

    rank: int
    incarnation: bytes
    step: int
    call_id: int
    activity: str


class LivenessWatch(Watch):
    """All ranks of the newest attempt. It learns from closed steps, and is asked at ticks alone.

    One episode at a time: it names the ranks to blame, and lasts until each of them sends frames and moves again, or is
    replaced. Others that fall silent meanwhile are a new onset.
    """

    keeps_reported = True

    def __init__(self, rule: Rule, detector: LivenessDetector) -> None:
        super().__init__(rule, detector, "idle_s", "liveness")
        self._slot_of: dict[int, int] = {}
        self._ended_at: dict[int, tuple[bytes, float]] = {}
        """Rank -> (incarnation, when it ended its last step by its own monotonic clock)."""
        self._open: list[_Then] = []
        """Who is blamed just now."""
        self._reason = ""

    # -- what it learns ----------------------------------------------------------------------------------------------

    def take_place(self, plan: LayoutPlan) -> None:
        """Learn from closed steps; it judges at ticks."""
        plan.learn_from(self.learn)

    def learn(self, view: StepView) -> None:
        """Take in a closed step."""
        ended = [(part, part.end_step.step_time_s) for part in view.parts if part.end_step is not None]
        if not ended:
            return
        ranks = [part.rank for part, _ in ended]
        # As a rule these are all ranks, in the order in which they were first met.
        slots = None if ranks == list(self._slot_of) else self._slots(ranks)
        step_s = np.array([seconds if seconds > 0 else math.nan for _, seconds in ended])
        pauses_s = []
        for one, _ in ended:
            incarnation, before = self._ended_at.get(one.rank, (b"", 0.0))
            is_known = incarnation == one.incarnation and one.ended_mono_s > before
            pauses_s.append(one.ended_mono_s - before if is_known else math.nan)
            self._ended_at[one.rank] = one.incarnation, one.ended_mono_s
        part = self._gather(slots)
        self.detector.learn_step(step_s, np.array(pauses_s), part)
        self._scatter(part, slots)

    def stop(self, view: StepView) -> list[Anomaly]:
        """Return the end record of the open episode: a new attempt began."""
        self._open, self._ended_at = [], {}
        return [
            msgspec.structs.replace(one, message=f"{_named(one)}: over, attempt {view.attempt} began")
            for one in super().stop(view)
        ]

    @property
    def blamed_ranks(self) -> tuple[int, ...]:
        """Who is blamed just now."""
        return tuple(one.rank for one in self._open)

    @property
    def accused_ranks(self) -> tuple[int, ...]:
        """Who is blamed just now so that somebody was called."""
        is_grave = any(one.severity is Severity.CRITICAL for one in self.episodes.onset.values())
        return self.blamed_ranks if is_grave else ()

    # -- what it says ------------------------------------------------------------------------------------------------

    def has_news(self, ranks: Sequence[RankFacts], now: float, accused: Collection[int] = ()) -> bool:
        """Return whether a tick of these facts would say anything; changes nothing that a judgement depends on."""
        if self._open and self._why_over(ranks, now):
            return True
        scores, blamed = self._score(ranks, now)
        return bool(blamed) and self._is_news(scores, blamed, ranks)

    def judge_tick(self, tick: Tick, accused: Collection[int] = ()) -> list[Anomaly]:
        """Return the records of one tick: an end, an onset, or an onset that goes beyond what was said."""
        found: list[Anomaly] = []
        if tick.ended is not None:
            return self._close(tick, "the run is over") if self._open else []
        why = self._why_over(tick.ranks, tick.now) if self._open else ""
        if why:
            found += self._close(tick, why)
        scores, blamed = self._score(tick.ranks, tick.now)
        self.num_points += len(tick.ranks)
        if not blamed or not self._is_news(scores, blamed, tick.ranks):
            return found
        anomaly = self._anomaly(tick, scores, blamed)
        if self._open:
            found += self._close(tick, f"goes on as {anomaly.id}")
        self.episodes.open(_ONE, anomaly.step, np.array([True]), [anomaly])
        self._open = [
            _Then(one.rank, one.incarnation, one.step, one.call_id, one.activity)
            for one in (tick.ranks[at] for at in blamed)
        ]
        self._reason = str(scores.evidence["reason"][blamed[0]])
        return [anomaly, *found]

    def _score(self, ranks: Sequence[RankFacts], now: float) -> tuple[Scores, list[int]]:
        if not ranks:
            return Scores.of(np.zeros(0), np.zeros(0)), []
        slots = self._slots([one.rank for one in ranks])
        scores = self.detector.score_at(_columns(ranks, now), now, self._gather(slots))
        blamed = np.flatnonzero(scores.score >= 1.0).tolist()
        watched = set(self.rule.match.rank)
        return scores, [at for at in blamed if not watched or ranks[at].rank in watched]

    def _is_news(self, scores: Scores, blamed: Sequence[int], ranks: Sequence[RankFacts]) -> bool:
        if not self._open:
            return True
        known = {one.rank for one in self._open}
        # While a hang lasts others give up, time out and are killed: only those that fall silent as well are reported.
        is_quiet = scores.evidence["reason"][blamed[0]] in ("silent", "stopped")
        return is_quiet and any(ranks[at].rank not in known for at in blamed)

    def _why_over(self, ranks: Sequence[RankFacts], now: float) -> str:
        """Return why the open episode is over, in words; empty: it is not."""
        here = {one.rank: one for one in ranks}
        whys = []
        for then in self._open:
            one = here.get(then.rank)
            if one is None or one.incarnation != then.incarnation:
                whys.append("replaced")
            elif self._reason == "left":
                return ""
            elif self._reason == "stopped":
                # Its heartbeats came until shortly before it was stopped; and one that is killed then never went on.
                if one.is_stopped or one.end is not None or now - one.received_at >= _BEAT_S:
                    return ""
                whys.append("goes on")
            elif one.left:
                whys.append(f"left ({one.left})")
            elif not one.is_live or now - one.received_at >= _RECEIVED_S:
                return ""
            elif self._reason == "silent":
                whys.append("heard again")
            elif (one.step, one.call_id, one.activity) == (then.step, then.call_id, then.activity):
                return ""
            else:
                whys.append(f"moves again, step {one.step}")
        return ", ".join(dict.fromkeys(whys))

    def _close(self, tick: Tick, why: str) -> list[Anomaly]:
        self._open = []
        ended = []
        for one in self.episodes.end_all():
            at = msgspec.structs.replace(tick, step=max(tick.step, one.onset.step))
            ended.append(msgspec.structs.replace(self._end(one, at), message=f"{_named(one.onset)}: {why}"))
        return ended if self.rule.episode_quiet_steps else []

    def _anomaly(self, tick: Tick, scores: Scores, blamed: Sequence[int]) -> Anomaly:
        facts = [tick.ranks[at] for at in blamed]
        first = facts[0]
        evidence = scores.evidence
        reason = str(evidence["reason"][blamed[0]])
        worst = max(blamed, key=lambda at: (float(scores.score[at]), -at))
        seconds, limit = float(evidence["seconds"][worst]), float(scores.baseline[worst])
        waiting = [tick.ranks[at].rank for at in np.flatnonzero(evidence["is_waiting"])]
        is_sure = bool(evidence["is_sure"][blamed].all())
        ranks = tuple(one.rank for one in facts)
        alone = len(facts) == 1
        step = min(max(one.step, 0) for one in facts)
        rank = first.rank if alone else None
        statistic = {"silent": "silent_s", "stopped": "stopped_s"}.get(reason, "idle_s")
        if reason == "silent" and all(one.unheard_node for one in facts):
            statistic = "unheard_s"
        return Anomaly(
            # A rank may stop twice at one place: the number of the decision distinguishes the two.
            id=anomaly_id(tick.run, tick.attempt, step, None, rank, f"liveness/{tick.seq}/{statistic}", self.rule.name),
            run=tick.run,
            attempt=tick.attempt,
            rank=rank,
            ranks=ranks,
            step=step,
            micro_step=first.micro_step if alone and first.micro_step >= 0 else None,
            pp_stage=first.pp_stage if alone else 0,
            vpp_stage=0,
            call_id=first.call_id if alone else None,
            tag_name=first.module if alone and first.module else "heartbeat",
            kind="health",
            statistic=statistic,
            rule=self.rule.name,
            detector=self.rule.detector,
            severity=self._severity(bool(evidence["is_idle"][blamed].all())),
            value=seconds,
            baseline=limit,
            score=float(scores.score[worst]),
            message=wording.stale(reason, facts, seconds, limit, waiting, is_sure),
            group_mates=tuple(one.rank for one in tick.ranks),
            time=max(one.time for one in facts),
        )

    def _severity(self, is_idle: bool) -> Severity:
        # A run that is over, or paused by hand in a notebook, sends the same as one that hangs between two steps.
        return min(self.rule.severity, Severity.WARNING, key=lambda s: s.level) if is_idle else self.rule.severity

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def _slots(self, ranks: Sequence[int]) -> np.ndarray:
        slots = np.array([self._slot_of.setdefault(rank, len(self._slot_of)) for rank in ranks], dtype=np.int64)
        self._grow(len(self._slot_of))
        return slots

    def series_keys(self) -> object:
        """Return the ranks in order of slots, and what is open."""
        return {
            "ranks": list(self._slot_of),
            "ended_at": self._ended_at,
            "open": self._open,
            "reason": self._reason,
        }

    def take_series_keys(self, keys: Any) -> None:
        """Take back what `series_keys` gave."""
        self._slot_of = {rank: slot for slot, rank in enumerate(keys["ranks"])}
        self._ended_at = msgspec.convert(msgspec.to_builtins(keys["ended_at"]), dict[int, tuple[bytes, float]], strict=False)
        self._open = [msgspec.convert(msgspec.to_builtins(one), _Then, strict=False) for one in keys["open"]]
        self._reason = keys["reason"]


_BEAT_S = 1.5
"""Seconds after its newest heartbeat in which a rank goes on: heartbeats are one second apart, and may come half a second
late."""
_RECEIVED_S = 5.0
"""Seconds after its newest heartbeat in which a rank counts as alive: heartbeats are one second apart. Smaller: a busy
machine's late heartbeats make it silent again; larger: one that died stays alive for longer."""


def _columns(ranks: Sequence[RankFacts], now: float) -> dict[str, np.ndarray]:
    names = (
        "received_at", "moved_at", "is_live", "step", "call_id", "num_calls", "activity", "has_stepped", "is_waiting",
        "pp_stage", "left",
    )  # fmt: skip
    columns = {name: np.array([getattr(one, name) for one in ranks]) for name in names}
    columns["is_stopped"] = np.array([one.is_stopped for one in ranks], dtype=bool)
    columns["has_died"] = np.array([one.end is not None and one.end.how != GOODBYE for one in ranks], dtype=bool)
    # A rank that has sent nothing yet may be the one that works.
    is_whole = len(ranks) >= max(one.world_size for one in ranks) > 0
    waits = [now - one.waiting_at if is_whole and one.waiting_at is not None else 0.0 for one in ranks]
    columns["waits_s"] = np.array(waits)
    return columns


def _named(onset: Anomaly) -> str:
    """Return what an episode's end is about: the ranks that were blamed."""
    return wording.ranks(onset.ranks)
