"""Where two runs diverge: the first step, and in it the first tensor, at which they differ by more than they did before.

The method, for every series that both runs have: d is the difference of the two values over the mean of their sizes. At
a step, noise is what d was in up to 64 measured steps before it (renewed every 16): its median, and its median absolute
deviation (times 1.4826: the standard deviation of a Gaussian). A series has diverged at the first of 3 steps in a row in
which d is more than 8 deviations from that median, or at the first in which one run is finite and the other is not. What
was equal in all of those steps has no noise: it diverges with the first difference beyond the rounding of a history. Of what
diverged at one step, that comes first which is made first in a step. Long runs are looked at in buckets first, then finer
where they diverge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sentinel.errors import ConfigError
from sentinel.exports.series import SCALAR
from sentinel.history.config import FOLDER
from sentinel.history.manifest import Manifest, read_manifest
from sentinel.history.pictures import asked_in_time, begin_of, extent_of
from sentinel.history.table_schemas import MANTISSA_BITS, STATISTICS, WIDTHS
from sentinel.kinds import KINDS, Phase
from sentinel.known_words import nearest
from sentinel.record import Kind

if TYPE_CHECKING:
    import duckdb

WINDOW = 64
"""Points before a step of which its noise is told (chosen: a median absolute deviation is good to a tenth)."""
LEAST_POINTS = 8
"""Points without which no noise is known (chosen). What differs before counts as differing from the beginning."""
RENEWED = 16
"""Points for which the noise is told once (chosen: telling it for each takes sixteen times as long)."""
DEVIATIONS = 8.0
"""Deviations beyond noise (chosen: with three points in a row none of 10 million points of Gaussian noise is)."""
LASTING = 3
"""Points in a row (chosen: a spike of one run alone, which does not stay, is no divergence)."""
ROUNDING = 4.0 * 2.0**-MANTISSA_BITS
"""Difference below which values are equal: a history keeps 24 binary digits."""
MOST_ROWS_READ = 2_000_000
"""Rows of both runs that are read at once (chosen: a second of one core); past it buckets are looked at."""
MOST_FOUND = 30
"""Most diverged series that are listed."""
_BACKWARD = frozenset({Phase.BACKWARD, Phase.WGRAD_UNREDUCED, Phase.WGRAD})
_LEFT_OUT = frozenset({Kind.COMM.label, Kind.HEALTH.label})
Matrix = npt.NDArray[np.float64]


class DivergedSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A series at the step at which it diverged."""

    name: str
    kind: str
    place: str
    series: tuple[int, int]
    """Its number in either history."""
    step: int
    values: tuple[float | None, float | None]
    """Of either run there; None: not finite. Of a bucket the means."""
    difference: float | None
    """Of the values, over the mean of their sizes; None: one is not finite."""
    usual: float | None
    """What the difference was before: the median."""
    noise: float | None
    """Its deviation before; 0: the two were equal up to rounding."""


class RunDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for two runs."""

    runs: tuple[str, str]
    statistic: str
    first_step: int
    last_step: int
    """Steps that both have; (0, -1): none."""
    width: int
    """Steps within which `first` is known: 1, or those of a bucket where single steps are no longer kept."""
    num_series: int
    """Series that both have."""
    num_lacking: int
    """Series that only one of them has."""
    num_diverged: int
    """Series that diverged in the part that was looked at last."""
    num_apart: int
    """Series that differ from their first points on, by more than rounding: other data, or another seed."""
    first: DivergedSeries | None
    """None: none diverged."""
    others: tuple[DivergedSeries, ...]
    """Further ones in their order, at most `MOST_FOUND`."""


def divergence_of(runs: Mapping[str, Path], statistic: str = "std") -> RunDivergence:
    """Return where two runs diverge. runs: two names -> directories. statistic: of tensors; scalars have their value.

    ConfigError for another statistic, and where the histories cannot be asked; StoreError for a run that has none.
    """
    if statistic not in STATISTICS:
        near = nearest(statistic[:40], STATISTICS)
        raise ConfigError(f'statistic: expected one of {", ".join(STATISTICS)}, got "{statistic[:40]}"{near}')
    if len(runs) != 2:
        raise ConfigError(f"run: expected two different runs, got {len(runs)}")
    names = tuple(runs)
    manifests = [read_manifest(path / FOLDER) for path in runs.values()]
    extents = [extent_of(one) for one in manifests]
    first, last = max(one for one, _ in extents), min(one for _, one in extents)
    with asked_in_time(runs) as connection:
        series, num_lacking = _common_series(connection, names)
        histories = _Histories(connection, names, series, statistic)
        whole = _Found(at=np.zeros(0, np.int64), num_apart=0)
        width = 1
        if series and last >= first:
            width = _width(manifests, len(series), first, last)
            begin = first // width * width
            whole = found = histories.look(begin, last, width)
            finer = [one for one in (1, *WIDTHS) if one < width]
            while found.at.size and finer:
                narrow = finer.pop()
                step = found.first_step
                begin, end = max(first, step - WINDOW * narrow), min(last, step + (LASTING + 1) * width - 1)
                begin = begin // narrow * narrow
                if any(begin_of(one, narrow) > begin for one in manifests):
                    break
                closer = histories.look(begin, end, narrow)
                if not closer.at.size:
                    break
                found, width = closer, narrow
            whole = msgspec.structs.replace(found, num_apart=whole.num_apart)
    diverged = [histories.described(whole, row) for row in whole.at.tolist()]
    diverged.sort(key=lambda one: (one[0].step, one[1]))
    listed = tuple(one for one, _ in diverged)
    return RunDivergence(
        runs=(names[0], names[1]), statistic=statistic, first_step=first if last >= first else 0,
        last_step=last if last >= first else -1, width=width, num_series=len(series), num_lacking=num_lacking,
        num_diverged=len(listed), num_apart=whole.num_apart, first=listed[0] if listed else None,
        others=listed[1 : MOST_FOUND + 1],
    )  # fmt: skip


class _Series(msgspec.Struct, frozen=True):
    """A series that both runs have."""

    name: str
    kind: str
    place: str
    numbers: tuple[int, int]
    depth: int
    site_pos: int

    @property
    def order(self) -> tuple[int, int, int, str, str]:
        """Where it stands in a step: what is made first comes first."""
        kind = next((one for one in Kind if one.label == self.kind), None)
        phase = KINDS[kind].phase if kind is not None else None
        if self.kind == SCALAR:
            named = self.name.lower()
            phase = Phase.LOSS if "loss" in named else Phase.NORM if "norm" in named else Phase.METRIC
        way = -1 if phase in _BACKWARD else 1
        return (Phase.FREE if phase is None else phase, way * self.depth, way * self.site_pos, self.name, self.place)


def _common_series(connection: duckdb.DuckDBPyConnection, runs: tuple[str, ...]) -> tuple[list[_Series], int]:
    """Return the series of both runs, and how many one of them lacks."""
    rows = connection.execute(
        "SELECT run, series, name, kind, place, coalesce(depth, 0), coalesce(site_pos, 0) FROM series ORDER BY series"
    ).fetchall()
    own: tuple[dict[tuple[str, str, str], tuple[int, int, int]], ...] = ({}, {})
    for run, number, name, kind, place, depth, site_pos in rows:
        if kind not in _LEFT_OUT:
            own[runs.index(run)][kind, name, place] = (number, depth, site_pos)
    common = [
        _Series(name, kind, place, (number, own[1][kind, name, place][0]), depth, site_pos)
        for (kind, name, place), (number, depth, site_pos) in own[0].items()
        if (kind, name, place) in own[1]
    ]
    return common, len(own[0].keys() ^ own[1].keys())


def _width(manifests: list[Manifest], num_series: int, first: int, last: int) -> int:
    """Return the steps of a bucket to begin with: as few as there is room and data for."""
    span = last - first + 1
    kept = [one for one in (1, *WIDTHS) if all(begin_of(manifest, one) <= first for manifest in manifests)] or [WIDTHS[-1]]
    cheap = [one for one in kept if 2 * num_series * span <= MOST_ROWS_READ * one]
    return cheap[0] if cheap else WIDTHS[-1]


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a look found: `at` are the rows of the series that diverged, the others are by row."""

    at: npt.NDArray[np.int64]
    num_apart: int
    steps: npt.NDArray[np.int64] = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    values: Matrix = msgspec.field(default_factory=lambda: np.zeros((2, 0)))
    usual: Matrix = msgspec.field(default_factory=lambda: np.zeros(0))
    noise: Matrix = msgspec.field(default_factory=lambda: np.zeros(0))

    @property
    def first_step(self) -> int:
        """The earliest step at which any diverged."""
        return int(self.steps[self.at].min())


class _Histories:
    """Reads both histories, at a width, and looks where they diverge."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, runs: tuple[str, ...], series: list[_Series], statistic: str
    ) -> None:
        self._connection, self._runs, self._series, self._statistic = connection, runs, series, statistic
        wanted = {
            "run": [run for run in runs for _ in series],
            "series": [one.numbers[at] for at in range(2) for one in series],
            "side": [at for at in range(2) for _ in series],
            "row": [*range(len(series))] * 2,
        }
        connection.register("wanted", pa.table(wanted))

    def look(self, first: int, last: int, width: int) -> _Found:
        """Return what diverged in the steps from `first`, a border of buckets, to `last`."""
        values, bad = self._read(first, last, width)
        return diverged(values, bad, [one.kind for one in self._series], first, width)

    def described(self, found: _Found, row: int) -> tuple[DivergedSeries, tuple[int, int, int, str, str]]:
        """Return a series that diverged, and its place in a step."""
        one = self._series[row]
        values = [float(value) if np.isfinite(value) else None for value in found.values[:, row]]
        difference = relative(found.values[0, row], found.values[1, row])
        noise = found.noise[row]
        told = DivergedSeries(
            name=one.name, kind=one.kind, place=one.place, series=one.numbers, step=int(found.steps[row]),
            values=(values[0], values[1]), difference=float(difference) if np.isfinite(difference) else None,
            usual=float(found.usual[row]) if np.isfinite(found.usual[row]) else None,
            noise=float(noise) if np.isfinite(noise) else None,
        )  # fmt: skip
        return told, one.order

    def _read(self, first: int, last: int, width: int) -> tuple[Matrix, npt.NDArray[np.bool_]]:
        """Return (values, whether something there is not finite), both [2, series, columns]; NaN: nothing is there."""
        selects = []
        if width == 1:
            selects.append(f"SELECT run, series, step, {self._statistic} AS v, 1 AS n, nans + infs AS bad FROM moments")
            selects.append("SELECT run, series, step, value AS v, 1 AS n, nans + infs AS bad FROM scalars")
        else:
            mean = f"CASE WHEN kind = '{SCALAR}' THEN mean_avg ELSE {self._statistic}_avg END"
            num = f"CASE WHEN kind = '{SCALAR}' THEN mean_num ELSE {self._statistic}_num END"
            selects.append(f"SELECT run, series, step, {mean} AS v, {num} AS n, nans + infs AS bad FROM moments_{width}")
        cells: Mapping[str, Any] = self._connection.execute(
            f"SELECT w.side AS side, w.row AS row, (m.step - {first}) // {width} AS col, "
            "sum(m.v * m.n) / nullif(sum(CASE WHEN m.v IS NULL THEN 0 ELSE m.n END), 0) AS v, sum(m.bad) AS bad "
            f"FROM ({' UNION ALL '.join(selects)}) m JOIN wanted w ON m.run = w.run AND m.series = w.series "
            f"WHERE m.step BETWEEN {first} AND {last} GROUP BY 1, 2, 3"
        ).fetchnumpy()
        shape = (2, len(self._series), max(0, last - first + width) // width)
        at = tuple(np.asarray(cells[name]).astype(np.int64) for name in ("side", "row", "col"))
        values, bad = np.full(shape, np.nan), np.zeros(shape, np.bool_)
        values[at] = np.ma.filled(np.ma.asarray(cells["v"], np.float64), np.nan)
        bad[at] = np.ma.filled(np.ma.asarray(cells["bad"], np.float64), 0) > 0
        return values, bad


def relative(one: Any, other: Any) -> Any:
    """Return the difference of values over the mean of their sizes, in [-2, 2]; 0 where both are 0."""
    with np.errstate(all="ignore"):
        size = 0.5 * (np.abs(one) + np.abs(other))
        return np.where(size > 0.0, (one - other) / np.where(size > 0.0, size, 1.0), one - other)


def diverged(values: Matrix, bad: npt.NDArray[np.bool_], kinds: Sequence[str], first: int, width: int) -> _Found:
    """Return which series diverged, and when, by the method that stands at the top of this file.

    values, bad: [2, series, columns] as `_Histories` has them. kinds: of each series; what is measured every few steps alone
    is so for all of a kind. first: step of the first column; width: steps of a column.
    """
    both: npt.NDArray[np.bool_] = np.asarray(~np.isnan(values).any(axis=0))
    difference = np.where(both, relative(values[0], values[1]), np.nan)
    num_series, num_columns = difference.shape
    when = np.full(num_series, num_columns, np.int64)
    usual, noise = np.full(num_series, np.nan), np.full(num_series, np.nan)
    apart = np.zeros(num_series, np.bool_)
    for kind in dict.fromkeys(kinds):
        rows = np.array([at for at, one in enumerate(kinds) if one == kind], np.int64)
        columns = np.flatnonzero(both[rows].any(axis=0))
        if len(columns) >= LEAST_POINTS:
            d = difference[np.ix_(rows, columns)]
            apart[rows] = _middle(np.abs(d[:, :LEAST_POINTS])) > ROUNDING
            at, usual[rows], noise[rows] = _departures(d)
            when[rows] = np.append(columns, num_columns)[at]
    # One run has something that is not finite where the other has a value and nothing of the kind.
    one_sided: npt.NDArray[np.bool_] = np.asarray(
        (bad[0] & ~bad[1] & ~np.isnan(values[1])) | (bad[1] & ~bad[0] & ~np.isnan(values[0]))
    )
    alone = np.where(one_sided.any(axis=1), one_sided.argmax(axis=1), num_columns)
    is_alone = alone < when
    when = np.minimum(when, alone)
    usual[is_alone], noise[is_alone] = np.nan, np.nan
    at = np.flatnonzero(when < num_columns)
    shown = np.full((2, num_series), np.nan)
    shown[:, at] = np.where(bad[:, at, when[at]], np.nan, values[:, at, when[at]])
    return _Found(at=at, num_apart=int(apart.sum()), steps=first + width * when, values=shown, usual=usual, noise=noise)


def _departures(d: Matrix) -> tuple[npt.NDArray[np.int64], Matrix, Matrix]:
    """Return (first column beyond noise, median, deviation) of each row; the number of columns where there is none.

    d: [series, columns], NaN where nothing is known.
    """
    num_series, num_columns = d.shape
    at = np.full(num_series, num_columns, np.int64)
    usual, noise = np.full(num_series, np.nan), np.full(num_series, np.nan)
    d = np.pad(d, ((0, 0), (0, LASTING - 1)), constant_values=np.nan)
    for begin in range(LEAST_POINTS, num_columns, RENEWED):
        end = min(begin + RENEWED, num_columns)
        window = d[:, max(0, begin - WINDOW) : begin]
        middle = _middle(window)
        deviation = 1.4826 * _middle(np.abs(window - middle[:, None]))
        is_known = np.isfinite(window).sum(axis=1) >= LEAST_POINTS
        bound = np.where(is_known, np.maximum(DEVIATIONS * deviation, ROUNDING), np.inf)
        with np.errstate(invalid="ignore"):
            is_equal = np.asarray(~(np.abs(window) > ROUNDING).any(axis=1))
            is_beyond = np.abs(d[:, begin : end + LASTING - 1] - middle[:, None]) > bound[:, None]
        later = [is_beyond[:, by : by + end - begin] | is_equal[:, None] for by in range(1, LASTING)]
        stays = np.logical_and.reduce([is_beyond[:, : end - begin], *later])
        fresh = np.flatnonzero(stays.any(axis=1) & (at == num_columns))
        at[fresh] = begin + stays[fresh].argmax(axis=1)
        usual[fresh], noise[fresh] = middle[fresh], deviation[fresh]
    return at, usual, noise


def _middle(values: Matrix) -> Matrix:
    """Return the median of what is known in each row; NaN where nothing is."""
    ordered = np.sort(values, axis=1)  # NaN goes last.
    num = np.isfinite(ordered).sum(axis=1)
    at = np.maximum(num - 1, 0)
    rows = np.arange(len(ordered))
    return np.where(num > 0, 0.5 * (ordered[rows, at // 2] + ordered[rows, (at + 1) // 2]), np.nan)
