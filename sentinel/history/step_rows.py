"""From judged steps to rows: which series each tensor is, and what of its moments a history keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sentinel.aggregate import rows_at
from sentinel.exports.series import MergedStep
from sentinel.history.table_schemas import STATISTICS, Columns
from sentinel.moments import EMPTY, Moments
from sentinel.record import STATS_DTYPE
from sentinel.step_view import Layout

SCALAR = "scalar"


class SeriesIds:
    """The number of each series of a run: 1 and up, in the order in which they were met, and never another."""

    def __init__(self, known: Columns | None = None) -> None:
        """known: the table of series as it was written."""
        self._ids: dict[tuple[str, str, str], int] = {}
        self._rows: list[tuple[object, ...]] = []
        self._of_layout: list[tuple[Layout, npt.NDArray[np.int32], npt.NDArray[np.bool_]]] = []
        if known is not None:
            names = list(known)
            for row in zip(*(known[name].tolist() for name in names), strict=True):
                of = dict(zip(names, row, strict=True))
                self._add((of["name"], of["kind"], of["place"]), tuple(row[1:]))

    def __len__(self) -> int:
        return len(self._ids)

    def table(self) -> Columns:
        """Return the table of series."""
        names = ("series", "name", "kind", "place", "dtype", "pp_stage", "vpp_stage", "depth", "site_pos", "num_elements")
        columns = list(zip(*self._rows, strict=True)) if self._rows else [()] * len(names)
        return {name: np.array(values, object) for name, values in zip(names, columns, strict=True)}

    def of_layout(self, layout: Layout) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return [num_tensors] the series of each tensor, 0 where a history has none of it, and whether it is a summand."""
        for known, ids, partial in self._of_layout:
            if known is layout:
                return ids, partial
        ids = np.zeros(len(layout.tensors), np.int32)
        partial = np.array([one.is_partial for one in layout.tensors], np.bool_)
        for one in layout.tensors:
            if not one.is_part:
                place = ",".join(f"{axis}={coordinate}" for axis, coordinate in one.place.items())
                ids[one.index] = self._of(
                    (one.name, one.kind, place),
                    (one.dtype, one.pp_stage, one.vpp_stage, one.depth, one.site_pos, one.num_elements),
                )
        self._of_layout = [*self._of_layout[-3:], (layout, ids, partial)]
        return ids, partial

    def of_scalar(self, name: str) -> int:
        """Return the series of a scalar."""
        return self._of((name, SCALAR, ""), ("", -1, -1, -1, -1, 1))

    def _of(self, key: tuple[str, str, str], about: tuple[object, ...]) -> int:
        found = self._ids.get(key)
        return self._add(key, (*key, *about)) if found is None else found

    def _add(self, key: tuple[str, str, str], row: tuple[object, ...]) -> int:
        number = self._ids[key] = len(self._ids) + 1
        self._rows.append((number, *row))
        return number


def moments_rows(steps: Sequence[MergedStep], ids: SeriesIds) -> Columns:
    """Return the rows of the table `moments` of some steps: step by step, the scalars of each behind its tensors."""
    parts = [one for step in steps for one in (_tensors(step, ids), _scalars(step, ids))]
    whose = [step for step in steps for _ in range(2)]
    sizes = [len(one.series) for one in parts]
    stats = np.concatenate([one.stats for one in parts])
    moments = Moments(stats) if len(stats) else Moments(np.empty(0, STATS_DTYPE))
    # Of summands no more is known than that something in them is not finite.
    is_unknown = np.concatenate([one.is_partial for one in parts])
    values = {name: np.where(is_unknown, np.nan, moments.statistic(name)) for name in STATISTICS}
    return {
        "series": np.concatenate([one.series for one in parts]),
        "attempt": np.repeat(np.array([one.attempt for one in whose], np.int32), sizes),
        "step": np.repeat(np.array([one.step for one in whose], np.int64), sizes),
        "is_whole": np.concatenate([one.is_whole for one in parts]),
        "count": stats["count"],
        "nans": stats["num_nan"],
        "pos_infs": stats["num_pos_inf"],
        "neg_infs": stats["num_neg_inf"],
        "zeros": stats["num_zero"],
        **{name: np.where(np.isfinite(column), column, np.nan) for name, column in values.items()},
    }


def steps_rows(steps: Sequence[MergedStep]) -> Columns:
    """Return the rows of the table `steps`."""
    return {
        "series": np.zeros(len(steps), np.int32),
        "attempt": np.array([one.attempt for one in steps], np.int32),
        "step": np.array([one.step for one in steps], np.int64),
        "decision": np.array([one.seq for one in steps], np.int64),
        "time": np.array([one.time for one in steps], np.float64),
        "is_skipped": np.array([one.is_skipped for one in steps], np.bool_),
    }


class _Measured(NamedTuple):
    """What one step has of several series: [rows] each."""

    series: npt.NDArray[np.int32]
    stats: npt.NDArray[np.void]
    is_whole: npt.NDArray[np.bool_]
    is_partial: npt.NDArray[np.bool_]


def _tensors(step: MergedStep, ids: SeriesIds) -> _Measured:
    series, is_partial = ids.of_layout(step.layout)
    of_row = series[step.index]
    kept = np.flatnonzero(of_row > 0)
    index = step.index[kept]
    whole = np.ones(len(index), np.bool_) if step.is_whole is None else step.is_whole[index]
    return _Measured(of_row[kept], rows_at(step.stats, kept), whole, is_partial[index])


def _scalars(step: MergedStep, ids: SeriesIds) -> _Measured:
    stats = np.full(len(step.scalars), EMPTY)
    for at, value in enumerate(step.scalars.values()):
        if math.isfinite(value):
            stats[at]["count"] = 1
            for name in ("mean", "min", "max"):
                stats[at][name] = value
        else:
            stats[at]["num_nan" if math.isnan(value) else "num_pos_inf" if value > 0 else "num_neg_inf"] = 1
    series = np.array([ids.of_scalar(name) for name in step.scalars], np.int32)
    return _Measured(series, stats, np.ones(len(stats), np.bool_), np.zeros(len(stats), np.bool_))
