"""A detector."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sentinel.detect import Declaration, Scores
from sentinel.detect.detector import State


class AboveRecord:
    """A value above everything its series has shown, by a factor."""

    declares: ClassVar[Declaration] = Declaration(
        summary="a value above everything its series has shown", statistics=("value",), phrase="above its record"
    )

    def __init__(self, factor: float = 1.5, warmup: int = 10) -> None:
        self.factor, self.warmup = factor, warmup

    def state(self, num_series: int) -> State:
        """Return the record of each series, and its points so far."""
        return {"record": np.zeros(num_series), "points": np.zeros(num_series, np.int64)}

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score the value over factor times the record."""
        limit = self.factor * state["record"]
        ready = (state["points"] >= self.warmup) & (limit > 0)
        score = np.minimum(np.where(ready, np.abs(values) / np.where(limit > 0, limit, 1.0), 0.0), 1e6)
        return Scores.of(score, state["record"].copy(), direction=(score >= 1.0).astype(np.int8))

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Raise the record, and count the point."""
        state["record"][~anomalous] = np.maximum(state["record"], np.abs(values))[~anomalous]
        state["points"] += 1
