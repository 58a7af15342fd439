"""SameBatch: a loss that lost the scatter that batches give it; the loader hands out one batch again and again."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.rolling import log
from sentinel.errors import ConfigError

_RATE, _CALM_RATE = 0.05, 0.01
SMALLEST = 1e-300
"""A change that is smaller counts as this."""


class SameBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scalar that falls step after step by a small share of its usual change from step to step.

    Two batches differ; the loss of one batch that is trained on again falls without scatter. d = |x - last x| against the
    running mean of log d, in which a spike weighs little. Of a Gaussian scatter one step in 13 falls by less than 0.35 of
    that, eight in a row 1e-9. A change of exactly nothing says nothing here: a loss printed with few digits repeats,
    and one that repeats for long is HiddenNan's. A scatter that stays small becomes the usual one within some hundred steps.

    Source: the scatter of a loss about its course is that of the batches (McCandlish et al., "An Empirical Model of
    Large-Batch Training", 2018); that one repeated batch has none is arithmetic.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="a loss that lost its scatter from step to step, as when one batch comes again and again",
        phrase="it glides where batches used to scatter it: the same batch again and again?",
        statistics=("value",),
    )

    share: float = 0.35
    """Share of the usual change from step to step below which a fall is no other batch."""
    lasting: int = 8
    """Such changes in a row that are not chance: there are none in the 235,309 points of the public logs."""
    warmup: int = 32
    """Changes seen before any is judged."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"share must be between 0 and 1, got {self.share}")
        for name in ("lasting", "warmup"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def state(self, num_series: int) -> State:
        """Return 32 bytes a series."""
        return {
            "last": np.full(num_series, np.nan),
            "change": np.zeros(num_series),
            "changes": np.zeros(num_series, dtype=np.int64),
            "run": np.zeros(num_series, dtype=np.int64),
        }

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score small falls in a row / lasting; 0.0 for other changes, for none, and for what is not finite."""
        calm, _, _ = self._calm(values, state)
        score = np.where(calm, (state["run"] + 1.0) / self.lasting, 0.0)
        return Scores.of(score, state["last"].copy(), direction=np.zeros(len(values), dtype=np.int8))

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Follow the usual change in logarithms, small ones slowly, and count those in a row. Values that are not finite are
        left out."""
        calm, size, counted = self._calm(values, state)
        finite = np.isfinite(values)
        moved = finite & (size > 0)
        state["run"] = np.where(calm, state["run"] + 1, np.where(moved, 0, state["run"]))
        rate = np.where(calm, _CALM_RATE, np.maximum(1.0 / (1.0 + state["changes"]), _RATE))
        np.copyto(state["change"], state["change"] + rate * (counted - state["change"]), where=moved)
        state["changes"] = state["changes"] + moved
        np.copyto(state["last"], values, where=finite)

    def _calm(self, values: np.ndarray, state: State) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return whether each point lies little below its last one, how far away it is, and the logarithm of that.

        NaN: one is not known.
        """
        change = np.clip(values - state["last"], -1e300, 1e300)
        size = np.abs(change)
        counted = log(np.maximum(size, SMALLEST))
        small = (change < 0) & (counted < math.log(self.share) + state["change"])
        return small & (state["changes"] >= self.warmup) & np.isfinite(values), size, counted
