"""Points that are well, of all scalar rules of a step, in one call of C (fast_rules.h): nearly every step is such a one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from sentinel.native.library import find_library

KINDS = ("drift", "plateau", "hidden", "baseline", "finite", "rolling", "batch")
"""Ways to judge, by the number that C knows them by."""


class FastRule(ctypes.Structure):
    """One rule as C reads it: FastRule of fast_rules.h. What its addresses point at must outlive it."""

    parameters: int
    arrays: int
    values: int
    series: int
    scratch: int
    num: int
    kind: int
    isa: int

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parameters", "arrays", "values", "series", "scratch")),
        ("num", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("isa", ctypes.c_int32),
    )


class LevelParameters(ctypes.Structure):
    """The numbers of a drift or a plateau, as C reads them."""

    _fields_ = (
        *((name, ctypes.c_double) for name in (
            "threshold", "log_slack", "slack_sigmas", "slack_wander", "slack_walk", "share", "patience", "log_improvement",
        )),
        *((name, ctypes.c_int64) for name in ("memory", "warmup", "is_both")),
    )  # fmt: skip


class HiddenParameters(ctypes.Structure):
    """Those of a hidden NaN."""

    _fields_ = (("repeats", ctypes.c_int64), ("warmup", ctypes.c_int64), ("converged", ctypes.c_double))


class BatchParameters(ctypes.Structure):
    """Those of a batch that comes again."""

    _fields_ = (("log_share", ctypes.c_double), ("lasting", ctypes.c_int64), ("warmup", ctypes.c_int64))


def _find() -> Callable[[int, int, int, int], int] | None:
    path = find_library()
    if path is None:
        return None
    try:
        call = ctypes.PyDLL(str(path)).sentinel_fast_step
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_int64
    return call


step = _find()
"""step(rules, number of them, the step's values, taken): sets taken[i] to whether rule i took its points in. Where any would
be anomalous it did not, and changed nothing. Returns how many did. All are addresses. None without the library."""
