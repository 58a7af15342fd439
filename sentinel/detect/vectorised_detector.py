"""VectorisedDetector: a detector that chooses a vectorised algorithm (baseline, limit, stillness) for each statistic."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.vectorised import Vectorised


class VectorisedDetector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of detectors that leave scoring and learning to a vectorised algorithm, one for each statistic.

    The engine judges many of them in one call of the C extension.
    """

    declares: ClassVar[Declaration]

    def __post_init__(self) -> None:
        for statistic in self.declares.statistics:
            self.vectorised(statistic)

    def vectorised(self, statistic: str) -> Vectorised:
        """Return the algorithm that scores and learns a statistic. ConfigError: the arguments are none that it can have."""
        raise NotImplementedError

    def state(self, num_series: int) -> State:
        """Return the state of new series."""
        return self.vectorised(self.declares.statistics[0]).state(num_series)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score one point a series; 0.0 for what is NaN or infinite (AnomalyNan reports these)."""
        return self.vectorised(self.declares.statistics[0]).score(values, state)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point of each series into the state, in place."""
        self.vectorised(self.declares.statistics[0]).learn(values, state, anomalous)
