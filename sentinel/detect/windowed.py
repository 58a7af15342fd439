"""LossSpike and GradNormSpike: scalars against the rolling median of their last points, on an asinh scale.

Far from zero asinh is a logarithm, so one setting fits losses of any unit and decays of many decades; once a series comes to
zero or below it is linear about zero. The noise is what points stand apart from the median of the points about them, which a
trend or a step of the level hardly moves, and is taken from the middle half of the last such residuals; what is far above
the largest of them is anomalous whatever that half says. Tuned on 52 labelled series of public logs; benchmarks/detection.py
reports what constants find that were chosen without the repository scored (loro).
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect import rolling
from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Explanation, Scores, State
from sentinel.detect.doubt import is_doubtful
from sentinel.errors import ConfigError

SURE_SCORE = 4.0
SURE_RISE = math.log(1.3)
SURE_TWICE = 2.0
SURE_MULTIPLE = math.log(2.0)
"""One point alone is certain at this score (33 robust sigma by default) and this rise, or at half that score and twice the
median: healthy noise, heavy-tailed noise of a few percent included, is nowhere near. What is less far is certain when it
lasts: losses of small batches with wrong labels, or of a nearly perfect classifier, rise to twice and thirty times their
median at scores up to 1.9 (benchmarks/healthy_untuned.py)."""


class RollingMedian(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upward spikes of scalars: height above a rolling median, in robust deviations."""

    declares: ClassVar[Declaration] = Declaration(
        is_rolling=True, summary="a scalar that jumps above the rolling median of its last points", statistics=("value",)
    )

    k: float = 8.3
    """Robust deviations (the width of the residuals' middle half / 1.349) that are still normal."""
    floor: float = 0.09
    """Relative rise that is always normal."""
    window: int = 47
    """Points the median is taken over."""
    memory: int = 160
    """Residuals the deviation is taken over."""
    warmup: int = 16
    """Points before residuals are kept; twice as many before any point is judged."""
    settle_after: int = 20
    """Consecutive flagged points at a new level that make it the new normal; 0: never."""
    near_zero: float = 1e-6
    """Share of the first median below which changes count absolutely, no more as ratios."""

    def __post_init__(self) -> None:
        for name, low, high in (("window", 4, 4096), ("memory", 8, 4096), ("warmup", 4, self.window)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be in [{low}, {high}], got {getattr(self, name)}")
        for name in ("k", "floor", "near_zero"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.settle_after <= 4096:
            raise ConfigError(f"settle_after must be in [0, 4096], got {self.settle_after}")

    @property
    def numbers(self) -> rolling.RollingParameters:
        """The settings as the arithmetic takes them: the floor on the asinh scale."""
        return rolling.RollingParameters(
            self.k, math.log1p(self.floor), self.near_zero, self.window, self.memory, self.warmup, self.settle_after
        )

    def state(self, num_series: int) -> State:
        """Return 12 * window + 4 * memory + 8 * settle_after + 85 bytes a series."""
        return rolling.new_state(self.numbers, num_series)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score the height above the median; 0.0 below it, in the warm-up, and for what is not finite."""
        score = rolling.score(self.numbers, values, state)

        def explain() -> Explanation:
            unit, center = state["unit"], rolling.baseline(self.numbers, state)
            with np.errstate(over="ignore", invalid="ignore"):
                rise = np.where(score > 0.0, rolling.asinh(values, unit) - center, 0.0)
                baseline = np.where(state["seen"] > 0, unit * np.sinh(center), np.nan)
            doubtful = is_doubtful(self.numbers, values, rise, state)
            twice = (score >= SURE_TWICE) & (rise >= SURE_MULTIPLE) & ~doubtful
            far = ((score >= SURE_SCORE) & (rise >= SURE_RISE)) | twice
            return baseline, {"direction": (score > 0).astype(np.int8), "corroborated": far, "doubtful": doubtful}

        return Scores(score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point a series in; `settle_after` flagged ones in a row at one level become the new window."""
        rolling.learn(self.numbers, values, state, anomalous)

    def scan(self, values: np.ndarray, state: State) -> np.ndarray:
        """Score and take in many points [points, series] at once; return their scores. The same as one by one."""
        return rolling.scan(self.numbers, values, state)


class LossSpike(RollingMedian, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss above the rolling median of its last points."""

    declares: ClassVar[Declaration] = Declaration(
        statistics=("value",),
        is_rolling=True,
        trades="points",
        summary="a loss that jumps above the rolling median of its last points",
    )


class GradNormSpike(RollingMedian, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A global gradient norm above the rolling median of its last points."""

    declares: ClassVar[Declaration] = Declaration(
        statistics=("value",),
        is_rolling=True,
        summary="a gradient norm that jumps above the rolling median of its last points",
    )

    k: float = 8.0
    """Robust deviations (the width of the residuals' middle half / 1.349) that are still normal."""
    floor: float = 0.95
    """Relative rise that is always normal."""
    window: int = 55
    """Points the median is taken over: of a norm printed with two digits the quarters of the residuals jump by a digit;
    about the median of more points they stay."""
    memory: int = 128
    """Residuals the deviation is taken over."""
