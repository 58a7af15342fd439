"""Sisters: a rule's scalars beside what sister runs on the same data logged at the same steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel.detect import State, rolling
from sentinel.detect.reference import Beside
from sentinel.detect.windowed import RollingMedian
from sentinel.reference import Reference, ReferenceSeries

if TYPE_CHECKING:
    import numpy.typing as npt

_WORDS = re.compile(r"[^a-z0-9]+")
_NORMS = {"norm", "gnorm", "gradnorm"}


class Sisters:
    """Looks up what the sisters had, and judges the rest. One place for each series of the watch, in its order."""

    def __init__(self, reference: Reference, detector: RollingMedian) -> None:
        self._reference = reference
        self._beside = Beside(detector)
        self._found: dict[str, _Lookup | None] = {}

    def grow(self, num_series: int) -> None:
        """Make room for so many series."""
        self._beside.grow(num_series)

    def judge(
        self, step: int, names: Sequence[str], slots: npt.NDArray[np.int64], values: np.ndarray, own: State
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (score, baseline, how far the sisters moved) of each series; the last is NaN where no sister has the step.

        own: the watch's state of these series, before it takes the values in.
        """
        score, baseline, moved = np.zeros(len(names)), np.full(len(names), np.nan), np.full(len(names), np.nan)
        spread = rolling.spread(own)
        for at, name in enumerate(names):
            lookup = self._lookup(name)
            if lookup is None or (found := lookup.at(step)) is None:
                continue
            score[at], baseline[at], moved[at] = self._beside.judge(
                int(slots[at]), float(values[at]), float(spread[at]), *found, lookup.num_runs
            )
        return score, baseline, moved

    def _lookup(self, name: str) -> _Lookup | None:
        if name not in self._found:
            series = self._reference.series
            key = name if name in series else role if (role := _role(name)) in series else None
            self._found[name] = None if key is None else _Lookup(series[key])
        return self._found[name]

    def to_dict(self) -> dict[str, Any]:
        """Return everything that changes, for a snapshot."""
        return self._beside.to_dict()

    def take_dict(self, data: dict[str, Any]) -> None:
        """Take back what `to_dict` gave."""
        self._beside.take_dict(data)


class _Lookup:
    """Numbers of one scalar's sisters by step."""

    def __init__(self, series: ReferenceSeries) -> None:
        self._steps, self._medians, self._unrest = series.arrays()
        self.num_runs = series.num_runs

    def at(self, step: int) -> tuple[float, float] | None:
        """Return median and unrest at a step; None where no sister has it."""
        place = int(np.searchsorted(self._steps, step))
        if place == len(self._steps) or int(self._steps[place]) != step:
            return None
        return float(self._medians[place]), float(self._unrest[place])


def _role(name: str) -> str:
    """Return what plain logs call a scalar of this name: `train/loss` is `loss` there; its own name for any other."""
    words = set(_WORDS.split(name.lower()))
    if words & {"eval", "val", "valid", "validation", "test", "aux", "balance", "kl"}:
        return name
    if "loss" in words:
        return "loss"
    return "grad_norm" if words & _NORMS and words & {"grad", "gradient", "total", "gnorm", "gradnorm", "global"} else name
