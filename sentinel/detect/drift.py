"""Drift and Plateau: a loss that climbs slowly, and one that has stopped to fall, which no single point shows."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Explanation, Scores, State
from sentinel.detect.rolling import asinh
from sentinel.errors import ConfigError

MEAN_TO_SIGMA = 1.2533141373155001
"""A Gaussian's standard deviation over its mean absolute deviation, sqrt(pi / 2)."""
NEAR_ZERO = 0.02
"""Share of a series' first size below which changes count absolutely: see `RollingMedian.near_zero`."""
FIRST_POINTS = 32
"""Points whose mean size is the series' first size."""
LEVEL_CLIP = 3.0
"""Standard deviations past which a point moves the level no further."""
CHANGE_TO_SIGMA = MEAN_TO_SIGMA / math.sqrt(2.0)
"""And over the mean absolute difference of neighbours."""
CHANGES = 3.0
"""Times the deviation from neighbouring points that the one about the level may be: between them lies what neighbours
share."""
WANDER_CLIP = 1.5
"""Times what is normal that a level teaches of its wandering at most."""
REPORTED = 3.0
"""Times the highest rise reported that is normal once it is over."""
GOES_ON = 0.5
"""Share of the highest rise reported that is normal while it goes on: a rise is over where half of it is gone."""
LEVEL_OFF = 0.125
"""Share of its rise by which a level at rest moves at most in the latter half of the time it was flagged; of one that climbs
on it is a quarter."""
SEEN_BLOCKS, RECORDS = 64, 2.5
"""Blocks after which a run has shown how high chance leads its level: to so many times its record at most. 2.5 comes from
healthy runs of ten kinds: at 2, one in 40 more is reported twice."""
BLOCK = 4
"""Memories between two looks at how a level turns."""
ROUGH_NOISE = 9.0
"""Times the variance that noise gives a level that it gives a turn: 6, and half again."""
STEP_CLIP = 2.0
"""And past which it adds no more to the sum: a spike of a few points is no drift, and another detector reports it."""


class _Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The slow level of a series on the asinh scale, and the noise about it."""

    memory: int = 32
    """Points the level follows."""
    warmup: int = 128
    """Points seen before any is judged."""

    def _check(self) -> None:
        for name, low in (("memory", 4), ("warmup", FIRST_POINTS)):
            if not low <= getattr(self, name) <= 65536:
                raise ConfigError(f"{name} must be in [{low}, 65536], got {getattr(self, name)}")

    def _new(self, num_series: int) -> State:
        state: State = {name: np.zeros(num_series) for name in ("unit", "level", "noise", "size")}
        return state | {"count": np.zeros(num_series, dtype=np.int64)}

    def _begin_anew(self, state: State) -> None:
        np.minimum(state["count"], FIRST_POINTS - 1, out=state["count"])

    def _residual(self, values: np.ndarray, state: State) -> tuple[np.ndarray, np.ndarray]:
        """Return z and z - level of each series, 0.0 for what is not finite or has no level yet."""
        has_level = (state["count"] >= FIRST_POINTS) & np.isfinite(values)
        z = asinh(np.where(has_level, values, 0.0), np.where(has_level, state["unit"], 1.0))
        return z, np.where(has_level, z - state["level"], 0.0)

    def _follow(self, values: np.ndarray, state: State, anomalous: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Move level and noise by one point; return the rows that were judged ready and finite.

        residual: of this point, as `_residual` returns it beforehand.
        """
        finite = np.isfinite(values)
        count = state["count"]
        first = finite & (count < FIRST_POINTS)
        if first.any():
            with np.errstate(over="ignore"):
                size = state["size"] + (np.minimum(np.abs(values), 1e300) - state["size"]) / (count + 1.0)
            state["size"][first] = size[first]
            begins = first & (count == FIRST_POINTS - 1)
            if begins.any():
                state["unit"][begins] = np.maximum(NEAR_ZERO * state["size"][begins], 1e-300)
                state["level"][begins] = asinh(values[begins], state["unit"][begins])
        later = finite & ~first
        if later.any():
            age = count - FIRST_POINTS
            young = age < self.memory
            limit = np.where(young, np.inf, LEVEL_CLIP * np.maximum(state["noise"], 1e-12))
            near = residual.clip(-limit, limit)
            # Young levels are means of what there is, so that the first point weighs no more than another.
            rate = 1.0 / np.minimum(age + 2.0, self.memory)
            state["level"][later] += (rate * near)[later]
            calm = later & ~anomalous
            noise_rate = 1.0 / np.minimum(age + 1.0, 4.0 * self.memory)
            far = np.minimum(np.abs(residual), np.where(young, np.inf, 4.0 * np.maximum(state["noise"], 1e-12)))
            # What the clip holds back must be able to grow: a noise of zero would hold back everything.
            far = np.maximum(far, np.minimum(np.abs(residual), 1e-9))
            state["noise"][calm] += (noise_rate * (MEAN_TO_SIGMA * far - state["noise"]))[calm]
        state["count"][finite] += 1
        return np.asarray(later & (state["count"] > self.warmup))


class Drift(_Level, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CUSUM of what a series stands above its best level: slow divergence, long before any point is a spike.

    Source: Page, Biometrika 1954; the sum S <- max(0, S + clip((z - baseline - slack) / noise, -2, 2)).
    """

    declares: ClassVar[Declaration] = Declaration(
        statistics=("value",),
        trades="levels",
        summary="a loss that climbs slowly above its best, too little at a time for a spike",
        phrase="drifts away from its best level",
        rearms=True,
    )

    threshold: float = 30.0
    """Sum that is anomalous, in standard deviations: 15 points at the least."""
    slack: float = 0.03
    """Relative rise above the best level that is always normal."""
    slack_sigmas: float = 0.75
    """And how many standard deviations of one point, where that is more."""
    slack_wander: float = 1.75
    """And how many times as far as the level has ever stood above its best, where that is more: what a run has done before
    is no drift. 0: of the past only what was reported is a measure."""
    slack_walk: float = 3.5
    """And how many deviations of where chance would have led the level since its best, by how often it turned down in the
    run's last half, where that is more, in an old run up to 2.5 times its record: what goes up by chance comes down by
    chance. 0: chance is no measure."""
    sides: Literal["up", "both"] = "up"
    """`up`: against the lowest level so far, whose own fall is no drift. `both`: up and down, against a level of sixteen
    times the memory."""
    settle_after: int = 256
    """Flagged points after which a level that no longer moves is the new normal; 0: never."""

    def __post_init__(self) -> None:
        self._check()
        for name in ("threshold", "slack"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("slack_sigmas", "slack_wander", "slack_walk"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.settle_after <= 65536:
            raise ConfigError(f"settle_after must be in [0, 65536], got {self.settle_after}")

    def state(self, num_series: int) -> State:
        """Return 161 bytes a series."""
        state = self._new(num_series)
        names = ("best", "above", "below", "mark", "last", "change", "wander", "known", "told")
        walk = ("border", "moved", "rough", "walk")
        state |= {name: np.zeros(num_series) for name in (*names, *walk)}
        state["since"] = np.zeros(num_series, dtype=np.int64)
        state["run"] = np.zeros(num_series, dtype=np.int64)
        state["settled"] = np.zeros(num_series, dtype=bool)
        return state

    def _sums(self, values: np.ndarray, state: State, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums upward and downward with this point in. z: the point, as `_residual` returns it."""
        noise, slack = self._noise(state), self._slack(state)
        ready = (state["count"] >= self.warmup) & np.isfinite(values)
        excess = z - state["best"]

        def add(total: np.ndarray, toward: np.ndarray) -> np.ndarray:
            moved = total + ((toward - slack) / noise).clip(-STEP_CLIP, STEP_CLIP)
            return np.where(ready, moved.clip(0.0, 2.0 * self.threshold), total)

        down = add(state["below"], -excess) if self.sides == "both" else state["below"]
        return add(state["above"], excess), down

    def _noise(self, state: State) -> np.ndarray:
        """Return the deviation of one point: about the level, and no more than CHANGES times that of neighbours."""
        return np.asarray(np.maximum(np.minimum(state["noise"], CHANGES * state["change"]), 1e-9))

    def _slack(self, state: State) -> np.ndarray:
        """Return the rise above the best level that is normal; while a reported one goes on, the level at which it is
        over."""
        own = np.maximum(math.log1p(self.slack), self.slack_sigmas * self._noise(state))
        past = np.maximum(self.slack_wander * state["known"], REPORTED * state["told"])
        block = BLOCK * self.memory
        walk = self.slack_walk * np.sqrt(state["walk"] * np.maximum(state["since"] / block, 1.0))
        is_seen = state["count"] >= SEEN_BLOCKS * block
        walk = np.where(is_seen, np.minimum(walk, RECORDS * state["known"]), walk)
        over = np.maximum(np.maximum(own, past), walk)
        return np.where(state["run"] > 0, np.maximum(own, GOES_ON * state["told"]), over)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score the larger sum / threshold; 0.0 in the warm-up and for what is not finite."""
        z, _ = self._residual(values, state)
        up, down = self._sums(values, state, z)
        finite = np.isfinite(values)
        score = np.where(finite, np.maximum(up, down) / self.threshold, 0.0)

        def explain() -> Explanation:
            has_level = state["count"] > FIRST_POINTS
            with np.errstate(over="ignore"):
                best, level = (np.where(has_level, state["unit"] * np.sinh(state[of]), np.nan) for of in ("best", "level"))
            direction = np.where(score > 0.0, np.where(up >= down, 1, -1), 0).astype(np.int8)
            return best, {"direction": direction, "corroborated": score >= 1.0, "level": level}

        return Scores(score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Follow the level; the best level moves with what is not flagged, and where a flagged level has come to rest."""
        state["settled"].fill(False)
        # Once for all: what the parts below change of it belongs to series that have no level yet, whose z is 0.
        z, residual = self._residual(values, state)
        state["above"], state["below"] = self._sums(values, state, z)
        self._follow_change(values, state, z)
        ready = self._follow(values, state, anomalous, residual)
        seen = np.isfinite(values) & (state["count"] > FIRST_POINTS)
        young = seen & ~ready
        state["best"][young] = state["level"][young]
        calm = ready & ~anomalous
        state["run"][calm] = 0
        flagged = ready & anomalous
        has_flagged = bool(flagged.any())
        if has_flagged:
            apart = np.abs(state["level"] - state["best"])
            state["told"][flagged] = np.maximum(state["told"], apart)[flagged]
            # What was reported has to be over for long before more is: a rise on which points scatter is one.
            for name in ("above", "below"):
                begins = flagged & (state["run"] == 0) & (state[name] >= self.threshold)
                state[name][begins] = 2.0 * self.threshold
            state["run"][flagged] += 1
        state["since"][ready] += 1
        if self.sides == "up":
            state["since"][calm & (state["level"] < state["best"])] = 0
            state["best"][calm] = np.minimum(state["best"][calm], state["level"][calm])
        else:
            state["best"][calm] += (state["level"][calm] - state["best"][calm]) / (16.0 * self.memory)
            np.minimum(state["since"], 16 * self.memory, out=state["since"])
        self._follow_wander(state, calm)
        self._follow_turns(state, ready, calm)
        if self.settle_after and has_flagged:
            self._settle(state, flagged)

    def _follow_change(self, values: np.ndarray, state: State, z: np.ndarray) -> None:
        """Take in how far a point is from the one before. z: the point, as `_residual` returns it."""
        age = state["count"] - FIRST_POINTS
        known = np.isfinite(values) & (age >= 0)
        change = CHANGE_TO_SIGMA * np.abs(z - state["last"])
        least = np.maximum(state["change"], 1e-9)
        change = np.where(age <= self.memory, change, np.minimum(change, 4.0 * least))
        rate = 1.0 / np.minimum(np.maximum(age, 1), 4.0 * self.memory)
        later = known & (age > 0)
        state["change"][later] += (rate * (change - state["change"]))[later]
        state["last"][known] = z[known]

    def _follow_wander(self, state: State, calm: np.ndarray) -> None:
        """Take in how far the level stands from its best.

        What is known of it changes when the run is twice as old: a divergence does not become its own measure.
        """
        apart = np.minimum(np.abs(state["level"] - state["best"]), WANDER_CLIP * self._slack(state))
        state["wander"][calm] = np.maximum(state["wander"], apart)[calm]
        count = state["count"]
        due = calm & (count & (count - 1) == 0)
        state["known"][due] = state["wander"][due]

    def _follow_turns(self, state: State, ready: np.ndarray, calm: np.ndarray) -> None:
        """Take in how the level turns from block to block: the variance of what it walks in one, less that of the noise.

        Downward turns alone count: a decay and a divergence bend upward, chance bends both ways. What is known of it changes
        with the number of blocks doubled, too.
        """
        block = BLOCK * self.memory
        due = ready & (state["count"] % block == 0)
        if not due.any():
            return
        moved = state["level"] - state["border"]
        turn = np.minimum(moved - state["moved"], 0.0)
        state["border"][due], state["moved"][due] = state["level"][due], moved[due]
        known = due & calm & (state["count"] > self.warmup + 2 * block)
        num = np.maximum(state["count"] // block, 2)
        age = num - np.ldexp(1.0, np.frexp((num - 1).astype(np.float64))[1] - 1)
        state["rough"][known] += ((2.0 * (turn * turn) - state["rough"]) / age)[known]
        doubled = known & (num & (num - 1) == 0)
        noise = ROUGH_NOISE * (state["noise"] * state["noise"]) / (2.0 * self.memory - 1.0)
        state["walk"][doubled] = 0.5 * np.maximum(state["rough"] - noise, 0.0)[doubled]

    def improved(self, state: State) -> np.ndarray:
        """Return [series] bool: whether the level was at its best within the last two memories."""
        return np.asarray((state["count"] > self.warmup) & (state["since"] <= 2 * self.memory))

    def paid_by(self, state: State, total: int) -> np.ndarray:
        """Return [series] bool: whether series `total` was at its best in the latter half of the time that each rose."""
        return np.asarray((state["count"][total] > self.warmup) & (2 * state["since"][total] <= state["since"]))

    def _settle(self, state: State, flagged: np.ndarray) -> None:
        """Make a level that has come to rest the best, looking whenever it was flagged for twice as long."""
        run = state["run"]
        half = flagged & (run == (self.settle_after + 1) // 2)
        times = run // self.settle_after
        due = flagged & (times > 0) & (run == times * self.settle_after) & (times & (times - 1) == 0)
        moved = np.abs(state["level"] - state["mark"])
        state["mark"][half | due] = state["level"][half | due]
        if not due.any():
            return
        # By then half of the rise was seen; a young series' noise is all that its level may move.
        apart = np.maximum(np.abs(state["level"] - state["best"]), state["noise"])
        rested = due & (moved <= LEVEL_OFF * apart) & (2 * run >= state["since"])
        state["best"][rested] = state["level"][rested]
        state["since"][rested] = 0
        for name in ("above", "below"):
            state[name][rested] = 0.0
        state["settled"][rested] = True
        run[rested] = 0

    def rearm(self, state: State) -> None:
        """Begin anew with the next point, all series: after a resume, earlier points are no baseline any more."""
        self._begin_anew(state)
        for name in ("above", "below", "run", "wander", "known", "told", "rough", "walk", "since"):
            state[name].fill(0)


class Plateau(_Level, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level that has not fallen for the longer part of its course: training that leads nowhere, or is done."""

    declares: ClassVar[Declaration] = Declaration(
        statistics=("value",),
        summary="a loss that has stopped to fall for half of the run",
        phrase="has not improved for long",
        rearms=True,
    )

    share: float = 0.5
    """Share of all points seen that pass without improvement before it is said. A power law of exponent 0.05, as slow as
    language models get, still falls by 3.4 % in the second half of any run."""
    patience: int = 2000
    """And at least so many points."""
    improvement: float = 0.005
    """Relative fall of the level that is an improvement."""

    def __post_init__(self) -> None:
        self._check()
        if not 0.0 < self.share < 1.0:
            raise ConfigError(f"share must be in (0, 1), got {self.share}")
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1, got {self.patience}")
        if not self.improvement > 0:
            raise ConfigError(f"improvement must be above 0, got {self.improvement}")

    def state(self, num_series: int) -> State:
        """Return 56 bytes a series."""
        return self._new(num_series) | {
            "best": np.zeros(num_series),
            "best_at": np.zeros(num_series, dtype=np.int64),
        }

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score the points since the last improvement / what is patient; 0.0 in the warm-up and for what is not finite."""
        waited = state["count"] + 1 - state["best_at"]
        patient = np.maximum(self.share * (state["count"] + 1.0), float(self.patience))
        ready = (state["count"] >= self.warmup) & np.isfinite(values)
        score = np.where(ready, waited / patient, 0.0)

        def explain() -> Explanation:
            with np.errstate(over="ignore"):
                best = np.where(state["count"] > FIRST_POINTS, state["unit"] * np.sinh(state["best"]), np.nan)
            return best, {"direction": np.zeros(len(values), dtype=np.int8), "corroborated": score >= 1.0}

        return Scores(score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Follow the level, and remember where it last improved."""
        _, residual = self._residual(values, state)
        ready = self._follow(values, state, np.zeros(len(values), dtype=bool), residual)
        seen = np.isfinite(values) & (state["count"] > FIRST_POINTS)
        better = seen & (~ready | (state["level"] < state["best"] - math.log1p(self.improvement)))
        state["best"][better] = state["level"][better]
        state["best_at"][better] = state["count"][better]

    def rearm(self, state: State) -> None:
        """Begin anew with the next point, all series."""
        self._begin_anew(state)
        np.minimum(state["best_at"], state["count"], out=state["best_at"])
