"""TensorWatch: a rule on logical tensors, with corroboration between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity
from sentinel.detect import SeriesDetector
from sentinel.detect.vectorised import Vectorised
from sentinel.native.layout import HIT_SETTLED
from sentinel.record import NONE_ID
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import healthy_gradients, wording
from sentinel.rules.watches.anomaly_records import moved_holders, tensor_anomaly, value_text
from sentinel.rules.watches.series_index import SeriesSelection
from sentinel.rules.watches.watch import BACKGROUND_RATE, LASTING_STEPS, AnomalousPoints, SeriesWatch, WatchPlan

if TYPE_CHECKING:
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import LogicalTensor, StepView

FEW_ELEMENTS = 8
"""Elements from which the size of a weight says something: a bias of fewer, as the one element of a value head's, may pass
through zero in good health. Larger: small weights that vanish are missed."""


class RowLookup:
    """Looks up the row of a tensor, when a step has anomalies; made at most once a step."""

    def __init__(self, view: StepView) -> None:
        self._whole = self._view = view
        """The step, and what of it has the rows that were looked up."""
        self._likely, self._had = set[int](), set[int]()
        self._order: np.ndarray | None = None

    def expect(self, tensors: Iterable[int]) -> None:
        """Say whose rows may be looked up in this step: they are asked for together, if any is."""
        self._likely.update(tensors)

    def single(self, index: int) -> np.void | None:
        """Return the only row of logical tensor `index`, None where there are several or none."""
        view, at = self.of(index)
        if len(at) != 1:
            return None
        row: np.void = view.rows[at[0]]
        return row

    def of(self, index: int) -> tuple[StepView, np.ndarray]:
        """Return the step with the rows of logical tensor `index`, and their places in it."""
        if index not in self._had:
            self._had |= {index, *self._likely}
            view = self._whole.with_rows_of(self._had)
            self._view, self._order = view, self._order if view is self._view else None
        if self._order is None:
            self._order = np.argsort(self._view.row_logical, kind="stable")
            self._sorted = self._view.row_logical[self._order]
        first, last = np.searchsorted(self._sorted, [index, index + 1])
        return self._view, self._order[first:last]


class TensorWatch(SeriesWatch):
    """Logical tensors: merged over shards, micro-steps and replicas; per rank only where nobody may merge."""

    def __init__(
        self,
        rule: Rule,
        detector: SeriesDetector,
        statistic: str,
        kinds: frozenset[str],
        vectorised: Vectorised | None = None,
    ) -> None:
        """vectorised: the algorithm that the detector is for this statistic; None: none. With one, many watches are judged
        in one call.
        """
        super().__init__(rule, detector, statistic, "tensor")
        self.kinds = kinds
        self.vectorised = vectorised
        if vectorised is not None:
            self.scorer = vectorised
        self.series = np.zeros(0, dtype=np.int32)
        """[num_series] the number of each one in the engine's SeriesIndex."""

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the tensors that the rule matches."""
        plan.judge_tensors(self)

    def plan(self, selection: SeriesSelection) -> WatchPlan:
        """Return what this watch looks at in a layout; series it knows keep their state."""
        takes = selection.takes(self.rule.match, self.kinds)
        if self.rule.match.rank:
            takes = takes & selection.of_single_rank(self.rule.match.rank)
        index = np.flatnonzero(takes).astype(np.int32)
        numbers = selection.keys[index]
        slot_of = np.full(int(max(numbers.max(initial=-1), self.series.max(initial=-1))) + 1, -1, np.int32)
        slot_of[self.series] = np.arange(len(self.series), dtype=np.int32)
        fresh, first = np.unique(numbers[slot_of[numbers] < 0], return_index=True)
        fresh = fresh[np.argsort(first, kind="stable")]
        slot_of[fresh] = np.arange(len(self.series), len(self.series) + len(fresh), dtype=np.int32)
        self.series = selection.shared(np.concatenate([self.series, fresh.astype(np.int32)]))
        self._grow(len(self.series))
        slots = slot_of[numbers]
        all_slots = bool((slots == np.arange(len(slots))).all())
        return WatchPlan(selection.shared(index), selection.shared(slots), all_slots)

    def series_keys(self) -> object:
        """Return the numbers of the series in order of slots."""
        return self.series.astype("<i4").tobytes()

    def take_series_keys(self, keys: Any) -> None:
        """Take the numbers back."""
        self.series = np.frombuffer(keys, "<i4").astype(np.int32)

    def judge(
        self, view: StepView, plan: WatchPlan, column: np.ndarray, present: np.ndarray, rows: RowLookup
    ) -> list[Anomaly]:
        """Return the records of one step.

        column: [tensors] the statistic; present: [tensors] whether the step has the tensor.
        """
        index, slots = plan.index, plan.slots
        here = present[index]
        if not here.all():
            index, slots = index[here], slots[here]
        if not len(index):
            return self.quiet(view)
        whole = plan.all_slots and len(index) == self.num_series
        values = column[index]
        scores, anomalous, settled = self._run(values, None if whole else slots)
        if settled is None and not anomalous.any():
            return self.judge_healthy(view, plan, present)
        at = np.flatnonzero(anomalous)
        points = _TensorPoints(self, view, rows, slots[at], index[at], values[at])
        if at.size:
            direction = scores.evidence.get("direction")
            points.explain(scores.score[at], scores.baseline[at], None if direction is None else direction[at])
        rested = slots[settled] if settled is not None else slots[:0]
        found = self._emit(view, self._seen(plan, present), points, rested, self._corroborated(points, view))
        return found + self.quiet(view)

    def judge_healthy(self, view: StepView, plan: WatchPlan, present: np.ndarray) -> list[Anomaly]:
        """Return the records of one step in which this watch saw points, and none was anomalous."""
        self.background *= 1.0 - BACKGROUND_RATE
        if not len(self.episodes):
            return []
        none = plan.slots[:0]
        self._emit(view, self._seen(plan, present), AnomalousPoints(none), none, np.zeros(0, np.bool_))
        return self.quiet(view)

    def judge_hits(
        self, view: StepView, plan: WatchPlan, hits: np.ndarray, present: np.ndarray, rows: RowLookup
    ) -> list[Anomaly]:
        """Return the records of one step whose anomalous points were found in C: [hits] HIT."""
        entries = hits["entry"]
        slots = plan.slots[entries].astype(np.int64)
        points = _TensorPoints(self, view, rows, slots, plan.index[entries], hits["value"])
        points.explain(hits["score"], hits["baseline"], hits["direction"])
        rested = slots[hits["what"] & HIT_SETTLED != 0]
        found = self._emit(view, self._seen(plan, present), points, rested, self._corroborated(points, view))
        return found + self.quiet(view)

    def _seen(self, plan: WatchPlan, present: np.ndarray) -> np.ndarray:
        """Return the series with open episodes that the step has."""
        keys = self.episodes.key
        if not len(keys):
            return keys
        index = plan.index_of(keys)
        seen: np.ndarray = keys[(index >= 0) & present[index]]
        return seen

    def _corroborated(self, points: _TensorPoints, view: StepView) -> np.ndarray:
        """Return which points others agree with: enough different tensors that rose afresh, or all replicas of one."""
        known = self.episodes.locate(points.slots)
        streak = np.where(known >= 0, self.episodes.streak[known] if len(self.episodes) else 0, 0)
        # What falls silent alone lasts if it matters; what has been out for long says nothing about today.
        fresh = (points.direction >= 0) & (streak < LASTING_STEPS)
        names = {view.tensors[int(at)].name for at in points.index[fresh]}
        is_many = self._agree(len(names)) and points.is_more_than_a_batch(fresh)
        agree: np.ndarray = (fresh & is_many) | ~np.isfinite(points.values)
        return agree


class _TensorPoints(AnomalousPoints):
    def __init__(
        self,
        watch: TensorWatch,
        view: StepView,
        rows: RowLookup,
        slots: np.ndarray,
        index: np.ndarray,
        values: np.ndarray,
    ) -> None:
        super().__init__(slots)
        self._watch, self._view, self._rows = watch, view, rows
        self.index, self.values = index, values
        self.direction = np.zeros(len(slots), dtype=np.int8)

    def explain(self, score: np.ndarray, baseline: np.ndarray, direction: np.ndarray | None) -> None:
        """Say how far off each point is, of what, and to which side."""
        self.score, self.baseline = score, baseline
        if direction is not None:
            self.direction = direction

    def score_of(self, i: int) -> float:
        return float(self.score[i])

    def lasting_steps(self, i: int) -> int:
        if self.values[i] == 0.0 and healthy_gradients.is_of_expert(self._view.tensors[int(self.index[i])].name):
            return healthy_gradients.WITHOUT_TOKENS
        return super().lasting_steps(i)

    def is_more_than_a_batch(self, which: np.ndarray) -> bool:
        """Return whether these points are not gradients alone, or one of them stands far out."""
        kinds = {self._view.tensors[int(at)].kind for at in self.index[which]}
        return not kinds <= healthy_gradients.GRADIENTS or bool((self.score[which] >= healthy_gradients.FAR).any())

    def _passes_zero(self, i: int, tensor: LogicalTensor) -> bool:
        """Return whether a fall, or a ratio to a weight, is of few elements: they change sign, and have no size then."""
        if tensor.kind == "update_ratio":
            sizes = [one.num_elements for one in self._view.tensors if one.kind == "param" and one.name == tensor.name]
        else:
            sizes = [tensor.num_elements] if self.direction[i] < 0 and self.values[i] != 0.0 else []
        return bool(sizes) and 0 < max(sizes) < FEW_ELEMENTS

    def anomaly(self, i: int, full: bool, why: str) -> tuple[Anomaly, bool]:
        rule, view = self._watch.rule, self._view
        tensor = view.tensors[int(self.index[i])]
        value, baseline, score = float(self.values[i]), float(self.baseline[i]), float(self.score[i])
        full = full and not (self.direction[i] < 0 and healthy_gradients.is_ordinary_fall(tensor.kind, value, baseline))
        full = full and not self._passes_zero(i, tensor)
        severity = rule.severity if full else Severity.INFO
        statistic = self._watch.statistic
        row = self._rows.single(int(self.index[i]))
        micro_step = int(row["micro_step"]) if row is not None and row["micro_step"] >= 0 else None
        call_id = int(row["call_id"]) if row is not None and row["call_id"] != NONE_ID else None
        if math.isfinite(value):
            sign, declares = int(self.direction[i]), self._watch.declared
            text = wording.excursion(tensor.kind, tensor.name, statistic, value, baseline, score, sign, why, declares)
        else:
            what = wording.subject(tensor.kind, tensor.name, statistic)
            text = f"{what} is {value_text(value)}, again (score {score:.3g})"
        rank = tensor.ranks[0] if len(tensor.ranks) == 1 else None
        anomaly = tensor_anomaly(
            view, rule, tensor, statistic, severity, rank, micro_step, call_id, value, baseline, score, text, tensor.key
        )
        moved = moved_holders(*self._rows.of(tensor.index), tensor, statistic, value, baseline)
        if moved:
            anomaly = msgspec.structs.replace(anomaly, moved_ranks=moved)
        return anomaly, full or severity is rule.severity
