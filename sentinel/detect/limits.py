"""Threshold and PrecisionLoss: absolute limits, without a baseline."""

from __future__ import annotations

import math
from typing import ClassVar

from sentinel.detect.declaration import Declaration
from sentinel.detect.vectorised import VectorisedLimit
from sentinel.detect.vectorised_detector import VectorisedDetector
from sentinel.errors import ConfigError


class Threshold(VectorisedDetector, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any statistic, or a logged value, past a limit that you set."""

    declares: ClassVar[Declaration] = Declaration(
        summary="any statistic past an absolute limit, above or below, for as many points as you say",
        is_limit=True,
        is_vectorised=True,
    )

    above: float | None = None
    """A value above this is anomalous; null: no upper limit."""
    below: float | None = None
    """A value below this is anomalous; null: no lower limit. One of the two is needed."""
    lasting: int = 1
    """Points in a row past the limit, the newest included, that are anomalous."""
    after: int = 0
    """Points within the limits that a series must have had before; 0: it may begin past them."""

    def __post_init__(self) -> None:
        if self.above is None and self.below is None:
            raise ConfigError("above or below is needed: a Threshold without a limit never fires")
        super().__post_init__()

    def vectorised(self, statistic: str) -> VectorisedLimit:
        """Return the limit that the detector is."""
        return VectorisedLimit(
            above=math.inf if self.above is None else self.above,
            below=-math.inf if self.below is None else self.below,
            lasting=self.lasting,
            after=self.after,
        )


class PrecisionLoss(VectorisedDetector, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values that a format of low precision cannot hold: the shares (and the dynamic range) of kind `precision`.

    One element that overflows is an infinity in that format, so the default limit is none at all, and one point is
    enough. Of underflow some is normal: say a limit and let it last.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2: what becomes zero in fp16 must be few of the
    gradients that matter; TransformerEngine's debug statistics (underflows%, overflows%, dynamic_range).
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="a share of a tensor that a low-precision format would lose, or more powers of two than it has",
        phrase="this format cannot hold the tensor: check its scale (loss scale, amax), or keep it wider",
        statistics=("mean",),
        is_limit=True,
        is_vectorised=True,
    )

    limit: float = 0.0
    """Largest share that is normal, in [0, 1]; of `dynamic_range` the powers of two that the format spans (fp16 40, bf16
    261, fp8_e4m3 18, fp8_e5m2 32)."""
    lasting: int = 1
    """Points in a row past the limit that are anomalous."""
    after: int = 0
    """Points within the limit that a series must have had before; 0: what a format never held is reported too."""

    def __post_init__(self) -> None:
        if not self.limit >= 0:
            raise ConfigError(f"limit must not be negative, got {self.limit}")
        super().__post_init__()

    def vectorised(self, statistic: str) -> VectorisedLimit:
        """Return the limit that the detector is."""
        return VectorisedLimit(above=self.limit, lasting=self.lasting, after=self.after)
