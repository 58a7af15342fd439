"""A running robust baseline of many series: location and spread by clipped exponential means, and its level shifts.

The updates are those of an online Huber estimator: a point moves the location by at most CLIP spreads, so one large
healthy point cannot carry it away. The constants are chosen, from the synthetic healthy runs of tests/detect/conftest.py
(heavy tails, decays, warm-up, learning-rate schedules) and from tiny GPTs trained on a CPU.
"""

from __future__ import annotations

import msgspec
import numpy as np

from sentinel.detect.detector import State
from sentinel.errors import ConfigError

CLIP = 4.0
"""A learned residual counts for at most this many spreads once the warm-up is over."""
LOCATION_RATE = 0.1
"""Weight of the newest point in the location: a memory of about 10 points."""
SPREAD_RATE = 0.03
"""Weight of the newest residual in the spread: a memory of about 33 points."""
PEAK_DECAY = 0.995
"""Decay a point of the largest residual that passed: half after 139 points."""
PEAK_FACTOR = 1.5
"""A residual must exceed the largest recent healthy one by this factor."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Where each series lives and how far it strays; values come already mapped to a domain where steps are comparable."""

    k: float
    """Residuals up to this many mean absolute residuals are normal."""
    warmup: int
    """Points that are learned before any is judged."""
    settle_after: int
    """Consecutive flagged points at one new level that make it the new normal; 0: never."""

    def __post_init__(self) -> None:
        if not self.k > 0:
            raise ConfigError(f"k must be above 0, got {self.k}")
        if self.warmup < 2:
            raise ConfigError(f"warmup must be at least 2, got {self.warmup}")
        if self.settle_after < 0:
            raise ConfigError(f"settle_after must not be negative, got {self.settle_after}")

    def state(self, num_series: int) -> State:
        """Return 46 bytes a series."""
        return {
            "location": np.zeros(num_series),
            "spread": np.zeros(num_series),
            "peak": np.zeros(num_series),
            "count": np.zeros(num_series, dtype=np.int32),
            "run": np.zeros(num_series, dtype=np.int32),
            "run_location": np.zeros(num_series),
            "run_spread": np.zeros(num_series, dtype=np.float32),
            "settled": np.zeros(num_series, dtype=bool),
        }

    def bound(self, state: State, floor: float | np.ndarray) -> np.ndarray:
        """Return the residual that scores 1.0; infinite while a series warms up."""
        bound: np.ndarray = np.maximum(state["spread"] * self.k, state["peak"] * PEAK_FACTOR)
        np.maximum(bound, floor, out=bound)
        if state["count"].min(initial=self.warmup) < self.warmup:
            bound[state["count"] < self.warmup] = np.inf
        return bound

    def learn(
        self, z: np.ndarray, state: State, anomalous: np.ndarray, usable: np.ndarray, floor: float | np.ndarray
    ) -> None:
        """Take points in: `usable` ones move the baseline, but for `anomalous` ones, which only count towards a shift."""
        location, spread, count = state["location"], state["spread"], state["count"]
        settled = state["settled"]
        settled.fill(False)
        take = usable & ~anomalous
        residual = z - location
        if count.min(initial=self.warmup) < self.warmup:
            self._warm_up(z, residual, state, take)
            take &= count > self.warmup
        size = np.abs(residual)
        limit = spread * CLIP
        # A spread of zero (a constant series) must be able to grow; and a trend must not be clipped for ever.
        np.maximum(limit, np.multiply(floor, 0.25), out=limit)
        peak = state["peak"]
        if take.all():
            np.maximum(peak * PEAK_DECAY, size, out=peak)
            np.minimum(size, limit, out=size)
            location += LOCATION_RATE * np.copysign(size, residual)
            spread += SPREAD_RATE * (size - spread)
        else:
            np.maximum(peak * PEAK_DECAY, size, out=peak, where=take)
            np.minimum(size, limit, out=size)
            np.add(location, LOCATION_RATE * np.copysign(size, residual), out=location, where=take)
            np.add(spread, SPREAD_RATE * (size - spread), out=spread, where=take)
        run = state["run"]
        if run.any() or anomalous.any():
            self._follow_shift(z, state, anomalous, usable, floor)

    def _warm_up(self, z: np.ndarray, residual: np.ndarray, state: State, take: np.ndarray) -> None:
        """Count points, and let series that warm up follow at once: the first points come from a random start."""
        location, spread, count = state["location"], state["spread"], state["count"]
        warm = take & (count < self.warmup)
        first = warm & (count == 0)
        location[first] = z[first]
        later = warm & ~first
        size = np.abs(residual[later])
        location[later] += np.maximum(1.0 / (count[later] + 1.0), 0.25) * residual[later]
        spread[later] += np.maximum(1.0 / count[later], 0.1) * (size - spread[later])
        # Points are counted one past the warm-up, so that the last of them is not learned twice.
        np.add(count, 1, out=count, where=take & (count <= self.warmup))

    def _follow_shift(
        self, z: np.ndarray, state: State, anomalous: np.ndarray, usable: np.ndarray, floor: float | np.ndarray
    ) -> None:
        """Count flagged points at one new level; `settle_after` of them re-base the series, once."""
        run, level, wobble = state["run"], state["run_location"], state["run_spread"]
        run[usable & ~anomalous] = 0
        if not self.settle_after:
            return
        flagged = np.flatnonzero(anomalous & usable)
        if not flagged.size:
            return
        at = z[flagged]
        offset = at - level[flagged]
        # One level: within what was normal at the old one, or a tenth of the way from there. What still climbs outruns
        # its own mean and is no level.
        near = np.maximum(np.broadcast_to(floor, z.shape)[flagged], 6.0 * state["spread"][flagged])
        near = np.maximum(near, 0.1 * np.abs(level[flagged] - state["location"][flagged]))
        joins = (run[flagged] > 0) & (np.abs(offset) <= near)
        n = np.where(joins, run[flagged] + 1, 1)
        run[flagged] = n
        rate = np.maximum(1.0 / n, 0.1)
        level[flagged] = np.where(joins, level[flagged] + offset * rate, at)
        wobble[flagged] = np.where(joins, wobble[flagged] + (np.abs(offset) - wobble[flagged]) * rate, 0.0)
        done = flagged[n >= self.settle_after]
        if done.size:
            state["settled"][done] = True
            state["location"][done] = level[done]
            state["spread"][done] = np.maximum(state["spread"][done], wobble[done])
            state["peak"][done] = 0.0
            run[done] = 0
