"""Saturation: shares of an activation that are zero, dead or flat, judged by the share that is alive."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Explanation, Scores, State
from sentinel.detect.vectorised import VectorisedBaseline


class Saturation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Units that die or saturate: the share that is still alive falls to a fraction of what it was.

    Of a share x the judge looks at 1 - x, in logarithms, against a reference that remembers hundreds of steps: from 10 %
    to 60 % saturated is a little, from 60 % to 99 % is the end of a layer, and both are 50 or 40 points. Sparsity that a
    layer grows into, as ReLU layers do, comes slowly and is followed.

    Source: saturated tanh and sigmoid layers: Glorot & Bengio (2010); dying ReLU: Lu et al. (2019); natural sparsity,
    which is no fault: Li et al., "The Lazy Neuron Phenomenon" (2023).
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="activations that saturate or die: the share that is still alive falls to a fraction",
        phrase="units are dead or saturated: no gradient passes them (learning rate, initialisation, a bias)",
        statistics=("mean",),
    )

    threshold: float = 3.0
    """How often over the share that is alive may shrink, less one: 3.0 lets it fall to a quarter. Smaller: units that
    training switches off are reported; larger: most of a layer may die unseen."""
    k: float = 10.0
    """Mean absolute log residuals that are still normal."""
    memory: float = 200.0
    """Points that the reference remembers."""
    warmup: int = 50
    """Points learned before any is judged."""
    settle_after: int = 50
    """Consecutive flagged points that make the new level the normal one; 0: never."""

    def __post_init__(self) -> None:
        _ = self._alive

    @property
    def _alive(self) -> VectorisedBaseline:
        return VectorisedBaseline(
            domain="log",
            sides="down",
            k=self.k,
            threshold=self.threshold,
            memory=self.memory,
            warmup=self.warmup,
            settle_after=self.settle_after,
            peaks=False,
        )

    def state(self, num_series: int) -> State:
        """Return the state of new series."""
        return self._alive.state(num_series)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score one share a series; 0.0 for what is NaN or infinite."""
        alive = self._alive.score(1.0 - values, state)

        def explain() -> Explanation:
            return 1.0 - alive.baseline, {"direction": -alive.evidence["direction"]}

        return Scores(alive.score, explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one share of each series into the state, in place."""
        self._alive.learn(1.0 - values, state, anomalous)
