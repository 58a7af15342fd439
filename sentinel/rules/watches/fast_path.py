"""Quick: a detector of logged values as C reads it, for the steps at which all is well (native/quick.h)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from sentinel.detect import AnomalyNan, AnomalyTurbulence, HiddenNan, NanStorm, SameBatch, State
from sentinel.detect.drift import Drift, Plateau
from sentinel.detect.nonfinite import CONVERGED
from sentinel.detect.vectorised import BaselineForm
from sentinel.detect.windowed import RollingMedian
from sentinel.native import quick as native
from sentinel.native import rolling
from sentinel.native.layout import FORM
from sentinel.rules.watches.compiled_plan import describe_form

_LEVEL = ("unit", "level", "noise", "size", "count", "best")
_ARRAYS = {
    "drift": (
        *(*_LEVEL, "above", "below", "run", "settled", "last", "change", "wander", "known", "told"),
        *("border", "moved", "rough", "walk", "since"),
    ),
    "plateau": (*_LEVEL, "best_at"),
    "hidden": ("last", "size", "change", "resolution", "recent", "changes", "repeated"),
    "rolling": tuple(name for name, _ in rolling.ARRAYS),
    "baseline": (),
    "finite": ("points",),
    "batch": ("last", "change", "changes", "run"),
}
"""Arrays of the state, in the order of native/quick.h."""


class Quick:
    """Describes a detector and its state to C, which then takes healthy points in exactly as the detector itself would."""

    def __init__(self, detector: Any, kind: str) -> None:
        self._detector, self._kind = detector, kind

    def describe(self, rule: native.FastRule, state: State) -> tuple[object, ...]:
        """Fill in what a rule of C says of the detector and of the arrays of `state`; return what must outlive it."""
        arrays = [state[name] for name in _ARRAYS[self._kind] if name in state]
        pointers = (ctypes.c_void_p * max(len(arrays), 1))(*(array.ctypes.data for array in arrays))
        parameters = self._parameters(state)
        address = parameters.ctypes.data if isinstance(parameters, np.ndarray) else ctypes.addressof(parameters)
        rule.kind, rule.isa = native.KINDS.index(self._kind), rolling.isa
        rule.parameters, rule.arrays = address, ctypes.addressof(pointers)
        scratch = rolling.scratch(parameters) if isinstance(parameters, rolling.RollingParameters) else np.empty(0)
        rule.scratch = scratch.ctypes.data
        return parameters, pointers, arrays, scratch

    def _parameters(self, state: State) -> Any:
        detector = self._detector
        if self._kind == "drift":
            return native.LevelParameters(
                threshold=detector.threshold, log_slack=math.log1p(detector.slack), slack_sigmas=detector.slack_sigmas,
                slack_wander=detector.slack_wander, slack_walk=detector.slack_walk, memory=detector.memory,
                warmup=detector.warmup, is_both=detector.sides == "both",
            )  # fmt: skip
        if self._kind == "plateau":
            return native.LevelParameters(
                share=detector.share, patience=detector.patience, log_improvement=math.log1p(detector.improvement),
                memory=detector.memory, warmup=detector.warmup,
            )  # fmt: skip
        if self._kind == "hidden":
            return native.HiddenParameters(repeats=detector.repeats, warmup=detector.warmup, converged=CONVERGED)
        if self._kind == "rolling":
            return detector.numbers
        if self._kind == "batch":
            return native.BatchParameters(
                log_share=math.log(detector.share), lasting=detector.lasting, warmup=detector.warmup
            )
        if self._kind == "finite":
            return ctypes.c_int64("points" in state)
        form = detector.form("value")
        assert isinstance(form, BaselineForm) and not form.common
        row = np.zeros(1, FORM)
        describe_form(row[0], form, state)
        return row


def quick_of(detector: Any) -> Quick | None:
    """Return the quick way of a detector; None where it has none: another class, a mode, no library."""
    # The very classes: one that is derived may do anything.
    if native.step is None:
        return None
    if type(detector) is Drift:
        return Quick(detector, "drift")
    if type(detector) is Plateau:
        return Quick(detector, "plateau")
    if type(detector) is SameBatch:
        return Quick(detector, "batch")
    if type(detector) is HiddenNan:
        return Quick(detector, "hidden")
    if type(detector) is NanStorm or (type(detector) is AnomalyNan and detector.threshold is None):
        return Quick(detector, "finite")
    if type(detector) is AnomalyTurbulence and not detector.compat:
        return Quick(detector, "baseline")
    if isinstance(detector, RollingMedian) and type(detector).score is RollingMedian.score and rolling.available:
        return Quick(detector, "rolling")
    return None
