"""CompiledPlan: all forms of a pack over one layout, judged in one call of the C extension a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_not
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel import native
from sentinel.detect import State
from sentinel.detect.vectorised import PEAK_FACTOR, SPREAD_SHARE, BaselineForm, Form, LimitForm, StillForm
from sentinel.native.layout import FORM, FORM_LIMIT, FORM_LINEAR, FORM_LOG, FORM_STILL, HIT, SIDES
from sentinel.native.library import JudgeForms
from sentinel.record import STATISTICS

if TYPE_CHECKING:
    from sentinel.rules.watches.tensor_watch import TensorWatch
    from sentinel.rules.watches.watch import WatchPlan

NO_HITS = np.empty(0, HIT)
MANY_HITS = 65536
"""Most hits whose room is kept between steps, a bound on memory: 40 bytes each, 2.6 MB; a step with more gives its room
back."""


class CompiledPlan:
    """The forms of watches over one layout; their states stay the watches' own arrays."""

    def __init__(self, watches: Sequence[TensorWatch], plans: Sequence[WatchPlan]) -> None:
        """watches: those with a form that look at any tensor of the layout; plans: theirs for it."""
        self.watches, self.plans = watches, plans
        self._forms = np.zeros(len(watches), FORM)
        self._states: list[State] = []
        self._hits = np.empty(0, HIT)
        self._judge: JudgeForms | None = None
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
        points: list[int] = self._forms["num_points"].tolist()
        return points

    def _address(self) -> JudgeForms:
        """Look up where parameters and states lie: after growth and restores they lie elsewhere."""
        for row, watch, plan in zip(self._forms, self.watches, self.plans, strict=True):
            assert watch.form is not None
            describe(row, watch.form, watch.statistic, watch.state, plan.index, None if plan.all_slots else plan.slots)
        # Memory that is never written costs nothing: only hits are.
        self._hits = np.empty(sum(len(plan.index) for plan in self.plans), HIT)
        assert native.prepare_forms is not None
        return native.prepare_forms(self._forms, self._hits)


def describe(row: Any, form: Form, statistic: str, state: State, index: np.ndarray, slots: np.ndarray | None) -> None:
    """Fill one row of FORM. index: [entries] int32 rising; slots: [entries] int32, None where entry i is series i.

    Only addresses are kept: the arrays must outlive the row.
    """
    row["statistic"] = STATISTICS.index(statistic)
    row["num_entries"], row["index"], row["slots"] = len(index), index.ctypes.data, 0 if slots is None else slots.ctypes.data
    describe_form(row, form, state)


def describe_form(row: Any, form: Form, state: State) -> None:
    """Fill what a row of FORM says of the form and its state."""
    for name, array in state.items():
        row[name] = array.ctypes.data
    names = _FILLED[type(form)](row, form)
    for name in names:
        row[name] = getattr(form, name)


def _fill_baseline(row: Any, form: BaselineForm) -> tuple[str, ...]:
    """Fill in what C has in other words, and return the fields that it has by name."""
    row["form"] = FORM_LINEAR if form.domain == "linear" else FORM_LOG
    row["sides"] = SIDES.index(form.sides)
    row["location_rate"], row["spread_rate"] = 1.0 / form.memory, SPREAD_SHARE / form.memory
    row["peak_factor"], row["has_common"] = PEAK_FACTOR if form.peaks else 0.0, form.common
    return "k", "floor", "minimum", "warmup", "settle_after"


def _fill_limit(row: Any, form: LimitForm) -> tuple[str, ...]:
    row["form"] = FORM_LIMIT
    return "above", "below", "lasting", "after"


def _fill_still(row: Any, form: StillForm) -> tuple[str, ...]:
    row["form"], row["lasting"], row["settle_after"] = FORM_STILL, form.zero_steps, form.unchanged_steps
    return ("after",)


_FILLED: dict[type[Any], Callable[[Any, Any], tuple[str, ...]]] = {
    BaselineForm: _fill_baseline, LimitForm: _fill_limit, StillForm: _fill_still,
}  # fmt: skip
"""Form -> what fills a row of FORM."""
