"""Quick: a scalar rule at a step that is well. Numpy on one or two series costs 100 us, a call of the C extension 2."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sentinel.detect import AnomalyNan, AnomalyTurbulence, HiddenNan, NanStorm, State
from sentinel.detect.drift import Drift, Plateau
from sentinel.detect.forms import BaselineForm
from sentinel.detect.windowed import RollingMedian
from sentinel.native import quick as native
from sentinel.native import rolling
from sentinel.native.layout import FORM
from sentinel.rules.programme import describe_form

_LEVEL = ("unit", "level", "noise", "size", "count", "best")
_ARRAYS = {
    "drift": (*_LEVEL, "above", "below", "run", "settled"),
    "plateau": (*_LEVEL, "best_at"),
    "hidden": ("last", "size", "change", "resolution", "changes", "repeated"),
}
"""Arrays of the state, in the order of native/quick.h."""


class Quick:
    """Takes healthy points into a state, in place, exactly as the detector itself would; says when it may not."""

    def __init__(self, detector: Any, name: str) -> None:
        self._detector, self._name = detector, name
        self._arrays: list[np.ndarray] = []
        self._names: tuple[str, ...] = ()
        self._call: Callable[[int, int], int] | None = None

    def take(self, values: np.ndarray, state: State) -> bool:
        """Take one point of each series in; False, and nothing is changed, where any is anomalous. values: float64."""
        names = self._names
        if self._call is None or not all(state[name] is array for name, array in zip(names, self._arrays, strict=True)):
            self._names = tuple(state)
            self._arrays = list(state.values())
            self._call = self._prepare(state)
        return self._call(values.__array_interface__["data"][0], len(values)) == 1

    def _prepare(self, state: State) -> Callable[[int, int], int]:
        """Look up where the arrays of a state lie: as long as they are the same, they lie there."""
        if self._name == "rolling":
            return _rolling(self._detector, state)
        parameters, names = _parameters(self._detector, self._name, state)
        pointers = (ctypes.c_void_p * max(len(names), 1))(*(state[name].ctypes.data for name in names))
        call, at, of = native.calls[self._name], _address(parameters), ctypes.addressof(pointers)

        def take(values: int, num: int, _kept: Any = (parameters, pointers)) -> int:
            return call(at, of, num, values)

        return take


def quick_of(detector: Any) -> Quick | None:
    """Return the quick way of a detector; None where it has none: another class, a mode, no library."""
    # The very classes: one that is derived may do anything.
    if type(detector) is Drift:
        name = "drift"
    elif type(detector) is Plateau:
        name = "plateau"
    elif type(detector) is HiddenNan:
        name = "hidden"
    elif type(detector) is NanStorm or (type(detector) is AnomalyNan and detector.threshold is None):
        name = "finite"
    elif type(detector) is AnomalyTurbulence and not detector.compat:
        name = "baseline"
    elif isinstance(detector, RollingMedian) and type(detector).score is RollingMedian.score and rolling.available:
        return Quick(detector, "rolling")
    else:
        return None
    return Quick(detector, name) if native.calls else None


def _parameters(detector: Any, name: str, state: State) -> tuple[Any, tuple[str, ...]]:
    if name == "drift":
        numbers: Any = native.LevelParameters(
            threshold=detector.threshold, log_slack=math.log1p(detector.slack), slack_sigmas=detector.slack_sigmas,
            memory=detector.memory, warmup=detector.warmup, is_both=detector.sides == "both",
        )  # fmt: skip
    elif name == "plateau":
        numbers = native.LevelParameters(
            share=detector.share, patience=detector.patience, log_improvement=math.log1p(detector.improvement),
            memory=detector.memory, warmup=detector.warmup,
        )  # fmt: skip
    elif name == "finite":
        names = ("points",) if "points" in state else ()
        return ctypes.c_int64(len(names)), names
    elif name == "hidden":
        numbers = native.HiddenParameters(repeats=detector.repeats, warmup=detector.warmup)
    else:
        form = detector.form("value")
        assert isinstance(form, BaselineForm) and not form.common
        numbers = np.zeros(1, FORM)
        describe_form(numbers[0], form, state)
        return numbers, ()
    return numbers, _ARRAYS[name]


def _address(parameters: Any) -> int:
    if isinstance(parameters, np.ndarray):
        return int(parameters.ctypes.data)
    return ctypes.addressof(parameters)


def _rolling(detector: RollingMedian, state: State) -> Callable[[int, int], int]:
    prepared = native.PreparedRolling(detector._numbers, state)
    return lambda values, num: prepared.take_healthy(values)
