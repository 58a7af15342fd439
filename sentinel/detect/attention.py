"""AttentionCollapse: attention whose entropy collapses onto one position, and logits that grow until softmax saturates."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from sentinel.detect.declaration import Declaration
from sentinel.detect.vectorised import VectorisedBaseline
from sentinel.detect.vectorised_detector import VectorisedDetector


class AttentionCollapse(VectorisedDetector, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entropy that collapses, or logits that grow, against a reference that remembers hundreds of steps.

    Of rows `M:entropy` the mean, in nats, downwards: anomalous below reference / (1 + threshold). Of rows `M:max_logit` the
    max, upwards: above reference * (1 + threshold), and never below `minimum`. Heads that specialise in the course of
    training move both by less.

    Source: entropy collapse: Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse"
    (2023). Logit growth: Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters" (2023); Wortsman et al.
    (2023); the limit of 100 that Kimi K2 clips at (2025) is the scale of `minimum`.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="attention that collapses: its entropy falls to a fraction, or its largest logit multiplies",
        phrase_down="attention collapses onto few keys: logits too large (no QK norm, a high learning rate)?",
        phrase_up="attention logits grow: softmax saturates and gradients vanish next (QK norm, logit cap)",
        statistics=("mean", "max"),
        is_vectorised=True,
        is_fitted=True,
    )

    quantity: Literal["auto", "entropy", "max_logit"] = "auto"
    """What the rows are; auto: `entropy` where the statistic is a mean, `max_logit` where it is a max."""
    threshold: float = 4.0
    """How often over the quantity may shrink or grow in the reference's memory, less one; heads of tiny GPTs and ViTs moved
    by less than half of that."""
    k: float = 8.0
    """Mean absolute log residuals that are still normal: 8 are 6.4 sigma of a Gaussian. Smaller: the noise of a head is
    reported; larger: a collapse must go further."""
    minimum: float = 30.0
    """A largest logit below this is never anomalous: softmax does not saturate before, and healthy runs get there."""
    memory: float = 200.0
    """Points that the reference remembers."""
    warmup: int = 100
    """Points learned before any is judged."""
    settle_after: int = 100
    """Consecutive flagged points that make the new level the normal one; 0: never."""

    def for_statistic(self, statistic: str) -> AttentionCollapse:
        """Return the detector with its quantity decided."""
        if self.quantity != "auto":
            return self
        return msgspec.structs.replace(self, quantity="entropy" if statistic == "mean" else "max_logit")

    def vectorised(self, statistic: str) -> VectorisedBaseline:
        """Return the baseline that the detector is."""
        is_entropy = statistic == "mean" if self.quantity == "auto" else self.quantity == "entropy"
        return VectorisedBaseline(
            domain="log",
            sides="down" if is_entropy else "up",
            k=self.k,
            threshold=self.threshold,
            memory=self.memory,
            warmup=self.warmup,
            settle_after=self.settle_after,
            minimum=-math.inf if is_entropy else self.minimum,
            peaks=False,
        )
