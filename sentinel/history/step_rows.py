"""From judged steps to rows: which series each tensor is, and what of its moments a history keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sentinel.exports.series import MergedStep
from sentinel.history.table_schemas import STATISTICS, Columns
from sentinel.moments import EMPTY, Moments
from sentinel.record import STATS_DTYPE
from sentinel.step_view import Layout

SCALAR = "scalar"
_NUM_WORDS = STATS_DTYPE.itemsize // 8
_COUNT_WORDS = [
    list(STATS_DTYPE.names or ()).index(name) for name in ("count", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero")
]


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
    """Return the rows of the table `moments` of some steps, in the order of the table."""
    of_tensors = [_tensors(step, ids) for step in steps]
    of_scalars = _scalars(steps, ids)
    series = np.concatenate([*(one.series for one in of_tensors), of_scalars.series])
    sizes = [len(one.series) for one in of_tensors] + [len(step.scalars) for step in steps]
    at_step = np.repeat(np.tile(np.arange(len(steps)), 2), sizes)
    attempts, numbers = np.array([one.attempt for one in steps], np.int32), np.array([one.step for one in steps], np.int64)
    order = np.lexsort((numbers[at_step], attempts[at_step], series))
    # As words: numpy copies records field by field, and asks Python of each.
    words = np.take(np.concatenate([*(one.words for one in of_tensors), of_scalars.words]), order, axis=0)
    moments = Moments(words.view(STATS_DTYPE).reshape(-1))
    columns = np.ascontiguousarray(words.T)
    count, nans, pos_infs, neg_infs, zeros = (columns[at].view(np.int64) for at in _COUNT_WORDS)
    # Of summands no more is known than that something in them is not finite.
    is_unknown = np.concatenate([*(one.is_partial for one in of_tensors), of_scalars.is_partial])[order]
    at_step = at_step[order]
    return {
        "series": series[order],
        "attempt": attempts[at_step],
        "step": numbers[at_step],
        "is_whole": np.concatenate([*(one.is_whole for one in of_tensors), of_scalars.is_whole])[order],
        "count": count,
        "nans": nans,
        "pos_infs": pos_infs,
        "neg_infs": neg_infs,
        "zeros": zeros,
        **{name: _known(moments.statistic(name), is_unknown) for name in STATISTICS},
    }


def _known(values: npt.NDArray[np.float64], is_unknown: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    found = np.array(values, np.float64)
    found[is_unknown | ~np.isfinite(found)] = np.nan
    return found


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
    """What several series have, step by step: [rows] each."""

    series: npt.NDArray[np.int32]
    words: npt.NDArray[np.uint64]
    """[rows, words of STATS_DTYPE]."""
    is_whole: npt.NDArray[np.bool_]
    is_partial: npt.NDArray[np.bool_]


def _tensors(step: MergedStep, ids: SeriesIds) -> _Measured:
    series, is_partial = ids.of_layout(step.layout)
    of_row, index, words = series[step.index], step.index, step.stats.view(np.uint64).reshape(-1, _NUM_WORDS)
    if not of_row.all():
        kept = np.flatnonzero(of_row)
        of_row, index, words = of_row[kept], index[kept], words[kept]
    whole = np.ones(len(index), np.bool_) if step.is_whole is None else step.is_whole[index]
    return _Measured(of_row, words, whole, is_partial[index])


def _scalars(steps: Sequence[MergedStep], ids: SeriesIds) -> _Measured:
    series = np.array([ids.of_scalar(name) for step in steps for name in step.scalars], np.int32)
    values = np.array([value for step in steps for value in step.scalars.values()], np.float64)
    stats = np.full(len(values), EMPTY)
    is_known = np.isfinite(values)
    for name, which in (
        ("count", is_known),
        ("num_nan", np.isnan(values)),
        ("num_pos_inf", values == np.inf),
        ("num_neg_inf", values == -np.inf),
    ):
        stats[name] = which
    for name in ("mean", "min", "max"):
        stats[name][is_known] = values[is_known]
    num = len(values)
    return _Measured(series, stats.view(np.uint64).reshape(-1, _NUM_WORDS), np.ones(num, np.bool_), np.zeros(num, np.bool_))
