"""Moments: statistics of many rows at once, how they merge, and every statistic derived from them.

What is held are central moments in float64 (count, mean, m2, m3, m4), which merge exactly over blocks, micro-steps,
shards and ranks. Ratios (std, kurtosis) are formed here, once, last.

Sources: Pebay, SAND2008-6212, eq. 3.1; Chan, Golub, LeVeque 1982.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import numpy as np

from sentinel.errors import UndefinedStatistic
from sentinel.record import STATISTICS, STATS_DTYPE, Kind

EMPTY = np.zeros((), STATS_DTYPE)
"""Statistics of nothing: count 0, min +inf, max -inf."""
EMPTY["min"], EMPTY["max"] = np.inf, -np.inf

UNKNOWN_COUNT = -1
"""A `num_zero` that nobody counted: statistics that came from elsewhere. Sums of it stay below 0: `zeros` is undefined."""

_COUNTS = ("num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "checksum")
_QUIET: dict[str, Any] = {"divide": "ignore", "over": "ignore", "under": "ignore", "invalid": "ignore"}


class Moments:
    """Statistics of rows. Every derived statistic has shape [rows], float64, NaN where it is undefined.

    No derived statistic overflows or underflows between 1e-30 and 1e30 in the elements' scale; what float64 cannot hold
    (fourth powers past 1e77) is inf in `m4` and NaN in `kurtosis`.
    """

    __slots__ = ("stats",)

    def __init__(self, stats: np.ndarray) -> None:
        self.stats = np.atleast_1d(np.asarray(stats, STATS_DTYPE))
        """[rows] STATS_DTYPE."""

    def __len__(self) -> int:
        return len(self.stats)

    def __getitem__(self, index: Any) -> Moments:
        """Return the rows that `index` (number, slice, mask or integers) picks."""
        return Moments(self.stats[index])

    # -- making them ------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, x: Any, zero_eps: float = 0.0) -> Moments:
        """Return the moments of all elements of `x` as one row: two passes in float64. Checksum is 0.

        The slow, obvious way; collect/kernels and native are the fast ones.
        """
        values = np.asarray(x, np.float64).ravel()
        finite = values[np.isfinite(values)]
        stats = np.full(1, EMPTY)
        stats["num_nan"] = np.count_nonzero(np.isnan(values))
        stats["num_pos_inf"] = np.count_nonzero(values == np.inf)
        stats["num_neg_inf"] = np.count_nonzero(values == -np.inf)
        if finite.size == 0:
            return cls(stats)
        low, high = finite.min(), finite.max()
        stats["count"], stats["min"], stats["max"] = finite.size, low, high
        stats["num_zero"] = np.count_nonzero(np.abs(finite) <= zero_eps)
        with np.errstate(**_QUIET):
            scale = int(np.frexp(max(abs(low), abs(high)))[1])
            scaled = np.ldexp(finite, -scale)
            center = scaled.mean()
            d = scaled - center if low < high else np.zeros_like(scaled)
            center += d.mean()
            d -= d.mean()
            # Twice scaled: the deviations may be far smaller than the values.
            reach = int(np.frexp(np.abs(d).max())[1])
            d = np.ldexp(d, -reach)
            stats["mean"] = np.clip(np.ldexp(center, scale), low, high)
            for name, power in (("m2", 2), ("m3", 3), ("m4", 4)):
                stats[name] = np.ldexp((d**power).sum(), power * (scale + reach))
        return cls(stats)

    @classmethod
    def empty(cls, rows: int) -> Moments:
        """Return `rows` rows of nothing."""
        return cls(np.full(rows, EMPTY))

    @classmethod
    def from_rows(cls, rows: np.ndarray) -> Moments:
        """Return the moments held in `rows`: ROW_DTYPE, STATS_DTYPE, or any dtype with the fields of STATS_DTYPE. Copies."""
        if rows.dtype == STATS_DTYPE:
            return cls(rows.copy())
        stats = np.empty(rows.shape, STATS_DTYPE)
        for name in STATS_DTYPE.names or ():
            stats[name] = rows[name]
        return cls(stats)

    # -- merging ----------------------------------------------------------------------------------------------------

    def merge(self, other: Moments) -> Moments:
        """Return row by row the moments of both together: [rows], the other of as many rows, or of one.

        Counts and checksums add, min and max widen, an empty row changes nothing.

        Source: Pebay, SAND2008-6212, eq. 3.1.
        """
        a, b = self.stats, other.stats
        (rows,) = np.broadcast_shapes(a.shape, b.shape)
        a, b = np.broadcast_to(a, rows), np.broadcast_to(b, rows)
        out = np.empty(rows, STATS_DTYPE)
        for name in ("count", *_COUNTS):
            out[name] = a[name] + b[name]
        out["min"], out["max"] = np.minimum(a["min"], b["min"]), np.maximum(a["max"], b["max"])
        with np.errstate(**_QUIET):
            na, nb = a["count"].astype(np.float64), b["count"].astype(np.float64)
            n = na + nb
            fa, fb = na / n, nb / n
            d = b["mean"] - a["mean"]
            dd, pairs = d * d, na * fb
            out["mean"] = a["mean"] + d * fb
            out["m2"] = a["m2"] + b["m2"] + dd * pairs
            out["m3"] = a["m3"] + b["m3"] + dd * d * pairs * (fa - fb) + 3.0 * d * (fa * b["m2"] - fb * a["m2"])
            out["m4"] = (
                a["m4"] + b["m4"] + dd * dd * pairs * (fa * fa - fa * fb + fb * fb)
                + 6.0 * dd * (fa * fa * b["m2"] + fb * fb * a["m2"]) + 4.0 * d * (fa * b["m3"] - fb * a["m3"])
            )  # fmt: skip
        for name in ("mean", "m2", "m3", "m4"):
            out[name] = np.where(nb == 0, a[name], np.where(na == 0, b[name], out[name]))
        return Moments(out)

    @staticmethod
    def merge_groups(stats: np.ndarray, group_index: np.ndarray, num_groups: int) -> Moments:
        """Return the moments of each group of rows: [num_groups]; a group without rows is empty.

        stats: [n], any dtype with the fields of STATS_DTYPE; group_index: [n] integers below num_groups, negative: left
        out. Sums run in the order of the rows, so the same rows give the same bits.

        Source: Pebay's formulas for many parts at once, about the mean of the whole.
        """
        group = np.asarray(group_index, np.int64)
        out = np.full(num_groups, EMPTY)
        kept = group >= 0
        for name in _COUNTS:
            np.add.at(out[name], group[kept], stats[name][kept])
        kept &= stats["count"] > 0
        group = group[kept]
        if group.size == 0:
            return Moments(out)
        count, mean, m2, m3, m4 = (stats[name][kept] for name in ("count", "mean", "m2", "m3", "m4"))
        np.add.at(out["count"], group, count)
        np.minimum.at(out["min"], group, stats["min"][kept])
        np.maximum.at(out["max"], group, stats["max"][kept])
        # About the first mean of its group, so that a large common mean costs no digits.
        origin = np.zeros(num_groups)
        origin[group[::-1]] = mean[::-1]
        weight = count.astype(np.float64)

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(group, values, num_groups)

        with np.errstate(**_QUIET):
            out["mean"] = origin + total(weight / out["count"][group] * (mean - origin[group]))
            d = mean - out["mean"][group]
            dd = d * d
            out["m2"] = total(m2 + weight * dd)
            out["m3"] = total(m3 + 3.0 * d * m2 + weight * dd * d)
            out["m4"] = total(m4 + 4.0 * d * m3 + 6.0 * dd * m2 + weight * dd * dd)
        return Moments(out)

    def set_norm_only(self, rows: np.ndarray, norm: np.ndarray) -> None:
        """Have rows (a mask) say no more of their elements' size than a norm, [rows] float64: mean and std stay undefined.

        They hold m2 = norm**2 about a mean of 0, and m3 = inf beside m4 = NaN, which no elements have: so they merge to the
        norm of the whole, and what is undefined stays so.
        """
        for name, value in (("mean", 0.0), ("m3", np.inf), ("m4", np.nan)):
            self.stats[name][rows] = value
        self.stats["m2"][rows] = np.square(norm[rows])

    # -- statistics -------------------------------------------------------------------------------------------------

    def statistic(self, name: str) -> np.ndarray:
        """Return the statistic of record.STATISTICS called `name`; [rows], float64.

        Raises UndefinedStatistic, with the nearest names, where there is none of that name.
        """
        method = _BY_NAME.get(name)
        if method is None:
            near = difflib.get_close_matches(name, STATISTICS, n=2, cutoff=0.5)
            hint = "did you mean " + " or ".join(f'"{other}"' for other in near) + "? " if near else ""
            raise UndefinedStatistic(f'unknown statistic "{name}"; {hint}known: {", ".join(STATISTICS)}')
        return method(self)

    def num_elements(self) -> np.ndarray:
        """Return the number of elements of each row, finite or not; [rows], int64."""
        s = self.stats
        return np.asarray(s["count"] + s["num_nan"] + s["num_pos_inf"] + s["num_neg_inf"])

    def mean(self) -> np.ndarray:
        """Return the mean of the finite elements; NaN where there is none."""
        return self._where_centred(self._where_any(self.stats["mean"]))

    def var(self) -> np.ndarray:
        """Return the population variance, M2 / n, in squared units of the elements; NaN where no element is finite."""
        return self._where_centred(self._where_any(self.stats["m2"] / self._count()))

    def std(self) -> np.ndarray:
        """Return the population standard deviation, in units of the elements; NaN where no element is finite."""
        return np.asarray(np.sqrt(self.var()))

    def rms(self) -> np.ndarray:
        """Return the root of the mean square; NaN where no element is finite."""
        return self._where_any(np.hypot(self.stats["mean"], np.sqrt(self.stats["m2"] / self._count())))

    def norm(self) -> np.ndarray:
        """Return the Euclidean norm of the finite elements; 0 for a row without elements, NaN where none of them is finite.

        Merges where rows merge: the norm of the shards' moments is the norm of the whole.
        """
        norm = self.rms() * np.sqrt(self.stats["count"].astype(np.float64))
        return np.where(self.num_elements() == 0, 0.0, norm)

    def min(self) -> np.ndarray:
        """Return the smallest finite element; NaN where there is none, or nobody knows it."""
        return self._where_known(self.stats["min"])

    def max(self) -> np.ndarray:
        """Return the largest finite element; NaN where there is none, or nobody knows it."""
        return self._where_known(self.stats["max"])

    def absmax(self) -> np.ndarray:
        """Return the largest absolute value of the finite elements; NaN where there is none."""
        return self._where_known(np.maximum(np.abs(self.stats["min"]), np.abs(self.stats["max"])))

    def skew(self) -> np.ndarray:
        """Return the third standardized moment: dimensionless, 0.0 for a symmetric distribution.

        NaN where a row holds fewer than two finite elements or has no variance.

        Source: sqrt(n) * M3 / M2**1.5 with population moments.
        """
        with np.errstate(**_QUIET):
            std = np.sqrt(self.stats["m2"] / self._count())
            skew = self._where_varied(self.stats["m3"] / self._count() / std / std / std)
            return self._where_centred(skew)

    def kurtosis(self) -> np.ndarray:
        """Return the fourth standardized moment of each row: dimensionless, 3.0 for a Gaussian, at least 1.

        NaN where a row holds fewer than two finite elements or has no variance (or its M4 does not fit float64).

        Source: n * M4 / M2**2 with population moments; merge rule Pebay, SAND2008-6212, eq. 3.1.
        """
        with np.errstate(**_QUIET):
            m2, m4 = self.stats["m2"], self.stats["m4"]
            kurtosis = self._where_varied(m4 / m2 * (self._count() / m2))
            # M4 >= M2**2 / n always: a zero or an infinite M4 beside a variance is one that float64 could not hold.
            return np.where((m4 > 0) & np.isfinite(m4), kurtosis, np.nan)

    def nans(self) -> np.ndarray:
        """Return the number of NaN elements."""
        return np.asarray(self.stats["num_nan"], np.float64)

    def infs(self) -> np.ndarray:
        """Return the number of infinite elements of either sign."""
        return np.asarray(self.stats["num_pos_inf"] + self.stats["num_neg_inf"], np.float64)

    def zeros(self) -> np.ndarray:
        """Return the share of all elements, in [0, 1], that are zero (|x| <= zero_eps); NaN for a row without elements."""
        total = self.num_elements().astype(np.float64)
        with np.errstate(**_QUIET):
            return np.where((total > 0) & (self.stats["num_zero"] >= 0), self.stats["num_zero"] / total, np.nan)

    def raw_moments(self) -> dict[str, np.ndarray]:
        """Return sums about zero for exports: count, s1 .. s4, each [rows] float64. They lose digits; never merge them.

        Source: S2 = M2 + n mu^2, S3 = M3 + 3 mu M2 + n mu^3, S4 = M4 + 4 mu M3 + 6 mu^2 M2 + n mu^4.
        """
        n, mean, m2, m3, m4 = (self.stats[name].astype(np.float64) for name in ("count", "mean", "m2", "m3", "m4"))
        with np.errstate(**_QUIET):
            square = mean * mean
            return {
                "count": n,
                "s1": self._where_centred(n * mean),
                "s2": m2 + n * square,
                "s3": m3 + 3.0 * mean * m2 + n * square * mean,
                "s4": m4 + 4.0 * mean * m3 + 6.0 * square * m2 + n * square * square,
            }

    def _count(self) -> np.ndarray:
        """Return the count as float64, 1 where it is 0: for denominators."""
        return np.asarray(np.maximum(self.stats["count"], 1), np.float64)

    def _where_any(self, values: np.ndarray) -> np.ndarray:
        return np.where(self.stats["count"] > 0, values, np.nan)

    def _where_known(self, values: np.ndarray) -> np.ndarray:
        # min=+inf and max=-inf stand for none, and merge as none: finite elements have finite ones.
        return np.where(np.isfinite(values), values, np.nan)

    def _where_centred(self, values: np.ndarray) -> np.ndarray:
        """Return the values, NaN in rows whose mean is not known: see `set_norm_only`."""
        about_zero = np.isposinf(self.stats["m3"])
        if about_zero.any():
            about_zero &= np.isnan(self.stats["m4"])
            return np.where(about_zero, np.nan, values)
        return values

    def _where_varied(self, values: np.ndarray) -> np.ndarray:
        return np.where((self.stats["count"] > 1) & (self.stats["m2"] > 0), values, np.nan)


_BY_NAME: dict[str, Callable[[Moments], np.ndarray]] = {
    "mean": Moments.mean,
    "std": Moments.std,
    "var": Moments.var,
    "norm": Moments.norm,
    "rms": Moments.rms,
    "min": Moments.min,
    "max": Moments.max,
    "absmax": Moments.absmax,
    "skew": Moments.skew,
    "kurtosis": Moments.kurtosis,
    "nans": Moments.nans,
    "infs": Moments.infs,
    "zeros": Moments.zeros,
}
"""Every statistic of record.STATISTICS, by public name."""


MIN_TAIL_ELEMENTS = 64
"""Elements of a tensor of which one can stand out: the kurtosis is at most the number of elements. Fewer: ordinary values
stand out; more: small tensors are never looked at."""
LONE_SHARE = 0.99
"""Share of the kurtosis that one element alone would make, from which that element is nearly all of a weight: the root of
the others' sum of squares is a tenth of it at most."""


def tails(rows: np.ndarray) -> np.ndarray:
    """Return the kurtosis of each row as a share of what one element alone would make it; 0 where it has too few."""
    count = rows["count"].astype(np.float64)
    with np.errstate(all="ignore"):
        # As shares of the second moment: its square overflows where a value is 1e200.
        share = rows["m4"] / np.maximum(rows["m2"], 1e-300) / np.maximum(rows["m2"], 1e-300)
    return np.where((count >= MIN_TAIL_ELEMENTS) & np.isfinite(share), share, 0.0)


def lone_rows(rows: np.ndarray) -> np.ndarray:
    """Return the places of the rows of weights of which one element is nearly all, rising. rows: [rows] ROW_DTYPE."""
    of_weights = np.flatnonzero(rows["kind"] == Kind.PARAM)
    return of_weights[tails(rows[of_weights]) >= LONE_SHARE]


def raw_statistic(rows: np.ndarray, statistic: str) -> np.ndarray:
    """Return the statistic of each row as torch would give it: NaN where it holds a NaN, +-inf for infinities."""
    values = np.array(Moments.from_rows(rows).statistic(statistic), dtype=np.float64)
    if statistic in ("nans", "infs", "zeros"):
        return values
    up, down = rows["num_pos_inf"] > 0, rows["num_neg_inf"] > 0
    signed = statistic in ("mean", "min", "max", "skew")
    if statistic != "min":
        values[up] = np.inf
    if statistic != "max":
        values[down] = -np.inf if signed else np.inf
    if statistic in ("mean", "skew", "std", "var", "kurtosis"):
        values[up & down] = np.nan
    values[rows["num_nan"] > 0] = np.nan
    return values
