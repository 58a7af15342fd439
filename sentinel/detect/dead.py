"""DeadTensor: gradients that became all zero, and weights that changed and then stand still."""

from __future__ import annotations

from typing import ClassVar

from sentinel.detect.declaration import Declaration
from sentinel.detect.vectorised import VectorisedStillness
from sentinel.detect.vectorised_detector import VectorisedDetector


class DeadTensor(VectorisedDetector, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor that changed, and then is exactly zero, or exactly its last value, step after step.

    A norm that is exactly 0.0 for `zero_steps` points in a row, or exactly repeated for `unchanged_steps` while others of
    the rule move (when nothing moves, no optimizer stepped). What was still for some points before and went on (an expert
    without tokens, weights in bf16 whose updates round to nothing) needs four times as many. What never changed is not
    judged: a frozen weight, a bias that begins at zero and stays there.

    Source: dying ReLU units pass no gradient (Lu et al., "Dying ReLU and Initialization", 2019); a weight that no optimizer
    holds, or whose state is lost, stays as it is.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="a gradient all zero, or a weight that stands still while others move, after a life of change",
        phrase="nothing reaches it any more: its path is cut, its units are dead, or no optimizer steps it",
        is_vectorised=True,
    )

    zero_steps: int = 3
    """Points in a row that are exactly zero; the least that is no chance: a lone point proves nothing, three in a row do."""
    unchanged_steps: int = 10
    """Points in a row that repeat exactly. Smaller: weights in bf16 at a low learning rate are reported, which repeat for a
    few; larger: a tensor that is no longer trained is found later."""
    after: int = 20
    """Points that changed, seen before any stillness is judged."""

    def vectorised(self, statistic: str) -> VectorisedStillness:
        """Return the stillness that the detector looks for."""
        return VectorisedStillness(zero_steps=self.zero_steps, unchanged_steps=self.unchanged_steps, after=self.after)
