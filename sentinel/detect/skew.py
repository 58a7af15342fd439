"""RankSkew: one rank whose numbers are away from those of the ranks that do the same work."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec
import numpy as np

from sentinel import native
from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.group import Points, StepPoints
from sentinel.detect.vectorised import JUST_BELOW_ONE
from sentinel.errors import ConfigError

UNIT = 0.02
"""Share of the peers' median below which differences count absolutely, no more as ratios: a loss near zero may double."""
FORGIVEN = math.log(2.0)
"""A rank's usual difference from its peers (its data, its buffers) is forgiven up to this, as log of the ratio: a factor of
2. Smaller: ranks with other data are reported; larger: a rank that was wrong from the start is not."""
SCATTER = 4.0
"""Median distances between peers, in this very step, that are still normal: where all scatter nobody stands out. Smaller:
ordinary scatter is reported; larger: one wrong rank among restless peers is not."""
LEAST_SCATTER = 4
"""Fewest peers from which their scatter is estimated."""
CLEAR = 2.0
"""Of two ranks, the one that left its own past this many times as far as the other is the one that moved. Smaller: the wrong
one of two may be named; larger: neither is."""
RATE = 0.03
PEAK_DECAY, PEAK_FACTOR = 0.995, 1.5


class RankSkew(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank whose loss, unreduced gradient norm, activation, tokens or memory is away from its peers, for steps on end.

    residual = asinh(x / u) - asinh(m / u) with m the peers' median and u = 2 % of it: a logarithm of the ratio that survives
    zero and below. Taken off is what the rank usually differs by (up to a factor of 2); what is left is held against k mean
    absolute residuals of the rank's own past, the scatter of all peers in this step, and `threshold`. Each rank has its own
    batch, so a single step says little: it must last, the same way. A rank without peers is not judged; of two, the one that
    left its own past is anomalous.

    Source: outlier among exchangeable workers by the median, as in straggler and silent-data-corruption screens: Dixit et
    al., "Silent Data Corruptions at Scale" (2021); the Llama 3 report (2024), section 3.3.4.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="one rank whose loss, gradient, activations, tokens or memory is away from its peers'",
        statistics=("rms",),
        over="peers",
    )

    threshold: float = 0.25
    """Relative difference from the peers' median that is always normal."""
    k: float = 10.0
    """Mean absolute residuals that are still normal; as AnomalyTurbulence's."""
    lasting: int = 3
    """Steps in a row that make it more than a batch."""
    warmup: int = 20
    """Steps of a rank seen before it is judged."""
    settle_after: int = 100
    """Steps in a row after which the difference is the rank's usual one; 0: never. More than a factor of 2 never is."""
    at_once: bool = True
    """Write down a single step that is far out too, as `info`."""

    def __post_init__(self) -> None:
        for name in ("threshold", "k"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("lasting", "warmup"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.settle_after < 0:
            raise ConfigError(f"settle_after must not be negative, got {self.settle_after}")

    def state(self, num_members: int) -> State:
        """Return 56 bytes a rank and quantity."""
        return {
            "usual": np.zeros(num_members),
            "spread": np.zeros(num_members),
            "peak": np.zeros(num_members),
            "farthest": np.zeros(num_members),
            "level": np.full(num_members, np.nan),
            "count": np.zeros(num_members, dtype=np.int64),
            "streak": np.zeros(num_members, dtype=np.int64),
        }

    def score(self, points: Points, group: np.ndarray, state: State) -> Scores:
        """Score the residual / what is normal, for those that last; below 1.0 for all others, 0.0 for what is not finite."""
        residual, middle, raw, is_sure = self._measured(points, group, state)
        is_warm = state["count"] >= self.warmup
        is_out = is_warm & (raw >= 1.0)
        is_early = ~is_out | (np.abs(self._streak(residual, is_out, state)) < self.lasting)
        score = np.where(is_early, np.minimum(raw, JUST_BELOW_ONE), raw)
        is_news = is_out & (self._own(residual, state) > state["farthest"])
        alone = np.where(is_news & self.at_once, raw, 0.0)
        direction = np.sign(np.nan_to_num(residual)).astype(np.int8)
        return Scores.of(score, middle, direction=direction, is_sure=is_sure, is_out=is_out, alone=alone)

    def learn(self, points: Points, group: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Learn each rank's usual difference and its spread, but from no anomalous point; count how many points in a row
        stand out."""
        residual, _, raw, _ = _made(points) or self._measured(points, group, state)
        known = np.isfinite(residual)
        is_out = known & (raw >= 1.0) & (state["count"] >= self.warmup)
        streak = np.where(known, self._streak(residual, is_out, state), state["streak"])
        settled = is_out & (np.abs(streak) >= self.settle_after) if self.settle_after else np.zeros(len(known), dtype=bool)
        take = known & ~is_out & ~anomalous
        farthest = np.maximum(state["farthest"] * PEAK_DECAY, np.where(is_out, self._own(residual, state), 0.0))
        np.copyto(state["farthest"], farthest, where=known)
        rate = np.maximum(1.0 / (1.0 + state["count"]), RATE)
        change = residual - state["usual"]
        size = np.abs(change)
        is_warm = state["count"] >= self.warmup
        peak = np.maximum(state["peak"] * PEAK_DECAY, np.where(is_warm, size, 0.0))
        np.copyto(state["peak"], peak, where=take)
        # The first residual is the location, so its own distance from it is none.
        np.copyto(state["spread"], state["spread"] + rate * (size - state["spread"]), where=take & (state["count"] > 0))
        np.copyto(state["usual"], state["usual"] + rate * change, where=take)
        np.copyto(state["usual"], residual, where=settled)
        state["streak"] = np.where(settled, 0, streak)
        with np.errstate(divide="ignore", invalid="ignore"):
            size = np.log(np.maximum(np.abs(points["value"]), 1e-300))
        level = state["level"]
        np.copyto(level, np.where(np.isnan(level), size, level + rate * (size - level)), where=take | settled)
        state["count"][take] += 1

    @staticmethod
    def _streak(residual: np.ndarray, is_out: np.ndarray, state: State) -> np.ndarray:
        """Return [members] steps in a row, this one with them, above the peers, or below them as a negative number."""
        sign = np.where(np.nan_to_num(residual) < 0.0, -1, 1)
        before = np.where(np.sign(state["streak"]) == sign, state["streak"], 0)
        found: np.ndarray = np.where(is_out, before + sign, 0)
        return found

    def _own(self, residual: np.ndarray, state: State) -> np.ndarray:
        """Return how far each rank is from what it usually differs by; 0.0 where there are no peers."""
        own: np.ndarray = np.abs(np.where(np.isnan(residual), 0.0, residual - np.clip(state["usual"], -FORGIVEN, FORGIVEN)))
        return own

    def _measured(
        self, points: Points, group: np.ndarray, state: State
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return [members] each: residual (NaN: no peers), the median of the peers, score, whether it is sure."""
        value = np.where(np.isfinite(points["value"]), points["value"], np.nan)
        middle, num_peers = _medians(value, group)
        is_pair = num_peers == 2
        if is_pair.any():
            # The median of two is between them: the other is what there is to compare with.
            middle = np.where(is_pair, 2.0 * middle - value, middle)
        unit = np.maximum(UNIT * np.abs(middle), 1e-300)
        with np.errstate(over="ignore", invalid="ignore"):
            residual = np.arcsinh(np.clip(value / unit, -1e300, 1e300)) - np.arcsinh(middle / unit)
        residual = np.where((num_peers > 1) & np.isfinite(value), residual, np.nan)
        own = self._own(residual, state)
        normal = np.maximum(self.k * state["spread"], PEAK_FACTOR * state["peak"])
        normal = np.maximum(normal, math.log1p(self.threshold))
        scatter, _ = _medians(np.abs(residual), group)
        normal = np.where(num_peers >= LEAST_SCATTER, np.fmax(normal, SCATTER * scatter), normal)
        raw = np.where(np.isnan(residual), 0.0, own / normal)
        is_sure = np.ones(len(value), dtype=bool)
        if is_pair.any():
            moved = np.abs(np.log(np.maximum(np.abs(value), 1e-300)) - state["level"])
            other = 2.0 * _medians(moved, group)[0] - moved
            is_other = is_pair & (other > CLEAR * moved)
            raw = np.where(is_other, 0.0, raw)
            is_sure = ~is_pair | (moved > CLEAR * other)
        if isinstance(points, StepPoints):
            points.made = residual, middle, raw, is_sure
        return residual, middle, raw, is_sure


class GainSkew(RankSkew, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank whose modules make another size of the same input than its peers' do: arithmetic that is wrong on one device.

    gain = rms of a module's output / rms of its input, on each rank's own rows; then as RankSkew. The batch is in both, and
    cancels: beside peers the gain of a linear layer keeps to 0.5 % where its output keeps to 2 %. A rank with other data
    keeps its gains; other weights, or products that are wrong, do not.

    Source: silent data corruption by one device, Dixit et al. (2021) and Hochschild et al., "Cores that don't count" (2021);
    the ratio of output to input as algorithm-based fault tolerance checks a product by sums: Huang & Abraham (1984).
    """

    declares: ClassVar[Declaration] = Declaration(
        statistics=("rms",),
        over="peers",
        summary="one rank whose modules make another size of their input than its peers' do",
        per_input=True,
    )
    """The value is the output's statistic over that of the input."""

    threshold: float = 0.02
    """Relative difference from the peers' median that is always normal: four times the 0.5 % by which gains of healthy
    linear layers differ."""


def _made(points: Points) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    return points.made if isinstance(points, StepPoints) else None


def _medians(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each member the median of its group (NaN left out; NaN: none is known), and how many are known."""
    if native.group_medians is not None:
        return native.group_medians(values, group)
    return medians_in_numpy(values, group)


def medians_in_numpy(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As native.group_medians."""
    _, number = np.unique(group, return_inverse=True)
    order = np.lexsort((values, number))  # NaN sorts last
    ordered = values[order]
    size = np.bincount(number)
    known = np.bincount(number, weights=~np.isnan(values)).astype(np.int64)
    start, last = np.cumsum(size) - size, np.maximum(known - 1, 0)
    low, high = ordered[start + last // 2], ordered[start + np.minimum(known // 2, last)]
    median = np.where(known > 0, 0.5 * (low + high), np.nan)
    return median[number], known[number]
