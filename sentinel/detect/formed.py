"""FormDetector: a detector that chooses a form (baseline, limit or stillness) for each statistic."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.vectorised import Form


class FormDetector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of detectors whose form for each statistic scores and learns; the engine judges many forms at once."""

    declares: ClassVar[Declaration]

    def __post_init__(self) -> None:
        for statistic in self.declares.statistics:
            self.form(statistic)

    def form(self, statistic: str) -> Form:
        """Return the form that scores a statistic. ConfigError where the arguments make none."""
        raise NotImplementedError

    def state(self, num_series: int) -> State:
        """Return the state of new series."""
        return self.form(self.declares.statistics[0]).state(num_series)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score one point a series; 0.0 for what is NaN or infinite (AnomalyNan reports these)."""
        return self.form(self.declares.statistics[0]).score(values, state)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point of each series into the state, in place."""
        self.form(self.declares.statistics[0]).learn(values, state, anomalous)
