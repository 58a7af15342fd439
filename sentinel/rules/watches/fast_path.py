"""FastPath: a detector of logged values as C reads it, for the steps at which all is well (native/fast_rules.h)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sentinel.detect import AnomalyNan, AnomalyTurbulence, HiddenNan, NanStorm, SameBatch, State
from sentinel.detect.drift import Drift, Plateau
from sentinel.detect.nonfinite import CONVERGED
from sentinel.detect.vectorised import VectorisedBaseline
from sentinel.detect.windowed import GradNormSpike, LossSpike, RollingMedian
from sentinel.native import fast_rules as native
from sentinel.native import rolling
from sentinel.native.layout import PLAN_ROW
from sentinel.rules.watches.compiled_plan import describe_algorithm

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
"""Arrays of the state, in the order of native/fast_rules.h."""


class FastPath:
    """Describes a detector and its state to C, which then takes healthy points in exactly as the detector itself would."""

    def __init__(self, detector: Any, kind: str) -> None:
        self._detector, self._kind = detector, kind

    def describe(self, rule: native.FastRule, state: State) -> tuple[object, ...]:
        """Fill in what a rule of C says of the detector and of the arrays of `state`; return what must outlive it."""
        arrays = [state[name] for name in _ARRAYS[self._kind] if name in state]
        pointers = (ctypes.c_void_p * max(len(arrays), 1))(*(array.ctypes.data for array in arrays))
        parameters = _PARAMETERS[self._kind](self._detector, state)
        address = parameters.ctypes.data if isinstance(parameters, np.ndarray) else ctypes.addressof(parameters)
        rule.kind, rule.isa = native.KINDS.index(self._kind), rolling.isa
        rule.parameters, rule.arrays = address, ctypes.addressof(pointers)
        scratch = rolling.scratch(parameters) if isinstance(parameters, rolling.RollingParameters) else np.empty(0)
        rule.scratch = scratch.ctypes.data
        return parameters, pointers, arrays, scratch


def _of_drift(detector: Any, state: State) -> Any:
    return native.LevelParameters(
        threshold=detector.threshold, log_slack=math.log1p(detector.slack), slack_sigmas=detector.slack_sigmas,
        slack_wander=detector.slack_wander, slack_walk=detector.slack_walk, memory=detector.memory, warmup=detector.warmup,
        is_both=detector.sides == "both",
    )  # fmt: skip


def _of_plateau(detector: Any, state: State) -> Any:
    return native.LevelParameters(
        share=detector.share, patience=detector.patience, log_improvement=math.log1p(detector.improvement),
        memory=detector.memory, warmup=detector.warmup,
    )  # fmt: skip


def _of_hidden(detector: Any, state: State) -> Any:
    return native.HiddenParameters(repeats=detector.repeats, warmup=detector.warmup, converged=CONVERGED)


def _of_batch(detector: Any, state: State) -> Any:
    return native.BatchParameters(log_share=math.log(detector.share), lasting=detector.lasting, warmup=detector.warmup)


def _of_baseline(detector: Any, state: State) -> Any:
    baseline = detector.vectorised("value")
    assert isinstance(baseline, VectorisedBaseline) and not baseline.common
    row = np.zeros(1, PLAN_ROW)
    describe_algorithm(row[0], baseline, state)
    return row


_PARAMETERS: dict[str, Callable[[Any, State], Any]] = {
    "drift": _of_drift,
    "plateau": _of_plateau,
    "hidden": _of_hidden,
    "rolling": lambda detector, state: detector.numbers,
    "baseline": _of_baseline,
    "finite": lambda detector, state: ctypes.c_int64("points" in state),
    "batch": _of_batch,
}
"""Kind of native/fast_rules.h -> the parameters that C gets of a detector of that kind."""
_KIND_OF: dict[type[Any], str] = {
    Drift: "drift", Plateau: "plateau", SameBatch: "batch", HiddenNan: "hidden", NanStorm: "finite", AnomalyNan: "finite",
    AnomalyTurbulence: "baseline", RollingMedian: "rolling", LossSpike: "rolling", GradNormSpike: "rolling",
}  # fmt: skip
"""The very classes that have a fast path: one that is derived may do anything."""
_HAS_NONE: dict[type[Any], Callable[[Any], bool]] = {
    AnomalyNan: lambda detector: detector.threshold is not None,
    AnomalyTurbulence: lambda detector: bool(detector.compat),
}
"""Classes with arguments under which they have none."""


def fast_path_of(detector: Any) -> FastPath | None:
    """Return the fast path of a detector; None where it has none: another class, a mode, no library."""
    kind = _KIND_OF.get(type(detector))
    if native.step is None or kind is None or (kind == "rolling" and not rolling.available):
        return None
    has_none = _HAS_NONE.get(type(detector))
    return None if has_none is not None and has_none(detector) else FastPath(detector, kind)
