"""AnomalyTurbulence and KurtosisSpike: a statistic that leaves the range it has kept."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec
import numpy as np

from sentinel.detect.baseline import Baseline
from sentinel.detect.detector import Explanation, Scores, State
from sentinel.errors import ConfigError

SIGNED_STATISTICS = frozenset({"mean", "min", "max", "skew", "zeros", "nans", "infs", "value"})
"""Statistics that may be negative or zero in good health: judged on a linear scale."""
TINY = 1e-38
"""Below this a positive statistic counts as exactly zero."""
LOG_TINY = math.log(TINY)
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
MSPROBE_DECAY = 0.99
"""Weight of the past in msProbe's history mean (msprobe monitor; checked against its own records in samples/msprobe)."""


def msprobe_scores(values: np.ndarray, history: np.ndarray, threshold: float) -> np.ndarray:
    """Return abs(x) / ((1 + threshold) * history) such that >= 1.0 is exactly msProbe's strict `>`; 0.0 for NaN."""
    size = np.abs(values)
    limit = history * (1.0 + threshold)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(np.minimum(np.divide(size, limit), 1e300), nan=0.0)
    return np.where(size > limit, np.maximum(ratio, 1.0), np.where(size <= limit, np.minimum(ratio, JUST_BELOW_ONE), 0.0))


class AnomalyTurbulence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statistic that jumps away from its own running baseline, upwards or downwards."""

    summary: ClassVar[str] = "a statistic that jumps away from its own running baseline, up or down"
    statistics: ClassVar[tuple[str, ...]] = ("norm",)
    raw_values: ClassVar[bool] = False

    threshold: float = 1.0
    """Relative change that is always normal: 1.0 lets a norm double or halve. With `compat: msprobe` the threshold of
    its formula."""
    k: float = 10.0
    """Mean absolute residuals that are still normal (10 are 8 sigma of a Gaussian); chosen, see baseline.py."""
    warmup: int = 25
    """Points learned before any is judged."""
    settle_after: int = 20
    """Consecutive flagged points at a new level that make it the new normal; 0: never."""
    sides: Literal["both", "up", "down"] = "both"
    """Which way a jump counts."""
    domain: Literal["auto", "log", "linear"] = "auto"
    """Scale on which changes are compared; auto: linear for statistics that may be negative, else log."""
    compat: Literal["", "msprobe"] = ""
    """`msprobe`: exactly abs(x) > (1 + threshold) * history mean, an exponential mean (0.99) of abs(x) that begins with
    the first value and learns flagged values too; unlike msProbe's, it does not learn NaN or infinity."""

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ConfigError(f"threshold must not be negative, got {self.threshold}")
        self._baseline()

    def _baseline(self) -> Baseline:
        return Baseline(k=self.k, warmup=self.warmup, settle_after=self.settle_after)

    def for_statistic(self, statistic: str) -> AnomalyTurbulence:
        """Return the detector with its domain decided for `statistic`."""
        if self.domain != "auto":
            return self
        return msgspec.structs.replace(self, domain="linear" if statistic in SIGNED_STATISTICS else "log")

    def state(self, num_series: int) -> State:
        """Return the state of new series: 16 bytes each in msProbe's mode, else about 57."""
        if self.compat:
            return {"history": np.full(num_series, np.nan)}
        state = self._baseline().state(num_series)
        if self.domain == "linear":
            state["size"] = np.zeros(num_series)
        else:
            state["zero_is_normal"] = np.zeros(num_series, dtype=bool)
        return state

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score one point a series; what is NaN or infinite scores 0.0 (that is for AnomalyNan to say)."""
        if self.compat:
            history = np.where(np.isnan(state["history"]), np.abs(values), state["history"])
            score = msprobe_scores(values, history, self.threshold)
            return Scores.of(score, history, direction=(score >= 1.0).astype(np.int8))
        z = self._map(values)
        residual = z - state["location"]
        bound = self._baseline().bound(state, self._floor(state))
        if self.sides == "up":
            size = residual
        elif self.sides == "down":
            size = -residual
        else:
            size = np.abs(residual)
        score = size / bound
        # One comparison drops NaN, negative sides and infinities alike; nothing to do for the usual healthy step.
        odd = ~((score >= 0.0) & (score < 1e300))
        if odd.any():
            score[odd] = 0.0
        if self.domain != "linear":
            zeros = values == 0.0
            if zeros.any():
                score[zeros & state["zero_is_normal"]] = 0.0
        location, count, linear = state["location"], state["count"], self.domain == "linear"

        def explain() -> Explanation:
            baseline = np.where(count > 0, location if linear else np.exp(location), np.nan)
            direction = np.sign(np.nan_to_num(residual)).astype(np.int8)
            return baseline, {"direction": direction}

        return Scores(score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point a series in; flagged ones count only towards a level shift, non-finite ones for nothing."""
        finite = np.isfinite(values)
        if self.compat:
            history = state["history"]
            size = np.abs(values)
            first = np.isnan(history) & finite
            later = finite & ~first
            history[later] = MSPROBE_DECAY * history[later] + (1.0 - MSPROBE_DECAY) * size[later]
            history[first] = size[first]
            return
        z = self._map(values)
        usable = finite
        if self.domain == "linear":
            size = state["size"]
            take = usable & ~anomalous
            warm = np.where(state["count"] < 10, 1.0 / (np.minimum(state["count"], 9) + 1.0), 0.1)
            np.add(size, warm * (np.abs(values) - size), out=size, where=take)
        else:
            zeros = (values == 0.0) & ~anomalous
            if zeros.any():
                # A zero has no scale: before the first other value it teaches nothing, and in the warm-up it says that
                # zeros belong to this series (an expert without tokens, an unused row).
                state["zero_is_normal"] |= zeros & (state["count"] > 0)
                usable = usable & ~zeros
            if state["run"].any():
                # A zero that came and went may come again; the first was told.
                state["zero_is_normal"] |= (state["run_location"] <= LOG_TINY) & (state["run"] > 0) & usable & ~anomalous
        self._baseline().learn(z, state, anomalous, usable, self._floor(state))

    def _map(self, values: np.ndarray) -> np.ndarray:
        if self.domain == "linear":
            return values
        mapped: np.ndarray = np.log(np.maximum(np.abs(values), TINY))
        return mapped

    def _floor(self, state: State) -> float | np.ndarray:
        if self.domain == "linear":
            floor: np.ndarray = np.maximum(self.threshold * state["size"], TINY)
            return floor
        return math.log1p(self.threshold) or 1e-9


class KurtosisSpike(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution that grows outliers at once: its kurtosis jumps above its own running baseline.

    Overflow, bad batches and flipped bits show in the fourth moment before they show in a norm (trainscope calls it the
    kurtosis lead). Slow growth, as outlier features emerge, is followed.
    """

    summary: ClassVar[str] = "a distribution that grows outliers: kurtosis jumps above its own running baseline"
    statistics: ClassVar[tuple[str, ...]] = ("kurtosis",)
    raw_values: ClassVar[bool] = False

    threshold: float = 2.0
    """Relative growth that is always normal: 2.0 lets the kurtosis triple."""
    k: float = 12.0
    """Mean absolute log residuals that are still normal; chosen, see baseline.py."""
    minimum: float = 20.0
    """A kurtosis below this is no spike, whatever it was before (a Gaussian has 3); chosen."""
    warmup: int = 25
    """Points learned before any is judged."""
    settle_after: int = 20
    """Consecutive flagged points at a new level that make it the new normal; 0: never."""

    def __post_init__(self) -> None:
        self._jumps()

    def _jumps(self) -> AnomalyTurbulence:
        return AnomalyTurbulence(
            threshold=self.threshold, k=self.k, warmup=self.warmup, settle_after=self.settle_after, sides="up", domain="log"
        )

    def state(self, num_series: int) -> State:
        """Return the state of new series, about 47 bytes each."""
        return self._jumps().state(num_series)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score one kurtosis a series; undefined ones (NaN) score 0.0."""
        scores = self._jumps().score(values, state)
        scores.score[values < self.minimum] = 0.0
        return scores

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point a series in, as AnomalyTurbulence does."""
        self._jumps().learn(values, state, anomalous)
