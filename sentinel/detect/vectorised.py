"""Vectorised algorithms, one of which most tensor detectors use: a baseline, a limit or a stillness.

Each is its parameters and one algorithm over arrays of series. A detector returns the one that it uses for a statistic
and delegates to it. The engine has the C extension run those of a whole step in one call; the numpy here is the reference
that it must equal, and the fallback.

The updates of `VectorisedBaseline` are those of an online Huber estimator (Huber 1964; the recursion of Robbins and
Monro): a point moves the location by at most CLIP spreads, so one large healthy point cannot carry it away. The constants
are chosen, from the synthetic healthy runs of tests/detect/conftest.py (heavy tails, decays, warm-up, learning-rate
schedules) and from tiny GPTs trained on a CPU.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from sentinel.detect.detector import Explanation, Scores, State
from sentinel.errors import ConfigError

CLIP = 4.0
"""A learned residual counts for at most this many spreads once the warm-up is over."""
SPREAD_SHARE = 0.3
"""Weight of the newest residual in the spread, as a share of its weight in the location: spreads need longer memories."""
PEAK_DECAY = 0.995
"""Decay a point of the largest residual that passed: half after 139 points."""
PEAK_FACTOR = 1.5
"""A residual must exceed the largest recent healthy one by this factor."""
TINY = 1e-38
"""Below this a positive statistic counts as exactly zero."""
HUGE = 1e38
"""Beyond this a linear value counts as this much: what is larger is no element of a tensor that trains."""
LOG_TINY = float(np.float32(math.log(TINY)))
MAX_COUNT = 32_000
"""Most points that a form counts: counts are 16 bits wide."""
LEAST_COMMON = 4
"""Series from which the movement that all share is taken; of fewer, one series alone would be most of their median."""
COMMON_SAMPLE = 128
"""Of twice as many series and more, the common movement is taken from every n-th: its noise is a ninth of a series' own."""
PATIENCE = 4
"""A series must repeat for this many times as long as its longest repetition that ended before. Smaller: a tensor that often
pauses is reported; larger: a dead one is reported later."""
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
SIGNED_STATISTICS = frozenset({"mean", "min", "max", "skew", "zeros", "nans", "infs", "value"})
"""Statistics that may be negative or zero in good health: judged on a linear scale."""


def domain_of(statistic: str) -> Literal["log", "linear"]:
    """Return the scale on which changes of a statistic are compared: linear for what may be negative."""
    return "linear" if statistic in SIGNED_STATISTICS else "log"


class VectorisedBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """The usual value of each series and the spread about it: a point too far from it is anomalous.

    In the log domain a value stands for log|x|; an exact zero has no logarithm, is not learned, and is normal in a series
    that had zeros in its warm-up, or whose zeros lasted until they settled: the level stays what it was before them.
    """

    domain: Literal["log", "linear"] = "log"
    sides: Literal["both", "up", "down"] = "both"
    """Which way a jump counts."""
    k: float = 10.0
    """Residuals up to this many mean absolute residuals are normal."""
    threshold: float = 1.0
    """Relative change that is always normal: 1.0 lets the value double or halve."""
    minimum: float = -math.inf
    """A value below this is never anomalous."""
    memory: float = 10.0
    """Points that the location remembers: the newest weighs 1 / memory."""
    warmup: int = 25
    """Points that are learned before any is judged."""
    settle_after: int = 20
    """Consecutive flagged points at one new level that make it the new normal; 0: never."""
    peaks: bool = True
    """A residual must also exceed the largest recent healthy one by PEAK_FACTOR. False for slow references (a long
    `memory`): residuals that grow slowly are what those are there to see, and never are 1.5 times their own past."""
    common: bool = False
    """Judge how far a series strays beyond what all series of the step stray: the median residual of those past their
    warm-up is taken off. What moves all alike (a schedule, another batch size, convergence) is nobody's own."""

    def __post_init__(self) -> None:
        if not self.k > 0:
            raise ConfigError(f"k must be above 0, got {self.k}")
        if not self.threshold >= 0:
            raise ConfigError(f"threshold must not be negative, got {self.threshold}")
        if not self.memory >= 1:
            raise ConfigError(f"memory must be at least 1, got {self.memory}")
        if self.warmup < 2:
            raise ConfigError(f"warmup must be at least 2, got {self.warmup}")
        if self.settle_after < 0:
            raise ConfigError(f"settle_after must not be negative, got {self.settle_after}")
        for name in ("warmup", "settle_after"):
            if getattr(self, name) > MAX_COUNT:
                raise ConfigError(f"{name} must be at most {MAX_COUNT}, got {getattr(self, name)}")

    def state(self, num_series: int) -> State:
        """Return the state of new series: 26 bytes each, 29 in the linear domain.

        Arithmetic is in float64, what is kept is float32: a location of a few units in the log has 6 digits behind the
        point, and the least `threshold` is some percent. Points are rounded to float32 before anything is
        asked of them, so that a constant series has a residual of exactly zero.
        """
        state: State = {
            "location": np.zeros(num_series, dtype=np.float32),
            "spread": np.zeros(num_series, dtype=np.float32),
            "peak": np.zeros(num_series, dtype=np.float32),
            "count": np.zeros(num_series, dtype=np.int16),
            "run": np.zeros(num_series, dtype=np.int16),
            "run_location": np.zeros(num_series, dtype=np.float32),
            "run_spread": np.zeros(num_series, dtype=np.float32),
            "settled": np.zeros(num_series, dtype=bool),
        }
        if self.domain == "linear":
            state["size"] = np.zeros(num_series, dtype=np.float32)
        else:
            state["zero_is_normal"] = np.zeros(num_series, dtype=bool)
        return state

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score one point a series; what is NaN or infinite scores 0.0 (that is for AnomalyNan to say)."""
        z = self._map(values)
        location, count, linear = _wide(state["location"]), state["count"], self.domain == "linear"
        residual = z - location
        if self.common:
            residual -= self._common(residual, values, state)
        bound = self._bound(state, self._floor(state))
        if self.sides == "up":
            size = residual
        elif self.sides == "down":
            size = -residual
        else:
            size = np.abs(residual)
        score = size / bound
        # One comparison drops NaN, negative sides and infinities alike; nothing to do for the usual healthy step.
        odd = ~((score >= 0.0) & (score < 1e300) & np.isfinite(values))
        if odd.any():
            score[odd] = 0.0
        if self.minimum > -math.inf:
            score[values < self.minimum] = 0.0
        if not linear:
            zeros = values == 0.0
            if zeros.any():
                score[zeros & state["zero_is_normal"]] = 0.0

        def explain() -> Explanation:
            baseline = np.where(count > 0, location if linear else np.exp(location), np.nan)
            direction = np.sign(np.nan_to_num(residual)).astype(np.int8)
            return baseline, {"direction": direction}

        return Scores(score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point a series in; flagged ones count only towards a level shift, non-finite ones for nothing."""
        z = self._map(values)
        usable = np.isfinite(values)
        if self.domain == "linear":
            size, count = _wide(state["size"]), state["count"].astype(np.int64)
            warm = np.where(count < 10, 1.0 / (np.minimum(count, 9) + 1.0), 0.1)
            _put(state["size"], size + warm * (np.abs(z) - size), usable & ~anomalous)
        else:
            zeros = (values == 0.0) & ~anomalous
            if zeros.any():
                # A zero has no scale: before the first other value it teaches nothing, and in the warm-up it says that
                # zeros belong to this series (an expert without tokens, an unused row).
                state["zero_is_normal"] |= zeros & (state["count"] > 0)
                usable = usable & ~zeros
            if state["run"].any():
                # A zero that came and went may come again; the first was reported.
                state["zero_is_normal"] |= (state["run_location"] <= LOG_TINY) & (state["run"] > 0) & usable & ~anomalous
        common = self._common(z - _wide(state["location"]), values, state) if self.common else 0.0
        self._learn(z, state, anomalous, usable, self._floor(state), common)

    @property
    def floor(self) -> float:
        """Least bound: in the log domain a residual, in the linear one a share of the usual size."""
        return self.threshold if self.domain == "linear" else math.log1p(self.threshold) or 1e-9

    def _map(self, values: np.ndarray) -> np.ndarray:
        if self.domain == "linear":
            mapped = np.clip(values, -HUGE, HUGE)
        else:
            mapped = np.log(np.maximum(np.abs(values), TINY))
        return _wide(mapped.astype(np.float32))

    def _floor(self, state: State) -> float | np.ndarray:
        if self.domain == "linear":
            floor: np.ndarray = np.maximum(self.floor * _wide(state["size"]), TINY)
            return floor
        return self.floor

    def _common(self, residual: np.ndarray, values: np.ndarray, state: State) -> float:
        """Return the median residual of the series that are past their warm-up; 0.0 of fewer than LEAST_COMMON."""
        every = slice(None, None, max(len(values) // COMMON_SAMPLE, 1))
        residual, values = residual[every], values[every]
        known = (state["count"][every] >= self.warmup) & np.isfinite(values)
        if self.domain == "log":
            known &= values != 0.0
        return float(np.median(residual[known])) if np.count_nonzero(known) >= LEAST_COMMON else 0.0

    def _bound(self, state: State, floor: float | np.ndarray) -> np.ndarray:
        """Return the residual that scores 1.0; infinite while a series warms up."""
        bound: np.ndarray = _wide(state["spread"]) * self.k
        if self.peaks:
            np.maximum(bound, _wide(state["peak"]) * PEAK_FACTOR, out=bound)
        np.maximum(bound, floor, out=bound)
        if state["count"].min(initial=self.warmup) < self.warmup:
            bound[state["count"] < self.warmup] = np.inf
        return bound

    def _learn(
        self,
        z: np.ndarray,
        state: State,
        anomalous: np.ndarray,
        usable: np.ndarray,
        floor: float | np.ndarray,
        common: float,
    ) -> None:
        """Take points in: `usable` ones move the baseline, but for `anomalous` ones, which only count towards a shift."""
        location, spread = _wide(state["location"]), _wide(state["spread"])
        state["settled"].fill(False)
        take = usable & ~anomalous
        residual = z - location
        warming = state["count"] < self.warmup
        if warming.any():
            self._warm_up(z, residual, state, take & warming)
            take &= ~warming
        # What all do is followed as it comes; only what is a series' own is clipped, and is its spread.
        residual = residual - common
        size = np.abs(residual)
        # A spread of zero (a constant series) must be able to grow; and a trend must not be clipped for ever.
        limit = np.maximum(spread * CLIP, np.multiply(floor, 0.25))
        _put(state["peak"], np.maximum(_wide(state["peak"]) * PEAK_DECAY, size), take)
        size = np.minimum(size, limit)
        _put(state["location"], location + (1.0 / self.memory) * (np.copysign(size, residual) + common), take)
        _put(state["spread"], spread + (SPREAD_SHARE / self.memory) * (size - spread), take)
        if state["run"].any() or anomalous.any():
            self._follow_shift(z, state, anomalous, usable, floor)

    def _warm_up(self, z: np.ndarray, residual: np.ndarray, state: State, warm: np.ndarray) -> None:
        """Count points, and let series that warm up follow at once: the first points come from a random start."""
        location, spread, count = state["location"], state["spread"], state["count"]
        first = warm & (count == 0)
        location[first] = z[first]
        later = warm & ~first
        seen, size, old = count[later].astype(np.float64), np.abs(residual[later]), _wide(spread[later])
        location[later] = _wide(location[later]) + np.maximum(1.0 / (seen + 1.0), 0.25) * residual[later]
        spread[later] = old + np.maximum(1.0 / seen, 0.1) * (size - old)
        count[warm] += 1

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
        at, was, swing = z[flagged], _wide(level[flagged]), _wide(wobble[flagged])
        offset = at - was
        # One level: within what was normal at the old one, or a tenth of the way from there. What still climbs outruns
        # its own mean and is no level.
        near = np.maximum(np.broadcast_to(floor, z.shape)[flagged], 6.0 * _wide(state["spread"][flagged]))
        near = np.maximum(near, 0.1 * np.abs(was - _wide(state["location"][flagged])))
        joins = (run[flagged] > 0) & (np.abs(offset) <= near)
        n = np.where(joins, run[flagged].astype(np.int64) + 1, 1)
        run[flagged] = n
        rate = np.maximum(1.0 / n, 0.1)
        level[flagged] = np.where(joins, was + offset * rate, at)
        wobble[flagged] = np.where(joins, swing + (np.abs(offset) - swing) * rate, 0.0)
        done = flagged[n >= self.settle_after]
        if done.size:
            state["settled"][done] = True
            run[done] = 0
            if self.domain == "log":
                # Zero is no level of its scale: what comes back is measured by what it was before.
                is_zero = level[done] <= LOG_TINY
                state["zero_is_normal"][done[is_zero]] = True
                done = done[~is_zero]
            state["location"][done] = level[done]
            state["spread"][done] = np.maximum(state["spread"][done], wobble[done])
            state["peak"][done] = 0.0


def _wide(array: np.ndarray) -> np.ndarray:
    wide: np.ndarray = array.astype(np.float64)
    return wide


def _put(array: np.ndarray, values: np.ndarray, where: np.ndarray) -> None:
    np.copyto(array, values, casting="same_kind", where=where)


class VectorisedLimit(msgspec.Struct, frozen=True, kw_only=True):
    """An absolute state: anomalous is what lies past a limit, for `lasting` points in a row. It has no baseline."""

    above: float = math.inf
    """A value above this is out of bounds."""
    below: float = -math.inf
    """A value below this is out of bounds."""
    lasting: int = 1
    """Points in a row out of bounds, the newest included, that are anomalous."""
    after: int = 0
    """Points within bounds that a series must have had before: what was never well (zero-initialised) did not fall."""

    def __post_init__(self) -> None:
        if not self.above >= self.below:
            raise ConfigError(f"above must not be less than below, got {self.above} and {self.below}")
        if self.lasting < 1:
            raise ConfigError(f"lasting must be at least 1, got {self.lasting}")
        if self.after < 0:
            raise ConfigError(f"after must not be negative, got {self.after}")
        for name in ("lasting", "after"):
            if getattr(self, name) > MAX_COUNT:
                raise ConfigError(f"{name} must be at most {MAX_COUNT}, got {getattr(self, name)}")

    def state(self, num_series: int) -> State:
        """Return the state of new series, 4 bytes each."""
        return {"run": np.zeros(num_series, dtype=np.int16), "inside": np.zeros(num_series, dtype=np.int16)}

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score points out in a row / lasting, capped at 1.0; 0.0 within bounds and for what is not finite."""
        up, down = values > self.above, values < self.below
        out = (up | down) & np.isfinite(values) & (state["inside"] >= self.after)
        score = np.where(out, np.minimum((state["run"] + 1.0) / self.lasting, 1.0), 0.0)

        def explain() -> Explanation:
            limit = np.where(up, self.above, np.where(down, self.below, np.nan))
            return limit, {"direction": up.astype(np.int8) - down.astype(np.int8)}

        return Scores(score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Count points out of bounds in a row, and points within, up to `after`; what is not finite counts for neither."""
        out = (values > self.above) | (values < self.below)
        finite = np.isfinite(values)
        run, inside = state["run"], state["inside"]
        run[finite & out] = np.minimum(run[finite & out] + 1, self.lasting)
        run[finite & ~out] = 0
        inside[finite & ~out & (inside < self.after)] += 1


class VectorisedStillness(msgspec.Struct, frozen=True, kw_only=True):
    """A series that changed and then stands still: exactly zero, or exactly its last value, point after point."""

    zero_steps: int = 3
    """Points in a row that are exactly zero."""
    unchanged_steps: int = 10
    """Points in a row that repeat exactly while other series move (when nothing moves, no optimizer stepped)."""
    after: int = 20
    """Points that changed, seen before any stillness is judged."""

    def __post_init__(self) -> None:
        for name in ("zero_steps", "unchanged_steps", "after"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise ConfigError(f"{name} must be in [1, {MAX_COUNT}], got {getattr(self, name)}")

    def state(self, num_series: int) -> State:
        """Return the state of new series, 14 bytes each: what repeats exactly is compared in full."""
        return {
            "last": np.full(num_series, np.nan),
            "streak": np.zeros(num_series, dtype=np.int16),
            "longest": np.zeros(num_series, dtype=np.int16),
            "age": np.zeros(num_series, dtype=np.int16),
        }

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score still points in a row / those needed; 0.0 for what moves, and for what is not finite."""
        zero, same = values == 0.0, values == state["last"]
        still = zero | same
        score = np.zeros(len(values))
        if still.any():
            if not _others_move(values, state, still):
                still = zero
            at = np.flatnonzero(still & (state["age"] >= self.after))
            least = np.where(zero[at], self.zero_steps, self.unchanged_steps)
            needed = np.maximum(least, PATIENCE * state["longest"][at].astype(np.int64))
            score[at] = (state["streak"][at] + 1.0) / needed
        last = state["last"]

        def explain() -> Explanation:
            return last.copy(), {"direction": -zero.astype(np.int8)}

        return Scores(score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Count points that are still, and points that are not; what is not finite counts for neither."""
        zero, same = values == 0.0, values == state["last"]
        still = zero | same
        moved = np.isfinite(values) & ~still
        if still.any():
            if not _others_move(values, state, still):
                still = zero
            streak = state["streak"]
            streak[still] = np.minimum(streak[still] + 1, MAX_COUNT)
        if (state["streak"] > 0).any():
            # What was still before it ever moved says nothing of how it lives.
            ended = np.flatnonzero(moved & (state["streak"] > 0))
            lived = ended[state["age"][ended] > 0]
            state["longest"][lived] = np.maximum(state["longest"][lived], state["streak"][lived])
            state["streak"][ended] = 0
        first = np.isnan(state["last"])
        np.copyto(state["last"], values, where=moved)
        young = moved & ~first & (state["age"] < self.after)
        if young.any():
            state["age"][young] += 1


def _others_move(values: np.ndarray, state: State, still: np.ndarray) -> bool:
    """Whether any series of this step changed: then the optimizer stepped."""
    return bool((np.isfinite(values) & ~still & np.isfinite(state["last"])).any())


Vectorised: TypeAlias = VectorisedBaseline | VectorisedLimit | VectorisedStillness
