"""VanishingGradient and ExplodingTensor: what fades or grows too slowly for any single step to show it.

A jump is reported by AnomalyTurbulence, whose baseline follows within ten points. These two hold a tensor against a
reference that remembers hundreds of steps: what halves or doubles every 60 steps for some hundred steps on end leaves it
behind, what a schedule, a warm-up or a run that converges does to it hardly ever does.
"""

from __future__ import annotations

from typing import ClassVar

from sentinel.detect.declaration import Declaration
from sentinel.detect.vectorised import VectorisedBaseline
from sentinel.detect.vectorised_detector import VectorisedDetector

MEMORY = 300.0
"""Points that the slow reference remembers: on tiny GPTs, a mixture of experts and a ViT trained on a CPU, a healthy tensor
moved by less than a factor of 10 in as many steps once its first hundred were over."""


class VanishingGradient(VectorisedDetector, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A weight gradient that fades away while the others do not.

    residual = log|x| - log(reference) - the median residual of all gradients of the step; anomalous below -log(1 +
    threshold). Without that median every run that converges to a loss of nothing would be accused. Fewer than four
    gradients have none.

    Source: gradients that shrink exponentially with depth are Hochreiter (1991), Bengio et al. (1994) and Glorot & Bengio
    (2010), who compare layers with one another at one moment; here each layer is compared with its own past as well, for
    healthy layers differ by orders of magnitude from each other (a key's bias has no gradient but rounding).
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="a weight gradient that fades against its own past while the others do not",
        phrase="this layer hardly learns any more: dead or saturated units behind it, or its path is cut",
        is_vectorised=True,
    )

    threshold: float = 50.0
    """How often over a gradient may shrink against the others, less one; four times what healthy tiny runs reached, which
    stay below 12."""
    k: float = 10.0
    """Mean absolute log residuals that are still normal; as AnomalyTurbulence's."""
    memory: float = MEMORY
    """Points that the reference remembers."""
    warmup: int = 100
    """Points learned before any is judged: the first hundred steps carry every layer far away from its random start."""
    settle_after: int = 100
    """Consecutive flagged points that make the new level the normal one; 0: never."""

    def vectorised(self, statistic: str) -> VectorisedBaseline:
        """Return the baseline that the detector is."""
        return VectorisedBaseline(
            domain="log",
            sides="down",
            k=self.k,
            threshold=self.threshold,
            memory=self.memory,
            warmup=self.warmup,
            settle_after=self.settle_after,
            peaks=False,
            common=True,
        )


class ExplodingTensor(VectorisedDetector, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor that grows and grows: a weight without decay, an activation on its way to overflow.

    residual = log|x| - log(reference); anomalous above log(1 + threshold). Nothing is taken off for what the others do:
    when a model diverges, all of its tensors grow.

    Source: growth of activations and weights before divergence: Wortsman et al., "Small-scale proxies for large-scale
    Transformer training instabilities" (2023); Takase et al., "Spike No More" (2023).
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="a tensor that grows and grows against a reference of hundreds of steps",
        phrase="it grows without bound: the run is diverging, or nothing (decay, a norm) holds it",
        statistics=("rms",),
        is_vectorised=True,
    )

    threshold: float = 30.0
    """How often over a tensor may grow in the reference's memory, less one; six times what healthy tiny runs reached,
    parameters that begin at zero among them: they grew by less than 5 after their first hundred steps."""
    k: float = 10.0
    """Mean absolute log residuals that are still normal; as AnomalyTurbulence's."""
    memory: float = MEMORY
    """Points that the reference remembers."""
    warmup: int = 100
    """Points learned before any is judged."""
    settle_after: int = 100
    """Consecutive flagged points that make the new level the normal one; 0: never."""

    def vectorised(self, statistic: str) -> VectorisedBaseline:
        """Return the baseline that the detector is."""
        return VectorisedBaseline(
            domain="log",
            sides="up",
            k=self.k,
            threshold=self.threshold,
            memory=self.memory,
            warmup=self.warmup,
            settle_after=self.settle_after,
            peaks=False,
        )
