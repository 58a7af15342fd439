"""TensorWatch: a rule on logical tensors, with corroboration between them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity
from sentinel.detect import Scores, SeriesDetector
from sentinel.record import NONE_ID, is_of_kind
from sentinel.rules import wording
from sentinel.rules.facts import moved_holders, tensor_anomaly, value_text
from sentinel.rules.schema import Rule
from sentinel.rules.watch import BACKGROUND_RATE, LASTING_STEPS, Plan, Points, SeriesWatch

if TYPE_CHECKING:
    from sentinel.ingest.merge import Layout, LogicalTensor, StepView


class StepRows:
    """Looks up the row of a tensor, when a step has anomalies; made at most once a step."""

    def __init__(self, view: StepView) -> None:
        self._view = view
        self._order: np.ndarray | None = None

    def single(self, index: int) -> np.void | None:
        """Return the only row of logical tensor `index`, None where there are several or none."""
        at = self.of(index)
        if len(at) != 1:
            return None
        row: np.void = self._view.rows[at[0]]
        return row

    def of(self, index: int) -> np.ndarray:
        """Return the places of the rows of logical tensor `index`."""
        logical = self._view.row_logical
        if self._order is None:
            self._order = np.argsort(logical, kind="stable")
            self._sorted = logical[self._order]
        first, last = np.searchsorted(self._sorted, [index, index + 1])
        return self._order[first:last]


def series_key(layout: Layout, tensor: LogicalTensor) -> str:
    """Return what names the baseline of a tensor: a merged one keeps it on any layout, a rank's own in its world."""
    if not tensor.place:
        return tensor.key
    return f"{tensor.key}#{layout.places[tensor.ranks[0]].world_size}"


class TensorWatch(SeriesWatch):
    """Logical tensors: merged over shards, micro-steps and replicas; per rank only where nobody may merge."""

    def __init__(self, rule: Rule, detector: SeriesDetector, statistic: str, kinds: frozenset[str]) -> None:
        super().__init__(rule, detector, statistic, "tensor")
        self.kinds = kinds
        self.raw = bool(getattr(detector, "raw_values", False))
        self._slot_of: dict[str, int] = {}

    def plan(self, layout: Layout) -> Plan:
        """Return what this watch looks at in `layout`; series it knows keep their state."""
        index = [tensor.index for tensor in layout.tensors if self._takes(tensor)]
        keys = [series_key(layout, layout.tensors[at]) for at in index]
        slots = [self._slot_of.setdefault(key, len(self._slot_of)) for key in keys]
        self._grow(len(self._slot_of))
        return Plan(np.array(index, dtype=np.int64), np.array(slots, dtype=np.int64), slots == list(range(self.num_series)))

    def _takes(self, tensor: LogicalTensor) -> bool:
        ranks = self.rule.match.rank
        if ranks and not (len(tensor.ranks) == 1 and tensor.ranks[0] in ranks):
            return False
        return is_of_kind(tensor.kind, tensor.border, self.kinds) and self.rule.match.takes_name(tensor.name)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the logical tensors watched so far."""
        return tuple(self._slot_of)

    def series_keys(self) -> object:
        """Return the tensor keys in order of slots."""
        return list(self._slot_of)

    def take_series_keys(self, keys: Any) -> None:
        """Take the tensor keys back."""
        self._slot_of = {key: slot for slot, key in enumerate(keys)}

    def judge(self, view: StepView, plan: Plan, column: np.ndarray, present: np.ndarray, rows: StepRows) -> list[Anomaly]:
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
            self.background *= 1.0 - BACKGROUND_RATE
            if len(self.episodes):
                self._emit(view, slots, Points(slots[:0]), slots[:0], anomalous[:0])
            return self.quiet(view)
        at = np.flatnonzero(anomalous)
        points = _TensorPoints(self, view, rows, slots[at], index[at], values[at], scores, at)
        agree = self._corroborated(points, view)
        found = self._emit(view, slots, points, slots[settled] if settled is not None else slots[:0], agree)
        return found + self.quiet(view)

    def _corroborated(self, points: _TensorPoints, view: StepView) -> np.ndarray:
        """Return which points others agree with: enough different tensors that rose afresh, or all replicas of one."""
        known = self.episodes.locate(points.slots)
        streak = np.where(known >= 0, self.episodes.streak[known] if len(self.episodes) else 0, 0)
        # What falls silent alone lasts if it matters; what has been out for long says nothing about today.
        fresh = (points.direction >= 0) & (streak < LASTING_STEPS)
        names = {view.tensors[int(at)].name for at in points.index[fresh]}
        agree: np.ndarray = (fresh & self._agree(len(names))) | ~np.isfinite(points.values)
        return agree


class _TensorPoints(Points):
    def __init__(
        self,
        watch: TensorWatch,
        view: StepView,
        rows: StepRows,
        slots: np.ndarray,
        index: np.ndarray,
        values: np.ndarray,
        scores: Scores,
        at: np.ndarray,
    ) -> None:
        super().__init__(slots)
        self._watch, self._view, self._rows = watch, view, rows
        self.index, self.values = index, values
        if at.size:
            self.score, self.baseline = scores.score[at], scores.baseline[at]
            direction = scores.evidence.get("direction")
            self.direction = direction[at] if direction is not None else np.zeros(len(at), dtype=np.int8)
        else:
            self.direction = np.zeros(0, dtype=np.int8)

    def anomaly(self, i: int, full: bool, why: str) -> tuple[Anomaly, bool]:
        rule, view = self._watch.rule, self._view
        tensor = view.tensors[int(self.index[i])]
        value, baseline, score = float(self.values[i]), float(self.baseline[i]), float(self.score[i])
        severity = rule.severity if full else Severity.INFO
        statistic = self._watch.statistic
        row = self._rows.single(int(self.index[i]))
        micro_step = int(row["micro_step"]) if row is not None and row["micro_step"] >= 0 else None
        call_id = int(row["call_id"]) if row is not None and row["call_id"] != NONE_ID else None
        if math.isfinite(value):
            sign, detector = int(self.direction[i]), self._watch.detector
            text = wording.excursion(tensor.kind, tensor.name, statistic, value, baseline, score, sign, why, detector)
        else:
            what = wording.subject(tensor.kind, tensor.name, statistic)
            text = f"{what} is {value_text(value)}, again (score {score:.3g})"
        rank = tensor.ranks[0] if len(tensor.ranks) == 1 else None
        anomaly = tensor_anomaly(
            view, rule, tensor, statistic, severity, rank, micro_step, call_id, value, baseline, score, text, tensor.key
        )
        moved = moved_holders(view, tensor, self._rows.of(tensor.index), statistic, value, baseline)
        if moved:
            anomaly = msgspec.structs.replace(anomaly, moved_ranks=moved)
        return anomaly, full or severity is rule.severity
