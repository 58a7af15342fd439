"""LayoutPlan: who judges what of the steps of one layout. Watches put themselves in; a step goes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from sentinel import native
from sentinel.anomaly import Anomaly
from sentinel.rules.watches.compiled_plan import NO_HITS, CompiledPlan
from sentinel.rules.watches.series_index import SeriesSelection
from sentinel.rules.watches.step_columns import StepColumns, missing_scale
from sentinel.rules.watches.tensor_watch import RowLookup, TensorWatch
from sentinel.rules.watches.watch import BACKGROUND_RATE, Watch, WatchPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sentinel.step_view import Layout, StepView

Judge: TypeAlias = "Callable[[StepView], list[Anomaly]]"


class LayoutPlan:
    """What each watch looks at in the steps of one layout."""

    def __init__(self, layout: Layout, selection: SeriesSelection, watches: Iterable[Watch]) -> None:
        self.layout = layout
        self.selection = selection
        self._vectorised: list[tuple[TensorWatch, WatchPlan]] = []
        self._tensors: list[tuple[TensorWatch, WatchPlan]] = []
        self._rows: list[Judge] = []
        self._whole: list[Judge] = []
        self._learn: list[Callable[[StepView], None]] = []
        for watch in watches:
            watch.take_place(self)
        self._compiled = (
            CompiledPlan([one for one, _ in self._vectorised], [its for _, its in self._vectorised])
            if self._vectorised
            else None
        )

    # What a watch takes its place with.

    def judge_tensors(self, watch: TensorWatch) -> None:
        """Have a watch judge the tensors that it matches here.

        Many watches are judged in one call where their detectors are vectorised, and there is a C library.
        """
        its = watch.plan(self.selection)
        is_vectorised = watch.vectorised is not None and native.judge_plan is not None
        if len(its.index):
            (self._vectorised if is_vectorised else self._tensors).append((watch, its))

    def judge_rows(self, judge: Judge) -> None:
        """Have a watch judge the rows of single ranks."""
        self._rows.append(judge)

    def judge_whole(self, judge: Judge) -> None:
        """Have a watch judge the whole step, when tensors, rows and logged values were."""
        self._whole.append(judge)

    def learn_from(self, learn: Callable[[StepView], None]) -> None:
        """Have a watch that judges at other times learn from each step, last."""
        self._learn.append(learn)

    # What a step goes through.

    def series(self, view: StepView) -> list[Anomaly]:
        """Return what is to say of single tensors and rows."""
        rows, columns = RowLookup(view), StepColumns(view)
        found = self._of_compiled(view, self._compiled, rows) if self._compiled is not None else []
        for watch, its in self._tensors:
            column = columns.raw(watch.statistic) if watch.declared.raw_values else columns.clean(watch.statistic)
            found += watch.judge(view, its, column, view.present, rows)
        for judge in self._rows:
            found += judge(view)
        return found

    def whole(self, view: StepView) -> list[Anomaly]:
        """Return what is to say of the whole step; then what judges at other times learns from it."""
        found = [one for judge in self._whole for one in judge(view)]
        for learn in self._learn:
            learn(view)
        return found

    def _of_compiled(self, view: StepView, compiled: CompiledPlan, rows: RowLookup) -> list[Anomaly]:
        """Judge all watches with a vectorised detector in one call; only those with something to say cost Python."""
        found: list[Anomaly] = []
        stats, present, is_bad = view.stats, view.present, view.is_bad
        hits = compiled.judge(stats, present, is_bad, missing_scale(view))
        several = _of_each(hits, len(compiled.watches)) if len(hits) else ()
        for its, its_hits in zip(compiled.plans, several, strict=False):
            rows.expect(its.index[its_hits["entry"]].tolist())
        of_watch = iter(several)
        for watch, its, num_points in zip(compiled.watches, compiled.plans, compiled.num_points, strict=True):
            watch.num_points += num_points
            its_hits = next(of_watch, NO_HITS)
            if len(its_hits):
                found += watch.judge_hits(view, its, its_hits, present, rows)
            elif not num_points:
                found += watch.quiet(view)
            elif watch.episodes.onset:
                found += watch.judge_healthy(view, its, present)
            else:
                watch.background *= 1.0 - BACKGROUND_RATE
        return found


def _of_each(hits: np.ndarray, num_watches: int) -> Sequence[np.ndarray]:
    """Return the hits of each watch, in their order."""
    ends = np.cumsum(np.bincount(hits["plan_row"], minlength=num_watches))
    return np.split(hits[np.argsort(hits["plan_row"], kind="stable")], ends[:-1])
