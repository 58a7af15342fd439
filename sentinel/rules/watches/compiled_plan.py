"""CompiledPlan: all vectorised detectors of a pack over one layout, judged in one call of the C extension a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_not
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel import native
from sentinel.detect import State
from sentinel.detect.vectorised import (
    PEAK_FACTOR,
    SPREAD_SHARE,
    Vectorised,
    VectorisedBaseline,
    VectorisedLimit,
    VectorisedStillness,
)
from sentinel.native.layout import ALGORITHM_LIMIT, ALGORITHM_LINEAR, ALGORITHM_LOG, ALGORITHM_STILL, HIT, PLAN_ROW, SIDES
from sentinel.native.library import JudgePlan
from sentinel.record import STATISTICS

if TYPE_CHECKING:
    from sentinel.rules.watches.tensor_watch import TensorWatch
    from sentinel.rules.watches.watch import WatchPlan

NO_HITS = np.empty(0, HIT)
MANY_HITS = 65536
"""Most hits whose room is kept between steps, a bound on memory: 40 bytes each, 2.6 MB; a step with more gives its room
back."""


class CompiledPlan:
    """The vectorised detectors of watches over one layout; their states stay the watches' own arrays."""

    def __init__(self, watches: Sequence[TensorWatch], plans: Sequence[WatchPlan]) -> None:
        """watches: those with a vectorised detector that look at any tensor of the layout; plans: theirs for it."""
        self.watches, self.plans = watches, plans
        self._rows = np.zeros(len(watches), PLAN_ROW)
        self._states: list[State] = []
        self._hits = np.empty(0, HIT)
        self._judge: JudgePlan | None = None
        """Knows where parameters, states and hits lie; None: they lie elsewhere now."""

    def judge(self, stats: np.ndarray, present: np.ndarray, bad: np.ndarray, norm_scale: np.ndarray | None) -> np.ndarray:
        """Score and learn one step; return the anomalous points as [hits] HIT, those of one watch in rising order.

        stats: [tensors] STATS; present, bad: [tensors] bool; norm_scale: [tensors] float64, or None for ones.
        """
        states = [watch.state for watch in self.watches]
        if self._judge is None or any(map(is_not, states, self._states)):
            self._states, self._judge = states, self._address()
        num_hits = self._judge(stats, present, bad, norm_scale)
        if not num_hits:
            return NO_HITS
        found = self._hits[:num_hits].copy()
        if num_hits > MANY_HITS:
            self._judge = None
        return found

    @property
    def num_points(self) -> list[int]:
        """Points that each watch judged in the newest step."""
        points: list[int] = self._rows["num_points"].tolist()
        return points

    def _address(self) -> JudgePlan:
        """Look up where parameters and states lie: after growth and restores they lie elsewhere."""
        for row, watch, plan in zip(self._rows, self.watches, self.plans, strict=True):
            assert watch.vectorised is not None
            describe(row, watch.vectorised, watch.statistic, watch.state, plan.index, None if plan.all_slots else plan.slots)
        # Memory that is never written costs nothing: only hits are.
        self._hits = np.empty(sum(len(plan.index) for plan in self.plans), HIT)
        assert native.prepare_plan is not None
        return native.prepare_plan(self._rows, self._hits)


def describe(
    row: Any, algorithm: Vectorised, statistic: str, state: State, index: np.ndarray, slots: np.ndarray | None
) -> None:
    """Fill one row of PLAN_ROW. index: [entries] int32 rising; slots: [entries] int32, None where entry i is series i.

    Only addresses are kept: the arrays must outlive the row.
    """
    row["statistic"] = STATISTICS.index(statistic)
    row["num_entries"], row["index"], row["slots"] = len(index), index.ctypes.data, 0 if slots is None else slots.ctypes.data
    describe_algorithm(row, algorithm, state)


def describe_algorithm(row: Any, algorithm: Vectorised, state: State) -> None:
    """Fill what a row of PLAN_ROW says of the algorithm and its state."""
    for name, array in state.items():
        row[name] = array.ctypes.data
    names = _FILLED[type(algorithm)](row, algorithm)
    for name in names:
        row[name] = getattr(algorithm, name)


def _fill_baseline(row: Any, algorithm: VectorisedBaseline) -> tuple[str, ...]:
    """Fill in what C has in other words, and return the fields that it has by name."""
    row["algorithm"] = ALGORITHM_LINEAR if algorithm.domain == "linear" else ALGORITHM_LOG
    row["sides"] = SIDES.index(algorithm.sides)
    row["location_rate"], row["spread_rate"] = 1.0 / algorithm.memory, SPREAD_SHARE / algorithm.memory
    row["peak_factor"], row["has_common"] = PEAK_FACTOR if algorithm.peaks else 0.0, algorithm.common
    return "k", "floor", "minimum", "warmup", "settle_after"


def _fill_limit(row: Any, algorithm: VectorisedLimit) -> tuple[str, ...]:
    row["algorithm"] = ALGORITHM_LIMIT
    return "above", "below", "lasting", "after"


def _fill_still(row: Any, algorithm: VectorisedStillness) -> tuple[str, ...]:
    row["algorithm"], row["lasting"], row["settle_after"] = ALGORITHM_STILL, algorithm.zero_steps, algorithm.unchanged_steps
    return ("after",)


_FILLED: dict[type[Any], Callable[[Any, Any], tuple[str, ...]]] = {
    VectorisedBaseline: _fill_baseline, VectorisedLimit: _fill_limit, VectorisedStillness: _fill_still,
}  # fmt: skip
"""Algorithm -> what fills a row of PLAN_ROW."""
