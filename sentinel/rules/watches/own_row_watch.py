"""OwnRowWatch: a rule with a past on each rank's own rows, micro-steps apart: how msProbe keys its series.

msProbe judges what one rank measured: nothing is merged over shards, copies or micro-batches, and a statistic is what torch
would give, NaN and infinities in it. Its compatibility mode does the same here; everything else judges logical tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel.anomaly import Anomaly, Severity
from sentinel.detect import Scores, SeriesDetector
from sentinel.moments import raw_statistic
from sentinel.record import NONE_ID
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.anomaly_records import tensor_anomaly, value_text
from sentinel.rules.watches.series_index import SeriesSelection
from sentinel.rules.watches.watch import LASTING_STEPS, AnomalousPoints, SeriesWatch, WatchPlan

if TYPE_CHECKING:
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import StepView

RANK_BITS, MICRO_BITS = 20, 16
"""A series is a number: tensor, rank, and micro-step + 1 (0: the step's folded row)."""


class OwnRowWatch(SeriesWatch):
    """Rows, one series for each (tensor, rank, micro-step)."""

    def __init__(self, rule: Rule, detector: SeriesDetector, statistic: str, kinds: frozenset[str]) -> None:
        super().__init__(rule, detector, statistic, "own row")
        self.kinds = kinds
        self._series = np.zeros(0, dtype=np.int64)
        """[num_series] the number of each series, rising."""
        self._slot = np.zeros(0, dtype=np.int64)
        """[num_series] its place in the state: new series come behind the old ones."""

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the rows of the tensors that the rule matches."""
        its = self.plan(plan.selection)
        plan.judge_rows(lambda view: self.judge(view, its))

    @property
    def row_kinds(self) -> frozenset[str]:
        """As of `Watch`."""
        return self.kinds

    def plan(self, selection: SeriesSelection) -> WatchPlan:
        """Return the numbers of the series by tensor, -1 where the rule does not look."""
        takes = selection.takes(self.rule.match, self.kinds)
        numbers = selection.shared(np.where(takes, selection.keys, np.int32(-1)))
        return WatchPlan(numbers[:0], numbers, False)

    def series_keys(self) -> object:
        """Return the series in order of slots; the tensors' numbers in them are those of the engine's SeriesIndex."""
        return self._series[np.argsort(self._slot)].tolist()

    def take_series_keys(self, keys: Any) -> None:
        """Take them back."""
        numbers = np.array(keys, dtype=np.int64)
        self._slot = np.argsort(numbers)
        self._series = numbers[self._slot]

    def judge(self, view: StepView, plan: WatchPlan) -> list[Anomaly]:
        """Return the records of one step."""
        view = view.with_rows_of(np.flatnonzero(plan.slots >= 0).tolist())
        at = self._rows_of(view, plan)
        if not at.size:
            return self.quiet(view)
        numbers = self._numbers(view, plan, at)
        values = raw_statistic(view.rows[at], self.statistic)
        found: list[Anomaly] = []
        # A module called twice in a micro-step has two rows: they are successive points of one series.
        while at.size:
            numbers_now, first = np.unique(numbers, return_index=True)
            found.extend(self._judge_rows(view, self._slots_of(numbers_now), at[first], values[first]))
            later = np.setdiff1d(np.arange(len(at)), first, assume_unique=True)
            at, numbers, values = at[later], numbers[later], values[later]
        return found + self.quiet(view)

    def _judge_rows(self, view: StepView, slots: np.ndarray, rows: np.ndarray, values: np.ndarray) -> list[Anomaly]:
        # Ends and streaks are looked up among slots in rising order.
        order = np.argsort(slots)
        slots, rows, values = slots[order], rows[order], values[order]
        scores, anomalous, settled = self._run(values, slots)
        at = np.flatnonzero(anomalous)
        if not at.size and settled is None and not len(self.episodes):
            return []
        points = _RowPoints(self, view, slots[at], rows[at], values[at], scores, at)
        rested = slots[settled] if settled is not None else slots[:0]
        return self._emit(view, slots, points, rested, self._corroborated(points, view))

    def _corroborated(self, points: _RowPoints, view: StepView) -> np.ndarray:
        """Return which points others agree with, as of logical tensors: enough different ones that rose afresh."""
        known = self.episodes.locate(points.slots)
        streak = np.where(known >= 0, self.episodes.streak[known] if len(self.episodes) else 0, 0)
        fresh = streak < LASTING_STEPS
        names = {view.tensors[int(one)].name for one in view.row_logical[points.rows[fresh]]}
        agree: np.ndarray = (fresh & self._agree(len(names))) | ~np.isfinite(points.values)
        return agree

    def _rows_of(self, view: StepView, plan: WatchPlan) -> np.ndarray:
        logical = view.row_logical
        takes = (logical >= 0) & (plan.slots[logical] >= 0)
        if self.rule.match.rank:
            takes &= np.isin(view.row_rank, self.rule.match.rank)
        return np.flatnonzero(takes)

    def _numbers(self, view: StepView, plan: WatchPlan, at: np.ndarray) -> np.ndarray:
        rank, micro_step = view.row_rank[at].astype(np.int64), view.rows["micro_step"][at].astype(np.int64)
        series = plan.slots[view.row_logical[at]].astype(np.int64)
        numbers: np.ndarray = (series << (RANK_BITS + MICRO_BITS)) | (rank << MICRO_BITS)
        numbers |= (np.maximum(micro_step, -1) + 1) & ((1 << MICRO_BITS) - 1)
        return numbers

    def _slots_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the slots of series, making room for those never met. numbers: rising, each once."""
        fresh = np.setdiff1d(numbers, self._series, assume_unique=True)
        if fresh.size:
            slots = np.arange(len(self._series), len(self._series) + len(fresh))
            both, places = np.concatenate([self._series, fresh]), np.concatenate([self._slot, slots])
            order = np.argsort(both)
            self._series, self._slot = both[order], places[order]
            self._grow(len(self._series))
        found: np.ndarray = self._slot[np.searchsorted(self._series, numbers)]
        return found


class _RowPoints(AnomalousPoints):
    def __init__(
        self,
        watch: OwnRowWatch,
        view: StepView,
        slots: np.ndarray,
        rows: np.ndarray,
        values: np.ndarray,
        scores: Scores,
        at: np.ndarray,
    ) -> None:
        super().__init__(slots)
        self._watch, self._view, self.rows, self.values = watch, view, rows, values
        self._score: np.ndarray = scores.score[at] if at.size else values
        self._baseline: np.ndarray = scores.baseline[at] if at.size else values

    def anomaly(self, i: int, full: bool, why: str) -> tuple[Anomaly, bool]:
        watch, view = self._watch, self._view
        row, rank = view.rows[int(self.rows[i])], int(view.row_rank[int(self.rows[i])])
        tensor = view.tensors[int(view.row_logical[int(self.rows[i])])]
        value, baseline, score = float(self.values[i]), float(self._baseline[i]), float(self._score[i])
        severity = watch.rule.severity if full else Severity.INFO
        micro_step = int(row["micro_step"]) if row["micro_step"] >= 0 else None
        call_id = int(row["call_id"]) if row["call_id"] != NONE_ID else None
        if math.isfinite(value):
            text = wording.excursion(tensor.kind, tensor.name, watch.statistic, value, baseline, score, 1, why)
        else:
            text = f"{wording.subject(tensor.kind, tensor.name, watch.statistic)} is {value_text(value)} on rank {rank}"
        anomaly = tensor_anomaly(
            view,
            watch.rule,
            tensor,
            watch.statistic,
            severity,
            rank,
            micro_step,
            call_id,
            value,
            baseline,
            score,
            text,
            tensor.key,
        )
        return anomaly, full or severity is watch.rule.severity
