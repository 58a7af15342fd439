"""LossSpike and GradNormSpike: scalars against the rolling median of their last points, on an asinh scale.

Far from zero asinh is a logarithm, so one setting fits losses of any unit, decays included; near zero and below it is
linear, so losses that are negative or reach zero do no harm. Tuned on ../shared/trainlogs (benchmarks/detection.py).
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.detector import Explanation, Scores, State
from sentinel.errors import ConfigError

MAD_TO_SIGMA = 1.4826
"""A Gaussian's standard deviation over its median absolute deviation."""
DECILE_TO_SIGMA = 0.6080
"""And over the ninth decile of its absolute deviation, 1 / 1.6449."""
STAGGER, STAGGER_AFTER = 4, 64
"""From this many residuals on, the spread is formed anew every fourth point."""
SURE_SCORE = 2.5
SURE_RISE = math.log(1.3)
SURE_MULTIPLE = math.log(2.0)
"""One point alone is certain at this score (20 robust sigma by default) and this rise, or where it is anomalous at all
(8 robust sigma) and twice the median: healthy noise, heavy-tailed noise of a few percent included, is nowhere near. What
is less far is certain when it lasts."""


def _spread(residuals: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return a robust standard deviation of each row's `count` residuals about zero, the rest being NaN; 0.0 for none.

    The median of |residual| says it, unless the ninth decile says four times as much: values printed with few digits
    have a median of 0.
    """
    ordered = np.sort(np.abs(residuals), axis=1)  # NaN sorts last
    rows = np.arange(len(ordered))
    middle = ordered[rows, np.maximum(count - 1, 0) // 2]
    high = ordered[rows, np.minimum((count * 9) // 10, ordered.shape[1] - 1)]
    by_median, by_decile = MAD_TO_SIGMA * middle, DECILE_TO_SIGMA * high
    spread: np.ndarray = np.where(by_decile > 4.0 * by_median, by_decile, by_median)
    return np.where(count > 0, spread, 0.0)


def _median(window: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the median of each row's `count` numbers, the rest being NaN; NaN where there are none."""
    ordered = np.sort(window, axis=1)
    rows = np.arange(len(window))
    low = ordered[rows, np.maximum(count - 1, 0) // 2]
    high = ordered[rows, np.minimum(count // 2, window.shape[1] - 1)]
    median: np.ndarray = np.where(count > 0, 0.5 * (low + high), np.nan)
    return median


def _asinh(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Return asinh(values / unit), finite for every finite value."""
    with np.errstate(over="ignore"):
        mapped: np.ndarray = np.arcsinh(np.clip(values / unit, -1e300, 1e300))
    return mapped


def _noise(values: np.ndarray) -> float:
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


class RollingMedian(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upward spikes of scalars: height above a rolling median, in robust deviations."""

    summary: ClassVar[str] = "a scalar that jumps above the rolling median of its last points"
    statistics: ClassVar[tuple[str, ...]] = ("value",)
    raw_values: ClassVar[bool] = False

    k: float = 8.0
    """Robust deviations (1.4826 * median absolute residual) that are still normal."""
    floor: float = 0.08
    """Relative rise that is always normal."""
    window: int = 32
    """Points the median is taken over."""
    memory: int = 256
    """Residuals the deviation is taken over."""
    warmup: int = 16
    """Points before residuals are kept; twice as many before any point is judged."""
    settle_after: int = 20
    """Consecutive flagged points at a new level that make it the new normal; 0: never."""
    near_zero: float = 0.02
    """Share of the first median below which changes count absolutely, no more as ratios: a loss near zero may double."""

    def __post_init__(self) -> None:
        for name, low, high in (("window", 4, 4096), ("memory", 8, 65536), ("warmup", 4, self.window)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be in [{low}, {high}], got {getattr(self, name)}")
        for name in ("k", "floor", "near_zero"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.settle_after <= 4096:
            raise ConfigError(f"settle_after must be in [0, 4096], got {self.settle_after}")

    def state(self, num_series: int) -> State:
        """Return 8 * (window + memory + settle_after) bytes and a little more a series."""
        return {
            "points": np.full((num_series, self.window), np.nan),
            "residuals": np.full((num_series, self.memory), np.nan),
            "held": np.full((num_series, max(self.settle_after, 1)), np.nan),
            "unit": np.full(num_series, 1e-300),
            "center": np.full(num_series, np.nan),
            "spread": np.zeros(num_series),
            "count": np.zeros(num_series, dtype=np.int64),
            "run": np.zeros(num_series, dtype=np.int64),
            "settled": np.zeros(num_series, dtype=bool),
        }

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score the height above the median; 0.0 below it, in the warm-up, and for what is not finite."""
        unit, center = state["unit"], state["center"].copy()
        residual = _asinh(values, unit) - _asinh(center, unit)
        bound = np.maximum(self.k * state["spread"], math.log1p(self.floor))
        ready = (state["count"] >= 2 * self.warmup) & np.isfinite(values)
        with np.errstate(invalid="ignore"):
            score = np.where(ready, np.maximum(residual / bound, 0.0), 0.0)

        def explain() -> Explanation:
            far = ((score >= SURE_SCORE) & (residual >= SURE_RISE)) | ((score >= 1.0) & (residual >= SURE_MULTIPLE))
            return center, {"direction": (score > 0).astype(np.int8), "corroborated": far}

        return Scores(score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point a series in; `settle_after` flagged ones in a row at one level become the new window."""
        state["settled"].fill(False)
        finite = np.isfinite(values)
        self._take(values, state, np.flatnonzero(finite & ~anomalous))
        held = finite & anomalous
        if held.any():
            self._hold(values, state, np.flatnonzero(held))

    def _take(self, values: np.ndarray, state: State, rows: np.ndarray) -> None:
        if not rows.size:
            return
        count, new = state["count"][rows], values[rows]
        at = rows[count >= self.warmup]
        if at.size:
            unit, seen = state["unit"][at], state["count"][at] - self.warmup
            residual = _asinh(values[at], unit) - _asinh(state["center"][at], unit)
            state["residuals"][at, seen % self.memory] = residual
            # The spread of many residuals hardly moves in a step: sorting them is the dearest thing here.
            due = (seen < STAGGER_AFTER) | (seen % STAGGER == 0)
            if due.any():
                at, seen = at[due], seen[due]
                state["spread"][at] = _spread(state["residuals"][at], np.minimum(seen + 1, self.memory))
        state["points"][rows, count % self.window] = new
        count += 1
        state["count"][rows] = count
        state["run"][rows] = 0
        state["center"][rows] = _median(state["points"][rows], np.minimum(count, self.window))
        needy = (count == self.warmup) | (new <= 0.0)
        if needy.any():
            self._choose_unit(state, rows[needy])

    def _choose_unit(self, state: State, rows: np.ndarray) -> None:
        """Decide below what the scale is linear: at the end of the warm-up, and when a window comes to zero and below."""
        count = np.minimum(state["count"][rows], self.window)
        points = state["points"][rows]
        # To zero: within three standard deviations, told from the median step, which a decay does not move much.
        noise = MAD_TO_SIGMA / math.sqrt(2.0) * _median(np.abs(np.diff(points, axis=1)), np.maximum(count - 1, 0))
        size = _median(np.abs(points), count)
        is_close = (size < 3.0 * noise) & (count >= self.warmup) & (points <= 0.0).any(axis=1)
        chosen = is_close | (count == self.warmup)
        if chosen.any():
            unit = np.where(is_close, 4.0 * noise, self.near_zero * size)[chosen]
            state["unit"][rows[chosen]] = np.maximum(np.maximum(state["unit"][rows[chosen]], unit), 1e-300)

    def _hold(self, values: np.ndarray, state: State, rows: np.ndarray) -> None:
        """Keep flagged points apart, newest `settle_after` of them, until they are a level of their own."""
        if not rows.size or not self.settle_after:
            return
        state["held"][rows, state["run"][rows] % self.settle_after] = values[rows]
        state["run"][rows] += 1
        for row in rows[state["run"][rows] >= self.settle_after]:
            held = np.roll(state["held"][row], -int(state["run"][row] % self.settle_after))
            unit = state["unit"][row]
            z = _asinh(held, unit)
            half = len(z) // 2
            # Still climbing is no level: the two halves of what is held must agree but for the noise within them.
            noise = max(_noise(z[:half]), _noise(z[half:])) if half else 0.0
            if half and abs(np.median(z[half:]) - np.median(z[:half])) > max(math.log1p(self.floor), 2.0 * noise):
                continue
            state["points"][row] = np.nan
            take = held[-self.window :]
            state["points"][row, : len(take)] = take
            # The spread stays what it was; only as many points are counted as are there.
            state["count"][row] = max(len(take), 2 * self.warmup) if len(take) >= self.warmup else len(take)
            state["center"][row] = np.median(take)
            state["run"][row] = 0
            state["settled"][row] = True


class LossSpike(RollingMedian, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss above the rolling median of its last points."""

    summary: ClassVar[str] = "a loss that jumps above the rolling median of its last points"


class GradNormSpike(RollingMedian, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A global gradient norm above the rolling median of its last points."""

    summary: ClassVar[str] = "a gradient norm that jumps above the rolling median of its last points"

    k: float = 6.5
    """Robust deviations (1.4826 * median absolute residual) that are still normal."""
    floor: float = 0.6
    """Relative rise that is always normal."""
    near_zero: float = 0.001
    """Share of the first median below which changes count absolutely, no more as ratios."""
