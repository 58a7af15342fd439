"""Buckets of steps: least, greatest, mean and last of each statistic, and every non-finite value counted.

A value of one step is the least or the greatest of its bucket or between them, at every width: nothing vanishes by
sampling. Rows of one bucket may lie in several files; they merge when files are merged, and when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sentinel.history.table_schemas import STATISTICS, Columns


def buckets_of(rows: Columns, width: int, statistics: Sequence[str] = STATISTICS) -> Columns:
    """Return the buckets of moments rows, which are sorted by series, attempt and step.

    width: steps of a bucket. statistics: of which; the others' columns are not there.
    """
    bad = rows["nans"] + rows["pos_infs"] + rows["neg_infs"]
    parts: Columns = {
        **{name: rows[name] for name in ("series", "attempt", "step", "nans")},
        "last_step": rows["step"],
        "num_steps": np.ones(len(bad), np.int64),
        "infs": rows["pos_infs"] + rows["neg_infs"],
        "bad_steps": (bad > 0).astype(np.int64),
    }
    for name in statistics:
        values = rows[name]
        parts[f"{name}_num"] = np.isfinite(values).astype(np.int64)
        for of in ("min", "max", "avg", "last"):
            parts[f"{name}_{of}"] = values
    return merged(parts, width, statistics)


def merged(parts: Columns, width: int, statistics: Sequence[str] = STATISTICS) -> Columns:
    """Return buckets of buckets that are at most as wide, sorted by series, attempt and step. As of `buckets_of` else."""
    begins = parts["step"] // width * width
    starts = starts_of(parts["series"], parts["attempt"], begins)
    ends = np.append(starts[1:], len(begins))[: len(starts)] - 1

    def total(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.add.reduceat(values, starts) if len(starts) else values[:0]

    found: Columns = {
        "series": parts["series"][starts],
        "attempt": parts["attempt"][starts],
        "step": begins[starts],
        "last_step": parts["last_step"][ends],
        **{name: total(parts[name]) for name in ("num_steps", "nans", "infs", "bad_steps")},
    }
    for name in statistics:
        num = parts[f"{name}_num"]
        found[f"{name}_num"] = counted = total(num)
        found[f"{name}_min"] = np.fmin.reduceat(parts[f"{name}_min"], starts) if len(starts) else np.empty(0)
        found[f"{name}_max"] = np.fmax.reduceat(parts[f"{name}_max"], starts) if len(starts) else np.empty(0)
        found[f"{name}_avg"] = _mean(parts[f"{name}_avg"], num, counted, starts)
        found[f"{name}_last"] = _last(parts[f"{name}_last"], starts)
    return found


def starts_of(*keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where rows begin whose keys differ from those before."""
    if not len(keys[0]):
        return np.empty(0, np.int64)
    is_new = np.ones(len(keys[0]), np.bool_)
    is_new[1:] = np.logical_or.reduce([one[1:] != one[:-1] for one in keys])
    return np.flatnonzero(is_new)


def _mean(
    values: npt.NDArray[np.float64],
    num: npt.NDArray[np.int64],
    counted: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    if not len(starts):
        return np.empty(0)
    # By share and not by sum: the sum of values near the largest float64 would be infinite.
    sizes = np.diff(np.append(starts, len(num)))
    share = num / np.repeat(np.maximum(counted, 1), sizes)
    found: npt.NDArray[np.float64] = np.add.reduceat(np.where(num > 0, values, 0.0) * share, starts)
    return np.where(counted > 0, found, np.nan)


def _last(values: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the last value of each group that is defined; NaN where none is."""
    if not len(starts):
        return np.empty(0)
    at = np.maximum.reduceat(np.where(np.isnan(values), -1, np.arange(len(values))), starts)
    return np.where(at >= starts, values[np.maximum(at, 0)], np.nan)
