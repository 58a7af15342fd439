"""AnomalyNan, NanStorm and HiddenNan: values that are not finite, now or too often, or that a trainer hides."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.vectorised import JUST_BELOW_ONE
from sentinel.errors import ConfigError


def _of_nan(detector: AnomalyNan) -> Declaration:
    """Without a limit nothing is formed of a row: its counts decide."""
    counts = detector.threshold is None and not detector.compat
    return msgspec.structs.replace(detector.declares, judges="counts" if counts else "own_rows")


class AnomalyNan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NaN or an infinity anywhere in a tensor, judged on each rank's own row; or a value past an absolute limit.

    Its values are raw: NaN where the row counts a NaN, +-inf where it counts an infinity, the statistic otherwise.
    """

    declares: ClassVar[Declaration] = Declaration(
        with_arguments=_of_nan,
        summary="any NaN or infinity in a tensor or scalar, on the very rank that has it",
        statistics=("absmax",),
        raw_values=True,
    )

    threshold: float | None = None
    """A statistic whose absolute value exceeds this is anomalous too; null: no limit."""
    compat: Literal["", "msprobe"] = ""
    """`msprobe`: exactly its formula, NaN or abs(x) > threshold; an infinity passes when there is no threshold."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not self.threshold >= 0:
            raise ConfigError(f"threshold must not be negative, got {self.threshold}")

    def state(self, num_series: int) -> State:
        """Return no arrays: an absolute rule has no baseline."""
        return {}

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score 1.0 for what is no number, |x| / threshold for what is one, else 0.0."""
        bad = np.isnan(values) if self.compat else ~np.isfinite(values)
        score = bad.astype(np.float64)
        if self.threshold is not None:
            size = np.abs(values)
            over = size > self.threshold
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.nan_to_num(np.minimum(size / self.threshold, 1e300), nan=0.0)
            ratio = np.where(over, np.maximum(ratio, 1.0), np.minimum(ratio, JUST_BELOW_ONE))
            score = np.where(bad, 1.0, ratio)
        baseline = np.full(len(values), np.nan if self.threshold is None else self.threshold)
        return Scores.of(score, baseline, direction=np.zeros(len(values), dtype=np.int8))

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Learn nothing."""


class NanStorm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Non-finite values that keep coming: one NaN gradient is no storm, three in a hundred steps are."""

    declares: ClassVar[Declaration] = Declaration(
        summary="non-finite values that keep coming: 3 in 100 steps", statistics=("absmax",), raw_values=True
    )

    count: int = 3
    """Non-finite points within `window` that make a storm; of public logs those with 3 in 100 were killed by it."""
    window: int = 100
    """Points looked back upon, the newest included."""

    def __post_init__(self) -> None:
        if not 2 <= self.count <= 64:
            raise ConfigError(f"count must be in [2, 64], got {self.count}")
        if self.window < self.count:
            raise ConfigError(f"window must be at least count ({self.count}), got {self.window}")

    def state(self, num_series: int) -> State:
        """Return `count` + 1 integers a series."""
        never = np.full((num_series, self.count - 1), -(2**40), dtype=np.int64)
        return {"points": np.zeros(num_series, dtype=np.int64), "bad_at": never}

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score non-finite points within the window / count, at a non-finite point; 0.0 at a finite one."""
        recent = (state["points"][:, None] - state["bad_at"] < self.window).sum(axis=1)
        score = np.where(np.isfinite(values), 0.0, (recent + 1.0) / self.count)
        return Scores.of(score, np.full(len(values), np.nan), direction=np.zeros(len(values), dtype=np.int8))

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Keep the numbers of the last non-finite points."""
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            state["bad_at"][bad] = np.concatenate([state["bad_at"][bad, 1:], state["points"][bad, None]], axis=1)
        state["points"] += 1


CONVERGED = 0.01
"""Share of its usual size below which a value that repeats is no hidden NaN: what hides a NaN repeats a usual value. Larger:
a repeated value of a run that learned much is missed; smaller: a loss that converged is reported."""


class HiddenNan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scalar that drops to exactly 0.0, or repeats exactly, after a life of change: a trainer that hides its NaNs."""

    declares: ClassVar[Declaration] = Declaration(
        summary="a loss of exactly 0.0, or exactly repeated, after a life of change",
        phrase="exactly 0.0 or exactly repeated: a hidden NaN?",
        statistics=("value",),
    )
    """What an anomaly says behind its numbers."""

    repeats: int = 8
    """Exact repetitions in a row that are not chance. Smaller: a value printed with few digits is reported; larger: a
    trainer that hides its NaNs is found later."""
    warmup: int = 20
    """Changing points seen before any is judged."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats must be at least 1, got {self.repeats}")
        if self.warmup < 2:
            raise ConfigError(f"warmup must be at least 2, got {self.warmup}")

    def state(self, num_series: int) -> State:
        """Return 52 bytes a series."""
        names = ("last", "size", "change", "resolution", "recent")
        state: State = {name: np.zeros(num_series) for name in names}
        state["resolution"][:] = np.inf
        return state | {"changes": np.zeros(num_series, dtype=np.int64), "repeated": np.zeros(num_series, dtype=np.int32)}

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score 1.0 at a sudden exact zero, repetitions / repeats at a repetition, 0.0 elsewhere."""
        ready = (state["changes"] >= self.warmup) & np.isfinite(values)
        # A loss printed with few digits repeats in good health: what it usually moves must be well above its last digit.
        # One that has converged does as well: its latest moves were of its last digit, or it is nearly, not exactly, 0.0.
        restless = np.minimum(state["change"], state["recent"]) >= 10.0 * state["resolution"]
        usual = (np.abs(values) >= CONVERGED * state["size"]) | (values == 0.0)
        repeated = (values == state["last"]) & ready & restless & usual
        score = np.where(repeated, (state["repeated"] + 1.0) / self.repeats, 0.0)
        sudden = ready & (values == 0.0) & (state["size"] >= 10.0 * state["change"]) & (state["size"] > 1e-3)
        score[sudden] = np.maximum(score[sudden], 1.0)
        return Scores.of(score, np.where(state["changes"] > 0, state["size"], np.nan), direction=-sudden.astype(np.int8))

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Follow the usual size and the usual change; zeros and repetitions move neither."""
        finite = np.isfinite(values)
        same = finite & (values == state["last"])
        state["repeated"][same] += 1
        moved = finite & ~same
        state["repeated"][moved] = 0
        take = moved & ~anomalous
        first = take & (state["changes"] == 0)
        later = take & ~first
        change = np.abs(values - state["last"])
        rate = np.maximum(1.0 / np.maximum(state["changes"], 1), 0.05)
        state["change"][later] += (rate * (change - state["change"]))[later]
        state["size"][take] += (np.where(first, 1.0, rate) * (np.abs(values) - state["size"]))[take]
        np.minimum(state["resolution"], change, out=state["resolution"], where=later)
        np.maximum(change, 0.5 * state["recent"], out=state["recent"], where=later)
        state["changes"][take] += 1
        state["last"][finite] = values[finite]
