"""Points that are well, of a few series at a time, in C (quick.h): what a scalar rule does at nearly every step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from sentinel.native import rolling
from sentinel.native.library import find_library

NAMES = ("drift", "plateau", "hidden", "baseline", "finite")


class LevelParameters(ctypes.Structure):
    """The numbers of a drift or a plateau, as C reads them."""

    _fields_ = (
        *((name, ctypes.c_double) for name in (
            "threshold", "log_slack", "slack_sigmas", "share", "patience", "log_improvement",
        )),
        *((name, ctypes.c_int64) for name in ("memory", "warmup", "is_both")),
    )  # fmt: skip


class HiddenParameters(ctypes.Structure):
    """Those of a hidden NaN."""

    _fields_ = (("repeats", ctypes.c_int64), ("warmup", ctypes.c_int64))


def _find() -> dict[str, Callable[..., int]]:
    path = find_library()
    if path is None:
        return {}
    try:
        library = ctypes.PyDLL(str(path))
        found = {name: getattr(library, f"sentinel_quick_{name}") for name in NAMES}
    except (OSError, AttributeError):
        return {}
    for call in found.values():
        call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        call.restype = ctypes.c_int32
    return found


calls: dict[str, Callable[..., int]] = _find()
"""Name -> call(parameters, pointers to the arrays, number of series, values): 1 when all were taken in, 0 when any would be
anomalous and nothing was changed. Empty where the library is not there."""


class PreparedRolling:
    """One state, looked up once: takes in points that are well, as nearly all are, for the price of two calls."""

    def __init__(self, p: rolling.Parameters, state: dict[str, np.ndarray]) -> None:
        """state: whole arrays, which must outlive this."""
        if rolling._calls is None:
            raise RuntimeError("the C library was not built; sentinel.detect.rolling works without it")
        self._call, self._num = rolling._calls[1], len(state["unit"])
        self._scores, self._flags = np.zeros(self._num), np.zeros(self._num, np.bool_)
        self._scratch = np.empty(2 * max(p.window, p.settle_after) + 2)
        self._pointers = (ctypes.c_void_p * len(rolling._ARRAYS))(*(state[name].ctypes.data for name, _ in rolling._ARRAYS))
        self._p = p
        self._at = ctypes.addressof(p), ctypes.addressof(self._pointers)
        self._out = self._scores.ctypes.data, self._flags.ctypes.data, self._scratch.ctypes.data

    def take_healthy(self, values: int) -> int:
        """Take one point of each series in, and return 1; 0, and nothing is changed, where any scores 1. values: address."""
        scores, flags, scratch = self._out
        self._scores.fill(0.0)
        self._call(*self._at, 1, self._num, values, scores, None, rolling.SCORE, scratch, rolling.isa)
        if self._scores.max() >= 1.0:
            return 0
        self._call(*self._at, 1, self._num, values, scores, flags, rolling.LEARN, scratch, rolling.isa)
        return 1
