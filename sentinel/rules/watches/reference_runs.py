"""ReferenceRuns: a rule's scalars beside what reference runs on the same data logged at the same steps."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from sentinel.detect.residual import LAGS, Beside, logarithm
from sentinel.detect.windowed import RollingMedian
from sentinel.reference import Reference, ReferenceSeries

log = logging.getLogger("sentinel.rules")

_WORDS = re.compile(r"[^a-z0-9]+")
_NORMS = {"norm", "gnorm", "gradnorm"}


class ReferenceRuns:
    """Looks up what the reference runs had, and judges the rest: each scalar by itself."""

    def __init__(self, rule: str, reference: Reference, detector: RollingMedian) -> None:
        """rule: its name, for messages."""
        self._rule, self._reference, self._detector = rule, reference, detector
        self._beside: dict[str, Beside] = {}
        self._found: dict[str, Lookup | None] = {}
        self._reported: set[str] = set()

    def judge(self, step: int, names: Sequence[str], values: np.ndarray) -> ReferenceScalars:
        """Score one value of each scalar beside its reference runs, and take it in."""
        found = ReferenceScalars(len(names))
        for at, name in enumerate(names):
            lookup = self._lookup(name)
            if lookup is None:
                continue
            beside = self._beside.get(name)
            if beside is None:
                beside = self._beside[name] = Beside(self._detector, lookup.num_kept)
            logarithms, numbers = lookup.around(step)
            found.score[at], found.direction[at], found.forecast[at], found.moved[at] = beside.judge(
                float(values[at]), logarithms, numbers
            )
        for text in self.blind:
            if text not in self._reported:
                self._reported.add(text)
                log.warning("rules: %s", text)
        return found

    def _lookup(self, name: str) -> Lookup | None:
        if name not in self._found:
            series = self._reference.series
            key = name if name in series else role if (role := _role(name)) in series else None
            self._found[name] = None if key is None else Lookup(series[key])
        return self._found[name]

    @property
    def blind(self) -> list[str]:
        """What reference runs cannot be asked about, in words: copies of the run, runs that do not follow it, scalars they
        lack."""
        found = []
        if self._found and not any(self._found.values()):
            lacking, known = ", ".join(sorted(self._found)[:3]), ", ".join(sorted(self._reference.series)[:6])
            found.append(f"the runs under reference log no {lacking}, but {known}; name runs that log it, or rename it")
        for name, beside in self._beside.items():
            num = len(beside.state["lag"])
            found += [_copy(name, at, num) for at in beside.copies.tolist()]
            if beside.is_apart:
                found.append(f"{_runs(num)} no {name} at any step of this run; name runs that count steps as it does")
            elif beside.is_strange and len(beside.copies) < num:
                found.append(
                    f"{_runs(num)} a {name} that this run does not follow: beside them it is more than half as noisy as "
                    "alone. They are on other data, or in another order; nothing is judged beside them while that lasts"
                )
        return [f'rule "{self._rule}": {text}' for text in found]

    def to_dict(self) -> dict[str, Any]:
        """Return everything that changes, for a snapshot."""
        return {name: beside.to_dict() for name, beside in self._beside.items()}

    def take_dict(self, data: dict[str, Any]) -> None:
        """Take back what `to_dict` gave."""
        for name, one in data.items():
            if (lookup := self._lookup(name)) is not None:
                self._beside[name] = Beside(self._detector, lookup.num_kept)
                self._beside[name].take_dict(one)


def _copy(name: str, reference_run: int, num: int) -> str:
    return (
        f"reference run {reference_run + 1} of {num} logs the very numbers of this run as {name}: "
        "it is the run itself or a copy of it, "
        "and is set aside while that lasts; name other runs on the same data under reference"
    )


def _runs(num: int) -> str:
    return "the run under reference has" if num == 1 else f"the {num} runs under reference have"


class ReferenceScalars:
    """What the reference runs say of one step's scalars, each [scalars]."""

    def __init__(self, num: int) -> None:
        self.score = np.zeros(num)
        """How far the run is from what the reference runs forecast; at least 1.0 is anomalous, 0.0 where nothing can be
        said."""
        self.direction = np.zeros(num, dtype=np.int8)
        """+1 above the forecast, -1 below."""
        self.forecast = np.full(num, np.nan)
        """In the unit of the values; NaN where no reference run has the step."""
        self.moved = np.full(num, np.nan)
        """How far the reference runs moved, in units of the rule's own score; NaN where no reference run that follows has
        the step."""


class Lookup:
    """Numbers of one scalar's reference runs by step."""

    def __init__(self, series: ReferenceSeries) -> None:
        self._steps, self._values = series.arrays()
        self.num_kept = self._values.shape[1]
        self._logarithms = logarithm(self._values)
        self._nothing = np.full(self.num_kept, np.nan)

    def around(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return [lags, reference runs] logarithms and numbers at a step and beside it; NaN where a reference run has
        none."""
        logarithms, numbers = [], []
        for lag in LAGS:
            place = int(np.searchsorted(self._steps, step + lag))
            is_there = place < len(self._steps) and int(self._steps[place]) == step + lag
            logarithms.append(self._logarithms[place] if is_there else self._nothing)
            numbers.append(self._values[place] if is_there else self._nothing)
        return np.stack(logarithms), np.stack(numbers).astype(np.float32)


def _role(name: str) -> str:
    """Return what plain logs call a scalar of this name: `train/loss` is `loss` there; its own name for any other."""
    words = set(_WORDS.split(name.lower()))
    if words & {"eval", "val", "valid", "validation", "test", "aux", "balance", "kl"}:
        return name
    if "loss" in words:
        return "loss"
    return "grad_norm" if words & _NORMS and words & {"grad", "gradient", "total", "gnorm", "gradnorm", "global"} else name
