"""SlowRank: the rank that arrives last at the collectives, in a group whose step times are all alike."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.group import Points, StepPoints, members_of
from sentinel.detect.vectorised import JUST_BELOW_ONE
from sentinel.errors import ConfigError

_RATE = 0.05
_LEAST_SHARE = 0.05
"""Share of the step that an excess must have to matter. Smaller: jitter counts; larger: a straggler that costs every step a
little is never named."""
_DEVIATIONS = 4.0
_FADING = 0.995
"""What the longest single step so far keeps of itself a step."""
_FIRST_STEPS = 2
"""First steps of a rank that say nothing of anybody's usual time: they compile and allocate, on one rank longer than on
another. More would delay the judgement of every later step."""
_STEADY = 0.5
"""The least by which a young rank was longer than its peers must be this share of the most. Smaller: one long step makes a
straggler; larger: a straggler whose steps vary waits for `warmup`."""
_LATE_FADING = 0.98
_LATE = 0.1
"""A rank's lateness (log of the ratio) keeps `_LATE_FADING` of itself a step, and counts as recent down to this: a rank 1.3
times as slow as its peers counts as recently late for 48 steps."""
_MILD = 2.5
"""Times `least_s` that a rank must have cost which is less late than `sudden`: one of three steps of 0.1 s on a busy machine
had cost 0.105 s, one 1.5 times as slow in steps of 0.2 s costs 0.29 s."""
_GREW = 1.15
"""Times its own usual busy time from which a rank that is alone on its stage may be late: when the others became faster, or
a slow one among them is well again, it is not the one that changed. Larger: one that slowed by less is missed."""


class SlowRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank whose own work takes longer than that of its peers, while they wait for it.

    In a synchronous group every step is as long as the slowest rank's, for all. What differs is how much of it each waits:
    busy = step time - wait. A rank is held against the others of its pipeline stage; one that is alone on its stage against
    the other stages, as it usually compares with them, and against its own past. One step alone is written down (`info`)
    where it is `sudden`: longer than all such steps before, which fade by 0.5 % a step. Where several are late by turns, as
    on a host that is busy, each must be so for longer, unless it is twice as late as they were. How ranks compare is learned
    from steps in which nobody that they are held against is late.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="the rank that arrives last at the collectives: its own work is longer, and the others wait",
        statistics=("busy_s",),
        over="ranks",
    )

    factor: float = 1.3
    """Times the busy time of the others that is still normal."""
    lasting: int = 3
    """Steps in a row that make it more than a hiccup."""
    sudden: float = 2.0
    """Times the busy time of the others from which one step alone is written down."""
    warmup: int = 10
    """Steps of a rank seen before it is judged: the first ones compile and allocate."""
    young: float = 4.0
    """Times the busy time of the others from which a rank is judged from its third step on, where it is as slow each step;
    from `sudden` on where it kept pace for `lasting` steps before."""
    least_s: float = 0.1
    """Seconds that it must have cost in a row, 2.5 times as many where it is less late than `sudden`: a scheduler's time
    slice, and a burst of another program, are as long as some short steps."""

    def __post_init__(self) -> None:
        if not self.factor > 1.0:
            raise ConfigError(f"factor must be above 1, got {self.factor}")
        if not self.sudden >= self.factor:
            raise ConfigError(f"sudden must be at least factor, {self.factor:g}, got {self.sudden}")
        if not self.young >= self.factor:
            raise ConfigError(f"young must be at least factor, {self.factor:g}, got {self.young}")
        if not 0.0 <= self.least_s < math.inf:
            raise ConfigError(f"least_s must be a finite number of seconds from 0 on, got {self.least_s}")
        if self.lasting < 1:
            raise ConfigError(f"lasting must be at least 1, got {self.lasting}")
        if self.warmup < 1:
            raise ConfigError(f"warmup must be at least 1, got {self.warmup}")

    def state(self, num_members: int) -> State:
        """Return 96 bytes a rank."""
        return {
            "num_steps": np.zeros(num_members, dtype=np.int64),
            "streak": np.zeros(num_members, dtype=np.int64),
            "cost": np.zeros(num_members),
            "least": np.zeros(num_members),
            "most": np.zeros(num_members),
            "paced": np.zeros(num_members, dtype=np.int64),
            "late": np.zeros(num_members),
            "usual": np.zeros(num_members),
            "spread": np.zeros(num_members),
            "longest": np.zeros(num_members),
            "against": np.full(num_members, np.nan),
            "own": np.full(num_members, np.nan),
        }

    def score(self, points: Points, group: np.ndarray, state: State) -> Scores:
        """Score ratio / what is normal, for those that last; below 1.0 for all others, 0.0 where a wait is not known."""
        ratio, busy, peers_wait, peers_busy, _ = self._measured(points, group, state)
        raw, size = self._raw(ratio, state), _size(ratio)
        is_warm = state["num_steps"] >= self.warmup
        is_judged = is_warm | self._is_changed(busy - peers_busy, size, state)
        cost = state["cost"] + np.nan_to_num(busy - peers_busy)
        enough_s = np.where(size < math.log(self.sudden), _MILD * self.least_s, self.least_s)
        is_early = ~is_judged | (state["streak"] + 1 < self._needed(size, group, state)) | (cost < enough_s)
        score = np.where(is_early, np.minimum(raw, JUST_BELOW_ONE), raw)
        is_out = is_judged & (raw >= 1.0)
        is_sudden = is_warm & is_out & (size >= math.log(self.sudden)) & (size > state["longest"])
        return Scores.of(
            score, peers_busy, busy_s=busy, wait_s=peers_wait, ratio=ratio, is_sure=np.ones(len(score), dtype=bool),
            is_out=is_out, alone=np.where(is_sudden, raw, 0.0),
        )  # fmt: skip

    def learn(self, points: Points, group: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Follow the usual ratio and its spread, never further than what is normal; count how long it lasts."""
        made = points.made if isinstance(points, StepPoints) else None
        ratio, busy, _, peers_busy, against = made or self._measured(points, group, state)
        known = np.isfinite(busy)
        size = _size(ratio)
        is_high = known & (self._raw(ratio, state) >= 1.0)
        is_past_first = state["num_steps"] >= _FIRST_STEPS
        state["least"], state["most"] = self._extremes(busy - peers_busy, state)
        state["streak"] = np.where(is_high & is_past_first, state["streak"] + 1, 0)
        state["paced"] += known & is_past_first & ~is_high
        state["cost"] = np.where(state["streak"] > 0, state["cost"] + np.nan_to_num(busy - peers_busy), 0.0)
        is_lasting = state["streak"] >= self.lasting
        state["late"] = np.maximum(state["late"] * _LATE_FADING, np.where(is_lasting, size, 0.0))
        # Many times as long is no measure of what is usual, nor what a young rank is step after step, before it is judged.
        is_steady = (state["streak"] > 1) & (state["least"] >= _STEADY * state["most"])
        is_other = (size >= math.log(self.young)) | (is_steady & (state["num_steps"] < self.warmup))
        take = known & ~anomalous & ~(is_high & is_other)
        most = math.log(self.factor)
        longest = np.maximum(state["longest"] * _FADING, np.where(is_high, size, 0.0))
        np.copyto(state["longest"], longest, where=known & (state["num_steps"] >= self.warmup))
        bounded = np.clip(size, -most, most)
        rate = np.maximum(1.0 / (1.0 + state["num_steps"]), _RATE)
        # A mean of what there is, so that the first step taken in weighs no more than another.
        rate_past_first = np.maximum(1.0 / np.maximum(1.0 + state["num_steps"] - _FIRST_STEPS, 1.0), _RATE)
        change = bounded - state["usual"]
        state["usual"][take] += (rate * change)[take]
        state["spread"][take] += (rate * (np.abs(change) - state["spread"]))[take]
        for name, now in (("against", self._undisturbed(against, is_high, points, group)), ("own", busy)):
            first = take & is_past_first & np.isnan(state[name]) & np.isfinite(now)
            state[name][first] = now[first]
            later = take & ~first & ~is_high & np.isfinite(now)
            state[name][later] += (rate_past_first * (now - state[name]))[later]
        state["num_steps"][known] += 1

    def _is_changed(self, excess: np.ndarray, size: np.ndarray, state: State) -> np.ndarray:
        """Return which young ranks are slow for another reason than that they begin.

        What belongs to a beginning (compilers, caches that fill, autotuning) dwindles, or costs each step otherwise. A rank
        that takes as much longer step after step is slow; the sooner it is believed if it kept pace before.
        """
        least, most = self._extremes(excess, state)
        is_steady = least >= _STEADY * most
        has_kept_pace = state["paced"] >= self.lasting
        enough = np.where(has_kept_pace, math.log(self.sudden), math.log(self.young))
        changed: np.ndarray = (state["num_steps"] >= _FIRST_STEPS) & is_steady & (size >= enough)
        return changed

    def _extremes(self, excess: np.ndarray, state: State) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the most that a rank took longer than its peers, in the steps in a row up to this one."""
        has_begun = state["streak"] > 0
        least = np.where(has_begun, np.fmin(state["least"], excess), excess)
        return least, np.where(has_begun, np.fmax(state["most"], excess), excess)

    def _needed(self, size: np.ndarray, group: np.ndarray, state: State) -> np.ndarray:
        """Return the steps in a row that each rank must be late: more where others were as late just now, by turns, and
        twice as many while its usual spread is known from a few steps alone, unless it is as late as `sudden`.

        Then no rank is slow, but the host or the network that they share; what lasts, or is twice as bad, is reported still.
        """
        needed = np.full(len(size), self.lasting)
        needed[(state["num_steps"] < 2 * self.warmup) & (size < math.log(self.sudden))] *= 2
        is_late = state["late"] > _LATE
        if not is_late.any():
            return needed
        for members in members_of(group):
            late = members[is_late[members]]
            for at in members.tolist():
                others = late[late != at]
                if len(others) and size[at] < state["late"][others].max() + math.log(2.0):
                    needed[at] = max(int(needed[at]), self.lasting * (1 + len(others)))
        return needed

    def _undisturbed(self, against: np.ndarray, is_high: np.ndarray, points: Points, group: np.ndarray) -> np.ndarray:
        """Return how each rank compares with other stages; NaN where most of those it is held against are late."""
        if not is_high.any():
            return against
        stage, quiet = points["stage"], against.copy()
        for members in members_of(group):
            for at in members[np.isfinite(against[members])].tolist():
                others = members[stage[members] != stage[at]]
                if 2 * np.count_nonzero(is_high[others]) >= len(others):
                    quiet[at] = np.nan
        return quiet

    def _raw(self, ratio: np.ndarray, state: State) -> np.ndarray:
        """Return how far each ratio is past what is normal for the rank: 1.0 and more is."""
        normal = np.maximum(math.log(self.factor), state["usual"] + _DEVIATIONS * state["spread"])
        raw: np.ndarray = np.maximum(_size(ratio) / normal, 0.0)
        return raw

    def _measured(
        self, points: Points, group: np.ndarray, state: State
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return, [members] each: ratio to the peers (1.0: nobody waits for it), busy seconds, the peers' wait, their busy
        seconds (other stages': as it usually compares, and no less than its own usual), and how a rank alone on its stage
        compares with other stages."""
        step, wait, stage = points["step_s"], points["wait_s"], points["stage"]
        busy = np.where(np.isfinite(wait) & np.isfinite(step), np.maximum(step - wait, 0.0), np.nan)
        ratio, against = np.ones(len(step)), np.full(len(step), np.nan)
        peers_wait, peers_busy = np.full(len(step), np.nan), np.full(len(step), np.nan)
        for members in members_of(group) if np.isfinite(busy).any() else ():
            known = members[np.isfinite(busy[members])]
            for one in members_of(stage[known]):
                of_stage = known[one]
                if len(of_stage) > 1:
                    peers_busy[of_stage], peers_wait[of_stage] = _of_others(busy[of_stage]), _of_others(wait[of_stage])
                    continue
                others = known[stage[known] != stage[of_stage[0]]]
                if len(others) and (middle := float(np.median(busy[others]))) > 0:
                    against[of_stage] = busy[of_stage] / middle
                    # How stages compare may have been learned while another one began; what it took itself bounds that.
                    peers_busy[of_stage] = np.fmax(state["against"][of_stage] * middle, state["own"][of_stage])
                    peers_wait[of_stage] = np.median(wait[others])
        excess = busy - peers_busy
        matters = (excess > _LEAST_SHARE * step) & (peers_wait >= 0.5 * excess) & (peers_busy > 0)
        is_alone = np.isfinite(against)
        matters &= ~is_alone | ~(busy < _GREW * state["own"])
        ratio[matters] = busy[matters] / peers_busy[matters]
        if isinstance(points, StepPoints):
            points.made = ratio, busy, peers_wait, peers_busy, against
        return ratio, busy, peers_wait, peers_busy, against


def _size(ratio: np.ndarray) -> np.ndarray:
    size: np.ndarray = np.log(np.where(ratio > 0, ratio, 1.0))
    return size


def _of_others(values: np.ndarray) -> np.ndarray:
    """Return for each member the median of the others; of many that of all, which one member hardly moves."""
    if len(values) >= 8:
        return np.full(len(values), np.median(values))
    return np.array([np.median(np.delete(values, at)) for at in range(len(values))])
