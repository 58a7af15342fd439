"""Moments of CPU tensors and folding of rows: a C library through ctypes, or numpy with the same results.

    measure(pointers, numels, dtypes, out, ...)   many tensors in one call -> their STATS words
    measure_one(pointer, numel, dtype, out, ...)  the same for one, in about a microsecond: for hooks
    count_below(pointer, numel, dtype, bounds)    how many |x| lie below each bound, in one read
    add_channel_squares(pointer, rows, channels, dtype, sums)   squares of each channel
    tensor_reader                                 the first two of plain tensors as torch has them, see tensors.py; or None
    fold_rows(rows, num_rows) -> rows left        one row per (tensor, kind), in place
    point_at_own(rows, num_rows)                  rows that name no observation name their own, in place
    has_nonfinite(rows, num_rows) -> bool         whether a row counts a NaN or an infinity
    merge_rows(rows, group, num_groups) -> STATS  rows of several ranks merged
    judge_plan(stats, ..., plan, hits)          all running baselines and limits of a step; None without the library,
    prepare_plan(plan, hits) -> judge           for detect/vectorised.py is the numpy of it
    prepare_digest(...) -> digest(parts, ...)     the rows of all ranks merged, and what is odd; None likewise, see
                                                  ingest/digest.py
    take_again(...), take_gradient(...) -> bool   the short way through a hook, see tensors.py: False without the library
    take_rows(parts, ...) -> statistics, entries  some of those rows, as they are; None likewise
    take_rms(parts, ...) -> rms, rows              the root mean square of each of them; None likewise
    group_medians(values, group) -> medians       of small groups; None likewise, see detect/skew.py
    crc32(data, value, begin, end) -> int         as zlib's

`implementation` says which one this process has: `avx512`, `avx2` or `portable` (C, chosen at run time), or `numpy`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sentinel.native.layout import BF16, F16, F32, F64, pack_layouts
from sentinel.native.library import DigestRows, JudgePlan, Library, find_library
from sentinel.native.tensors import TensorReader, find_reader, never

_path = find_library()
_library: Library | None = None
if _path is not None:
    try:
        _library = Library(_path)
    except OSError:  # built for another machine, or truncated: as if it were not there
        _library = None

tensor_reader: TensorReader | None = None if _library is None else find_reader()

take_again: Callable[[Any, Any, bool, Any], bool] = tensor_reader.take_again if tensor_reader else never
take_gradient: Callable[[Any, Any], bool] = tensor_reader.take_gradient if tensor_reader else never

if _library is not None:
    implementation = _library.implementation
    measure = _library.measure
    count_below = _library.count_below
    add_channel_squares = _library.add_channel_squares
    measure_one = _library.measure_one
    fold_rows = _library.fold_rows
    point_at_own = _library.point_at_own
    has_nonfinite = _library.has_nonfinite
    merge_rows = _library.merge_rows
    judge_plan: Callable[..., int] | None = _library.judge_plan
    prepare_plan: Callable[[np.ndarray, np.ndarray], JudgePlan] | None = _library.prepare_plan
    prepare_digest: Callable[[np.ndarray, np.ndarray], DigestRows] | None = _library.prepare_digest
    take_rows: Callable[[bytes, int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] | None = _library.take_rows
    take_rms: Callable[[bytes, int, np.ndarray], tuple[np.ndarray, np.ndarray] | None] | None = _library.take_rms
    group_medians: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = _library.group_medians
    crc32 = _library.crc32
else:
    from sentinel.native import fallback as _fallback

    implementation = "numpy"
    measure = _fallback.measure
    count_below = _fallback.count_below
    add_channel_squares = _fallback.add_channel_squares
    measure_one = _fallback.measure_one
    fold_rows = _fallback.fold_rows
    point_at_own = _fallback.point_at_own
    has_nonfinite = _fallback.has_nonfinite
    merge_rows = _fallback.merge_rows
    judge_plan = None
    prepare_plan = None
    prepare_digest = None
    take_rows = None
    take_rms = None
    group_medians = None
    crc32 = _fallback.crc32

__all__ = [
    "BF16",
    "F16",
    "F32",
    "F64",
    "add_channel_squares",
    "count_below",
    "crc32",
    "fold_rows",
    "group_medians",
    "has_nonfinite",
    "implementation",
    "judge_plan",
    "measure",
    "measure_one",
    "merge_rows",
    "pack_layouts",
    "point_at_own",
    "prepare_digest",
    "prepare_plan",
    "take_again",
    "take_gradient",
    "take_rms",
    "take_rows",
    "tensor_reader",
]
