"""EndWatch: a rule on how ranks, and the run, end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.detect.ended import RunEnded
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.watch import Watch
from sentinel.run_end import FOLLOWS, GOODBYE, SILENCE, RankEnd, RunEnd, first_to_go

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sentinel.decision import RankFacts, Tick
    from sentinel.step_view import StepView

_ONE = np.zeros(1, dtype=np.int64)
MAX_REPORTED = 65536
"""Newest incarnations of which it is remembered that their end was reported, a bound on memory: eight attempts of 8,192
ranks."""


class EndWatch(Watch):
    """One end of a run is one anomaly: reported when the first rank is gone and others live, else when the run is over.

    What a notebook's cell raises is reported too, though the process lives on; when it trains again, that is over.

    Its episode lasts while others live; where no rank sent anything any more, until one does again.
    """

    keeps_reported = True

    detector: RunEnded

    def __init__(self, rule: Rule, detector: RunEnded) -> None:
        super().__init__(rule, detector, "ended", "end")
        self._reported: dict[bytes, None] = {}
        """Incarnations that are part of an end that was reported, oldest first."""
        self._open: dict[int, bytes] = {}
        """Rank -> incarnation of those whose end is the open episode."""

    def stop(self, view: StepView) -> list[Anomaly]:
        """Return the end record of the open episode: a new attempt began."""
        self._open = {}
        return [msgspec.structs.replace(one, message=f"attempt {view.attempt} began") for one in super().stop(view)]

    def has_news(self, ranks: Sequence[RankFacts], now: float, accused: Collection[int]) -> bool:
        """Return whether a tick of these facts, in which the run is not over, would say anything; changes nothing.

        accused: ranks of which an open episode says that the others wait for them.
        """
        if self._open and self._why_over(ranks):
            return True
        return not accused and self._died(ranks, now) is not None

    def judge_tick(self, tick: Tick, accused: Collection[int]) -> list[Anomaly]:
        """Return the records of one tick: that a rank went first while others live, that the run is over, that it is not.

        While a rank is accused of a hang, ranks that give up follow from it: with the run that incident ends, and says so.
        """
        found: list[Anomaly] = []
        self.num_points += len(tick.ranks)
        if tick.ended is not None:
            is_known = bool(accused) or any(one.incarnation in self._reported for one in tick.ranks)
            severity = self.detector.severity(tick.ended, self.rule.severity, late_s=tick.ended.found_late_s)
            if self._open:
                found += self._close(tick, f"the run is over: {wording.run_ended_briefly(tick.ended)}")
            if severity is not None and not is_known:
                found.append(self._anomaly(tick, tick.ended.rank, tick.ended, severity))
                if tick.ended.how == SILENCE and not tick.ended.is_restarted:
                    silent = [one for one in tick.ranks if one.end is not None and one.end.how == SILENCE]
                    self._begin(found[-1], silent)
            return found
        why = self._why_over(tick.ranks) if self._open else ""
        if why:
            found += self._close(tick, why)
        died = None if accused else self._died(tick.ranks, tick.now)
        if died is not None:
            rank, end, severity = died
            found.append(self._anomaly(tick, rank, end, severity))
            self._begin(found[-1], [one for one in tick.ranks if one.end is not None])
        return found

    def _died(self, ranks: Sequence[RankFacts], now: float) -> tuple[int | None, RankEnd, Severity] | None:
        """Return the rank that went first, how, and how grave that is; None: nobody went, or it is known, or too early."""
        gone = [
            one for one in ranks if one.end is not None and one.end.how != GOODBYE and one.incarnation not in self._reported
        ]
        if not gone or all(one.end is not None and not one.end.is_at_prompt for one in ranks):
            return None
        age = now - min(one.ended_at for one in gone)
        ends = {one.rank: one.end for one in gone if one.end is not None}
        is_cause_missing = all(end.cause == FOLLOWS for end in ends.values())
        if age < (2.0 if is_cause_missing else 1.0) * self.detector.settle_s:
            return None
        if is_cause_missing:
            for one in ranks:
                silence = now - one.received_at
                if one.end is None and silence >= self.detector.unheard_s:
                    what = "its process is stopped" if one.is_stopped else f"nothing was heard for {silence:.0f} s"
                    ends[one.rank] = RankEnd(how=SILENCE, detail=what, time=one.time, step=one.step)
        left = {one.rank: one.end for one in ranks if one.end is not None and one.end.how == GOODBYE}
        first, cause = first_to_go({**left, **ends})
        end = cause or min(ends.values(), key=lambda end: end.time)
        severity = self.detector.severity(end, self.rule.severity)
        return None if severity is None else (first, end, severity)

    def _why_over(self, ranks: Sequence[RankFacts]) -> str:
        """Return why the open episode is over, in words; empty: it is not."""
        here = {one.rank: one for one in ranks}
        whys = []
        for rank, incarnation in self._open.items():
            one = here.get(rank)
            if one is None or one.incarnation != incarnation:
                whys.append("replaced")
            elif one.end is None:
                whys.append("heard again")
            else:
                return ""
        return f"{wording.ranks(list(self._open))}: {', '.join(dict.fromkeys(whys))}"

    def _begin(self, onset: Anomaly, gone: Sequence[RankFacts]) -> None:
        self.episodes.open(_ONE, onset.step, np.array([True]), [onset])
        self._open = {one.rank: one.incarnation for one in gone}

    def _close(self, tick: Tick, why: str) -> list[Anomaly]:
        for incarnation in self._open.values() if tick.ended is None else ():
            self._reported.pop(incarnation, None)  # Its next end is another.
        self._open = {}
        ended = []
        for one in self.episodes.end_all():
            at = msgspec.structs.replace(tick, step=max(tick.step, one.onset.step))
            ended.append(msgspec.structs.replace(self._end(one, at), message=why))
        return ended if self.rule.episode_quiet_steps else []

    def _anomaly(self, tick: Tick, rank: int | None, end: RunEnd | RankEnd, severity: Severity) -> Anomaly:
        self._reported.update(dict.fromkeys(one.incarnation for one in tick.ranks))
        while len(self._reported) > MAX_REPORTED:
            del self._reported[next(iter(self._reported))]
        first = next((one for one in tick.ranks if one.rank == rank), None)
        ranks = (rank,) if rank is not None else tuple(one.rank for one in tick.ranks if one.end is not None)
        return Anomaly(
            id=anomaly_id(tick.run, tick.attempt, max(end.step, 0), None, rank, f"end/{tick.seq}", self.rule.name),
            run=tick.run,
            attempt=tick.attempt,
            rank=rank,
            ranks=ranks,
            step=max(end.step, 0),
            micro_step=None,
            pp_stage=first.pp_stage if first is not None else 0,
            vpp_stage=0,
            call_id=None,
            tag_name="run",
            kind="health",
            statistic="ended",
            rule=self.rule.name,
            detector=self.rule.detector,
            severity=severity,
            value=None,
            message=wording.ended(rank, end, tick.ranks),
            group_mates=tuple(one.rank for one in tick.ranks),
            time=end.time or tick.time,
        )

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def series_keys(self) -> object:
        """Return the incarnations whose end was reported, and those of the open episode."""
        return {"reported": list(self._reported), "open": self._open}

    def take_series_keys(self, keys: Any) -> None:
        """Take back what `series_keys` gave."""
        kept = msgspec.convert(msgspec.to_builtins(keys), _EndWatchState, strict=False)
        self._reported, self._open = dict.fromkeys(kept.reported), kept.open


class _EndWatchState(msgspec.Struct):
    reported: list[bytes]
    open: dict[int, bytes]
