"""Rolling medians of scalars in C (rolling.h): one call for many series, many points, or both."""

from __future__ import annotations

import ctypes

import numpy as np

from sentinel.native.library import find_library

SCORE, LEARN = 1, 2
"""What a call does with each point; both: score it, then take it in."""


class RollingParameters(ctypes.Structure):
    """The numbers of a detector, as C reads them. `floor` is on the asinh scale: log(1 + rise)."""

    k: float
    floor: float
    near_zero: float
    window: int
    memory: int
    warmup: int
    settle_after: int

    _fields_ = (
        ("k", ctypes.c_double),
        ("floor", ctypes.c_double),
        ("near_zero", ctypes.c_double),
        ("window", ctypes.c_int32),
        ("memory", ctypes.c_int32),
        ("warmup", ctypes.c_int32),
        ("settle_after", ctypes.c_int32),
    )


ARRAYS = (
    ("points", np.float64), ("recent", np.float32), ("ordered", np.float32), ("residuals", np.float32),
    ("marks", np.float32), ("held", np.float64), ("unit", np.float64), ("center", np.float64), ("seen", np.int64),
    ("kept", np.int64), ("run", np.int64), ("filled", np.int32), ("at", np.int32), ("settled", np.bool_),
    ("second", np.float32),
)  # fmt: skip
"""Arrays of the state, in the order of RollingState."""


isa = 0
"""Instruction set in use, as sentinel_best_isa says, or less."""


def _find() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer] | None:
    path = find_library()
    if path is None:
        return None
    try:
        found = ctypes.CDLL(str(path)).sentinel_rolling_medians, ctypes.PyDLL(str(path)).sentinel_rolling_medians
    except (OSError, AttributeError):
        return None
    global isa
    isa = int(ctypes.CDLL(str(path)).sentinel_best_isa())
    for call in found:
        i64, pointer = ctypes.c_int64, ctypes.c_void_p
        call.argtypes = [pointer, pointer, i64, i64, pointer, pointer, pointer, ctypes.c_int32, pointer, ctypes.c_int32]
        call.restype = None
    return found


_calls = _find()
available = _calls is not None
"""Whether the library is there; where it is not, `sentinel.detect.rolling` does the same in numpy."""


def scratch(p: RollingParameters) -> np.ndarray:
    """Return room that a call needs; what is in it is of no matter before or after."""
    return np.empty(2 * max(p.window, p.settle_after) + 2)


GIL_POINTS = 2000
"""Points up to which a call keeps the GIL, for some 50 us: to get it back may take 5 ms, Python's switch interval."""


def run(
    p: RollingParameters, state: dict[str, np.ndarray], values: np.ndarray, steps: int, flags: np.ndarray | None = None
) -> np.ndarray:
    """Score and take in values [points, series]; return scores of that shape (zeros where `steps` asks for none).

    state: as `sentinel.detect.rolling.new_state` makes it, changed in place. flags: [points, series] bool, what is
    anomalous; None: where the score reaches 1. RuntimeError where there is no library.
    """
    if _calls is None:
        raise RuntimeError("the C library was not built; sentinel.detect.rolling works without it")
    values = np.ascontiguousarray(values, np.float64)
    num_points, num_series = values.shape
    scores = np.empty(values.shape) if steps & SCORE else np.zeros(values.shape)
    if not values.size:
        return scores
    if flags is not None:
        flags = np.ascontiguousarray(flags, np.bool_)
    # A caller may hand in slices of a larger state: they are written in place, so they must lie as C expects them.
    pointers = []
    for name, dtype in ARRAYS:
        array = state[name]
        if array.dtype != dtype or not array.flags.c_contiguous or len(array) != num_series:
            raise ValueError(f"state {name}: expected {num_series} contiguous rows of {np.dtype(dtype)}")
        pointers.append(array.ctypes.data)
    room = scratch(p)
    call = _calls[1] if values.size <= GIL_POINTS else _calls[0]
    call(
        ctypes.addressof(p), (ctypes.c_void_p * len(pointers))(*pointers), num_points, num_series, values.ctypes.data,
        scores.ctypes.data, None if flags is None else flags.ctypes.data, steps, room.ctypes.data, isa,
    )  # fmt: skip
    return scores


def exponential(values: np.ndarray, k: float, rate: float) -> np.ndarray:
    """Return the scores of an exponential mean of [points, series]: the measure of `run`. RuntimeError as there."""
    path = find_library()
    if _calls is None or path is None:
        raise RuntimeError("the C library was not built")
    values = np.ascontiguousarray(values, np.float64)
    scores, mean, variance = np.zeros(values.shape), np.zeros(values.shape[1]), np.ones(values.shape[1])
    call = ctypes.CDLL(str(path)).sentinel_exponential
    i64, f64, pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    call.argtypes = [i64, i64, pointer, pointer, f64, f64, pointer, pointer]
    call.restype = None
    call(*values.shape, values.ctypes.data, scores.ctypes.data, k, rate, mean.ctypes.data, variance.ctypes.data)
    return scores
