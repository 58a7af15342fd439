"""UpdateRatio: optimizer steps that are too large or too small for the weights they change."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Explanation, Scores, State
from sentinel.detect.vectorised import VectorisedBaseline, VectorisedLimit
from sentinel.errors import ConfigError

LIMIT = "limit."
"""Prefix of the limit's arrays in the state."""


class UpdateRatio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """|update| / |weight| of one tensor that leaves the others behind, or that is too large by any standard.

    About 1e-3 is what people aim for, whatever the model. A schedule moves all ratios alike, so the first part judges how
    far a tensor strays from its own past beyond what all of the step stray (in logarithms, both ways): too small is a
    tensor that no longer learns, too large one that is thrown about. The second part is absolute: a step of more than
    `limit` of the weight itself, for three points in a row, from a tensor whose steps were smaller for twenty points.

    Source: A. Karpathy, "a rough heuristic is that this ratio should be somewhere around 1e-3" (CS231n, neural networks 3;
    nanoGPT lectures); L. Bottou, "Curiously fast convergence"; You et al., LARS (2017), who set it layer by layer.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="optimizer steps too large or too small for a weight, beside the others or by any standard",
        phrase_down="this weight hardly moves beside the others: lost state, a vanished gradient, rounding?",
        phrase_up="this weight is rewritten in few steps: rate too high for it, or optimizer state lost",
        statistics=("mean",),
    )

    limit: float = 0.3
    """Ratio above which a step is too large by any standard: 300 times the rule of thumb, reached in health only by what
    begins near zero."""
    lasting: int = 3
    """Points in a row above `limit`."""
    threshold: float = 30.0
    """How often over a ratio may grow or shrink against the others in the reference's memory, less one. Smaller: a layer
    that settles before the others is reported; larger: one that stopped to learn is found later."""
    k: float = 10.0
    """Mean absolute log residuals that are still normal."""
    memory: float = 200.0
    """Points that the reference remembers."""
    warmup: int = 50
    """Points learned before any is judged: what begins at zero is rewritten at first."""
    settle_after: int = 50
    """Consecutive flagged points that make the new level the normal one; 0: never."""

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ConfigError(f"limit must be above 0, got {self.limit}")
        _ = self._relative, self._absolute

    @property
    def _relative(self) -> VectorisedBaseline:
        return VectorisedBaseline(
            domain="log",
            sides="both",
            k=self.k,
            threshold=self.threshold,
            memory=self.memory,
            warmup=self.warmup,
            settle_after=self.settle_after,
            peaks=False,
            common=True,
        )

    @property
    def _absolute(self) -> VectorisedLimit:
        return VectorisedLimit(above=self.limit, lasting=self.lasting, after=20)

    def state(self, num_series: int) -> State:
        """Return the state of new series: a baseline's and a limit's."""
        limit = {LIMIT + name: array for name, array in self._absolute.state(num_series).items()}
        return self._relative.state(num_series) | limit

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score the larger of the two parts."""
        relative = self._relative.score(_without_idle(values), state)
        absolute = self._absolute.score(values, _limit_of(state))
        is_limit = absolute.score > relative.score

        def explain() -> Explanation:
            baseline = np.where(is_limit, absolute.baseline, relative.baseline)
            direction = np.where(is_limit, absolute.evidence["direction"], relative.evidence["direction"])
            return baseline, {"direction": direction.astype(np.int8)}

        return Scores(np.maximum(relative.score, absolute.score), explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point of each series into the state, in place."""
        self._relative.learn(_without_idle(values), state, anomalous)
        self._absolute.learn(values, _limit_of(state), anomalous)


def _without_idle(values: np.ndarray) -> np.ndarray:
    """Return the values; those that are zero as NaN where most are: a rate of nothing moves no weight."""
    idle = values == 0.0
    if not idle.any() or 2 * np.count_nonzero(idle) <= np.count_nonzero(np.isfinite(values)):
        return values
    return np.where(idle, np.nan, values)


def _limit_of(state: State) -> State:
    return {name.removeprefix(LIMIT): array for name, array in state.items() if name.startswith(LIMIT)}
