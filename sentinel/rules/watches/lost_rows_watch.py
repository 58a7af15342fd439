"""LossWatch: a rule on what ranks measured and the judge never saw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.detect.lost_rows import LostRows
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches.lost_rows_wording import how_lost, lost, over
from sentinel.rules.watches.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Collection

    from sentinel.decision import Tick
    from sentinel.rules.watches.episodes import EndedEpisode
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import StepView

LONGEST_S = 3600.0
"""Where losses go on for so long, by the clocks of the ranks, their end is not waited for to tell of them. Too small: what
was lost while a daemon was away is told in parts; too large: of one that never keeps up it is told late."""
_ONE = np.zeros(1, dtype=np.int64)
"""The only episode that can be open: what is lost at one time, on however many ranks, is reported once."""


class Lost(msgspec.Struct):
    """What was lost since an episode began."""

    first_step: int = -1
    last_step: int = -1
    num_rows: int = 0
    num_finite: int = 0
    """Of them, rows known to hold no NaN and no infinity."""
    num_sent: int = 0
    """Rows that these ranks sent in these steps, lost or not."""
    num_steps_gone: int = 0
    """Steps of which nothing is left, not even their end; counted on each rank."""
    ranks: list[int] = []
    lost_to: list[str] = []
    """Why: `EndStep.lost_to`, or `frames` where frames were damaged or missing."""
    untold: Anomaly | None = None
    """What is said of it if nothing comes any more; None: it was said, or is not worth it."""
    untold_since: float = 0.0
    """Time of the first step for which it was said later; 0: there is none."""

    def add(self, first_step: int, last_step: int, rank: int, num_rows: int, lost_to: str) -> None:
        """Add rows of one rank."""
        self.first_step = first_step if self.first_step < 0 else min(self.first_step, first_step)
        self.last_step = max(self.last_step, last_step)
        self.num_rows += num_rows
        self.ranks = sorted({*self.ranks, rank})
        self.lost_to = sorted({*self.lost_to, *(one for one in lost_to.split(",") if one)})


class LossWatch(Watch):
    """All ranks of each step. One episode at a time, reported once, with what was lost up to then; its end reports the sum.

    While steps behind it are known already, or rows were cut for nobody read them, as when a daemon reads what was written
    without it, telling waits for the last of the steps that lost something, or for the end of the run: then the first word
    has the whole count.
    """

    keeps_reported = True

    def __init__(self, rule: Rule, detector: LostRows) -> None:
        super().__init__(rule, detector, "rows_lost", "losses")
        self._lost = Lost()

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the records of one step."""
        self.num_points += len(view.parts)
        has_lost = self._take(view)
        known = self._lost
        found: list[Anomaly] = []
        is_due = self.detector.is_worth_reporting(known.num_rows, known.num_steps_gone)
        is_ahead = view.decision is not None and view.decision.is_catching_up
        if len(self.episodes):
            if has_lost:
                self.episodes.continue_at(self.episodes.locate(_ONE), view.step)
            if has_lost and not is_ahead and self._is_graver():
                anomaly = self._anomaly(view)
                found += [anomaly, self._end(self.episodes.raise_to(0, anomaly), view, anomaly.id)]
            elif not has_lost:
                found += self.quiet(view)
                if not len(self.episodes):
                    self._lost = Lost()
        elif is_due and has_lost and is_ahead and view.time - (known.untold_since or view.time) < LONGEST_S:
            known.untold, known.untold_since = self._anomaly(view), known.untold_since or view.time
        elif is_due:
            found.append(self._open(view))
        return found

    def judge_tick(self, tick: Tick, accused: Collection[int]) -> list[Anomaly]:
        """Return the record of what was not told yet, where the run is over: its newest attempt, as far as it was judged."""
        anomaly = self._lost.untold
        if tick.ended is None or anomaly is None or tick.attempt < anomaly.attempt:
            return []
        self._lost.untold = None
        self.episodes.open(_ONE, self._lost.last_step, np.array([True]), [anomaly])
        return [anomaly]

    def stop(self, view: StepView) -> list[Anomaly]:
        """Return the records of what was lost and not reported, and of its end: a new attempt began."""
        known = self._lost
        found = []
        if not len(self.episodes) and self.detector.is_worth_reporting(known.num_rows, known.num_steps_gone):
            found.append(self._open(view))
        found += super().stop(view)
        self._lost = Lost()
        return found

    def _take(self, view: StepView) -> bool:
        """Add what the ranks lost of a step, and say whether that was anything."""
        before = self._lost.num_rows, self._lost.num_steps_gone
        for rank, health in view.health:
            if health.code == "steps_dropped":
                first = health.first_step if health.first_step >= 0 else view.step
                self._lost.add(first, max(health.step, first), rank, health.num_rows, health.lost_to)
                self._lost.num_steps_gone += health.count
        for one in view.decision.ranks if view.decision is not None else ():
            if one.num_lost:
                self._lost.add(view.step, view.step, one.rank, one.num_lost, one.lost_to)
                self._lost.num_finite += one.num_finite_lost
                self._lost.num_sent += one.num_rows + one.num_lost
        return before != (self._lost.num_rows, self._lost.num_steps_gone)

    def _is_graver(self) -> bool:
        onset = self.episodes.onset[0]
        return self._severity().level > onset.severity.level

    def _severity(self) -> Severity:
        known = self._lost
        if self.detector.is_grave(known.num_rows, known.num_finite, known.num_steps_gone):
            return self.rule.severity
        return min(self.rule.severity, Severity.WARNING, key=lambda severity: severity.level)

    def _open(self, view: StepView) -> Anomaly:
        anomaly = self._anomaly(view)
        self._lost.untold = None
        self.episodes.open(_ONE, view.step, np.array([True]), [anomaly])
        return anomaly

    def _end(self, ended: EndedEpisode, view: Any, goes_on_as: str = "") -> Anomaly:
        end = super()._end(ended, view, goes_on_as)
        if goes_on_as:
            return end
        return msgspec.structs.replace(end, message=over(self._lost), value=float(self._lost.num_rows))

    def _anomaly(self, view: StepView) -> Anomaly:
        known = self._lost
        rank = known.ranks[0] if len(known.ranks) == 1 else None
        place = view.places.get(rank) if rank is not None else None
        descriptor = view.layout.descriptors.get(known.ranks[0])
        settings = descriptor.settings if descriptor is not None else {}
        return Anomaly(
            id=anomaly_id(view.run, view.attempt, view.step, None, rank, f"losses/{known.first_step}", self.rule.name),
            run=view.run,
            attempt=view.attempt,
            rank=rank,
            ranks=tuple(known.ranks),
            step=min(max(known.first_step, 0), view.step),
            micro_step=None,
            pp_stage=0 if place is None else place.pp_rank,
            vpp_stage=0,
            call_id=None,
            tag_name="rows",
            kind="health",
            statistic=self.statistic,
            rule=self.rule.name,
            detector=self.rule.detector,
            severity=self._severity(),
            value=float(known.num_rows),
            score=1.0,
            message=lost(known, how_lost(known, settings)),
            time=view.time,
        )

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the whole step."""
        plan.judge_whole(self.judge)

    def series_keys(self) -> object:
        """Return what is lost and not over."""
        return msgspec.to_builtins(self._lost)

    def take_series_keys(self, keys: Any) -> None:
        """Take it back."""
        self._lost = msgspec.convert(keys, Lost)
