"""AnomalyTurbulence and KurtosisSpike: a statistic that leaves the range it has kept."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
import numpy as np

from sentinel.detect import msprobe
from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.vectorised import VectorisedBaseline, domain_of
from sentinel.errors import ConfigError


def _of_turbulence(detector: AnomalyTurbulence) -> Declaration:
    """The tool that `compat` names judges each rank by itself."""
    return msgspec.structs.replace(detector.declares, judges="own_rows") if detector.compat else detector.declares


class AnomalyTurbulence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statistic that jumps away from its own running baseline, upwards or downwards."""

    declares: ClassVar[Declaration] = Declaration(
        with_arguments=_of_turbulence,
        summary="a statistic that jumps away from its own running baseline, up or down",
        is_vectorised=True,
        is_fitted=True,
    )

    threshold: float = 1.0
    """Relative change that is always normal: 1.0 lets a norm double or halve. With `compat: msprobe` the threshold of
    its formula."""
    k: float = 10.0
    """Mean absolute residuals that are still normal: 10 are 8 sigma of a Gaussian. Smaller: the tails of healthy noise are
    reported; larger: a spike must stand further out."""
    warmup: int = 25
    """Points learned before any is judged."""
    settle_after: int = 20
    """Consecutive flagged points at a new level that make it the new normal; 0: never."""
    sides: Literal["both", "up", "down"] = "both"
    """Which way a jump counts."""
    domain: Literal["auto", "log", "linear"] = "auto"
    """Scale on which changes are compared; auto: linear for statistics that may be negative, else log."""
    common: bool = False
    """Take off what the median of the rule's series does in the step: a harder batch, a schedule; fewer than 4 have none."""
    compat: Literal["", "msprobe"] = ""
    """`msprobe`: exactly abs(x) > (1 + threshold) * history mean, an exponential mean (0.99) of abs(x) that begins with
    the first value and learns everything: flagged values, and NaN and infinities, which blind it for good."""

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ConfigError(f"threshold must not be negative, got {self.threshold}")
        self.vectorised("norm")

    def vectorised(self, statistic: str) -> VectorisedBaseline:
        """Return the baseline that the detector is, but for msProbe's mode."""
        return VectorisedBaseline(
            domain=domain_of(statistic) if self.domain == "auto" else self.domain,
            sides=self.sides,
            k=self.k,
            threshold=self.threshold,
            warmup=self.warmup,
            settle_after=self.settle_after,
            common=self.common,
        )

    def for_statistic(self, statistic: str) -> AnomalyTurbulence:
        """Return the detector with its domain decided for `statistic`."""
        return self if self.domain != "auto" else msgspec.structs.replace(self, domain=domain_of(statistic))

    def state(self, num_series: int) -> State:
        """Return the state of new series: 9 bytes each in msProbe's mode, else those of its baseline."""
        if self.compat:
            return msprobe.state(num_series)
        return self.vectorised("norm").state(num_series)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score one point a series; what is NaN or infinite scores 0.0 (that is for AnomalyNan to say)."""
        if self.compat:
            return msprobe.score(values, state, self.threshold)
        return self.vectorised("norm").score(values, state)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point of each series in; flagged ones count only towards a level shift, non-finite ones are left out."""
        if self.compat:
            msprobe.learn(values, state)
        else:
            self.vectorised("norm").learn(values, state, anomalous)


class KurtosisSpike(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution that grows outliers at once: its kurtosis jumps above its own running baseline.

    Overflow, bad batches and flipped bits show in the fourth moment before they show in a norm (trainscope calls it the
    kurtosis lead). Slow growth, as outlier features emerge, is followed.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="a distribution that grows outliers: kurtosis jumps above its own running baseline",
        statistics=("kurtosis",),
        is_vectorised=True,
    )

    threshold: float = 2.0
    """Relative growth that is always normal: 2.0 lets the kurtosis triple."""
    k: float = 12.0
    """Mean absolute log residuals that are still normal: 12 are 9.6 sigma of a Gaussian. Smaller: the tails of healthy noise
    are reported; larger: a spike must stand further out."""
    minimum: float = 20.0
    """A kurtosis below this is no spike, whatever it was before (a Gaussian has 3). Smaller: the tails that healthy training
    brings are reported; larger: the first outliers of a tensor are missed."""
    warmup: int = 25
    """Points learned before any is judged."""
    settle_after: int = 20
    """Consecutive flagged points at a new level that make it the new normal; 0: never."""

    def __post_init__(self) -> None:
        self.vectorised("kurtosis")

    def vectorised(self, statistic: str) -> VectorisedBaseline:
        """Return the baseline that the detector is."""
        return VectorisedBaseline(
            domain="log",
            sides="up",
            k=self.k,
            threshold=self.threshold,
            minimum=self.minimum,
            warmup=self.warmup,
            settle_after=self.settle_after,
        )

    def state(self, num_series: int) -> State:
        """Return the state of new series."""
        return self.vectorised("kurtosis").state(num_series)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score one kurtosis a series; undefined ones (NaN) score 0.0."""
        return self.vectorised("kurtosis").score(values, state)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point a series in."""
        self.vectorised("kurtosis").learn(values, state, anomalous)
