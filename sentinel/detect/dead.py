"""DeadTensor: gradients that are all zero, and weights that stand still, after a life of change."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.detector import Explanation, Scores, State
from sentinel.errors import ConfigError

PATIENCE = 4
"""A stillness must last this many times as long as the longest that came and went before (chosen)."""
MOST = 32_000
"""Most points counted: counts are 16 bits wide."""


class DeadTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor that is exactly zero, or exactly what it was, step after step, after a life of change.

    A norm that is exactly 0.0 for `zero_steps` points in a row, or exactly repeated for `unchanged_steps` while others of
    the rule move (when nothing moves, no optimizer stepped). What was still for some points before and went on (an expert
    without tokens, weights in bf16 whose updates round to nothing) needs four times as many. What never lived cannot die:
    a frozen weight, a bias that begins at zero and stays there.

    Source: dying ReLU units pass no gradient (Lu et al., "Dying ReLU and Initialization", 2019); a weight that no optimizer
    holds, or whose state is lost, stays as it is.
    """

    summary: ClassVar[str] = "a gradient all zero, or a weight that stands still while others move, after a life of change"
    phrase: ClassVar[str] = "nothing reaches it any more: its path is cut, its units are dead, or no optimizer steps it"
    statistics: ClassVar[tuple[str, ...]] = ("norm",)
    raw_values: ClassVar[bool] = False

    zero_steps: int = 3
    """Points in a row that are exactly zero; the least that is no chance (DESIGN.md, section 6: 3 steps corroborate)."""
    unchanged_steps: int = 10
    """Points in a row that repeat exactly; chosen: weights in bf16 at a low rate stand still for a few."""
    after: int = 20
    """Points that changed, seen before any stillness is judged."""

    def __post_init__(self) -> None:
        for name in ("zero_steps", "unchanged_steps", "after"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} must be in [1, {MOST}], got {getattr(self, name)}")

    def state(self, num_series: int) -> State:
        """Return the state of new series, 14 bytes each."""
        return {
            "last": np.full(num_series, np.nan),
            "streak": np.zeros(num_series, dtype=np.int16),
            "longest": np.zeros(num_series, dtype=np.int16),
            "life": np.zeros(num_series, dtype=np.int16),
        }

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score still points in a row / those needed; 0.0 for what moves, and for what is not finite."""
        zero, same = values == 0.0, values == state["last"]
        still = zero | same
        score = np.zeros(len(values))
        if still.any():
            if not _others_move(values, state, still):
                still = zero
            at = np.flatnonzero(still & (state["life"] >= self.after))
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
            streak[still] = np.minimum(streak[still] + 1, MOST)
        if (state["streak"] > 0).any():
            # What was still before it ever moved says nothing of how it lives.
            ended = np.flatnonzero(moved & (state["streak"] > 0))
            lived = ended[state["life"][ended] > 0]
            state["longest"][lived] = np.maximum(state["longest"][lived], state["streak"][lived])
            state["streak"][ended] = 0
        first = np.isnan(state["last"])
        np.copyto(state["last"], values, where=moved)
        young = moved & ~first & (state["life"] < self.after)
        if young.any():
            state["life"][young] += 1


def _others_move(values: np.ndarray, state: State, still: np.ndarray) -> bool:
    """Whether any series of this step changed: then the optimizer stepped."""
    return bool((np.isfinite(values) & ~still & np.isfinite(state["last"])).any())
