"""Mixtures of experts whose router sends the tokens to few, nearly all to one, or leaves some without any."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Explanation, Scores, State
from sentinel.detect.vectorised import MAX_COUNT, PATIENCE, VectorisedBaseline, VectorisedLimit
from sentinel.detect.vectorised_detector import VectorisedDetector
from sentinel.errors import ConfigError

EARLY, MOST = 8, 0.5
"""Points after which this share of the experts without tokens is anomalous whatever the reference; a router that begins with
more idle experts than half of that is judged by its own past alone. Earlier, or a smaller share, reports routers that are
still being learned; later, or a larger one, waits while most experts get nothing."""


class ExpertImbalance(VectorisedDetector, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A router that collapses: its rows `M:balance` leave the range they have kept, upwards.

    balance = E * sum((p - 1/E)**2) over the loads p of E experts, the squared coefficient of variation: 0 where all have
    as much, E / k - 1 where k experts have everything. Judged in logarithms against a reference that remembers some
    hundred steps: imbalance that aux losses bring down, or that the data bring and take, is followed.

    Source: Megatron-LM's tensor metrics (load imbalance); Shazeer et al. (2017), section 4, CV(load)**2; Fedus et al.,
    Switch Transformer (2021): past a capacity factor of 1.25 tokens are dropped.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="a router that sends the tokens to few experts: the squared variation of their loads multiplies",
        phrase="the router collapses onto few experts: the others stop learning (aux loss, z-loss)",
        statistics=("mean",),
        is_vectorised=True,
    )

    threshold: float = 2.0
    """How often over the imbalance may grow in the reference's memory, less one. Smaller: routers that settle are reported;
    larger: a router that collapses slowly is found late."""
    minimum: float = 0.5
    """An imbalance below this is never anomalous: the coefficient of variation is 0.7, a most loaded expert has about twice
    the mean; healthy tiny mixtures begin with half of it."""
    k: float = 10.0
    """Mean absolute log residuals that are still normal."""
    memory: float = 100.0
    """Points that the reference remembers."""
    warmup: int = 30
    """Points learned before any is judged."""
    settle_after: int = 50
    """Consecutive flagged points that make the new level the normal one; 0: never."""

    def vectorised(self, statistic: str) -> VectorisedBaseline:
        """Return the baseline that the detector is."""
        return VectorisedBaseline(
            domain="log",
            sides="up",
            k=self.k,
            threshold=self.threshold,
            minimum=self.minimum,
            memory=self.memory,
            warmup=self.warmup,
            settle_after=self.settle_after,
            peaks=False,
        )


class DominantExpert(VectorisedDetector, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An expert that comes to get nearly every token: the largest share of rows `M:load`, of the tokens that each gets.

    A share of 1 means that the router chooses no longer, however many experts a token has, and also where the others still
    share what is left (a second choice), so that none is idle and the balance only doubles. It is absolute: it reports a
    router that collapsed before rules with a baseline judge it. But it must last, for young routers go through this and come
    back.

    Source: expert collapse: Shazeer et al. (2017), section 4; Chi et al. (2022).
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="a router that sends nearly every token to one expert, after steps in which it did not",
        phrase="the router sends nearly every token to one expert: the others hardly learn (aux loss, z-loss)",
        statistics=("max",),
        is_limit=True,
        is_vectorised=True,
    )

    limit: float = 0.98
    """Largest share of the tokens that one expert may get, in (0, 1). Smaller: a mixture with a favourite expert is
    reported; larger: a router that still sends a few tokens elsewhere is not."""
    lasting: int = 200
    """Points in a row past the limit that are anomalous; more than twice the 76 for which healthy young mixtures of 4 to 16
    experts stayed past it."""
    after: int = 8
    """Points within the limit that a router must have had before. Smaller: a router that begins with one expert is reported;
    larger: one that collapses early is not."""

    def __post_init__(self) -> None:
        if not 0 < self.limit < 1:
            raise ConfigError(f"limit must be in (0, 1), got {self.limit}")
        super().__post_init__()

    def vectorised(self, statistic: str) -> VectorisedLimit:
        """Return the limit that the detector is."""
        return VectorisedLimit(above=self.limit, lasting=self.lasting, after=self.after)


class DeadExpert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts that get no token any more: rows `M:inactive`, the share of experts without tokens in a step.

    Two cases. One expert of many: after steps in which each had tokens, some expert has none for
    `lasting` steps in a row, and for four times as many as ever before. Many at once: the share leaves the range it has
    kept by more than `share`. A router with more experts than tokens, where some are always idle, is judged in the second
    way alone.

    The row does not say which expert it is: the vector `load` does (`sentinel export --vectors`), and its own gradients
    where experts are modules of their own (rule `dead-gradient`).

    Source: inactive experts are a metric of Megatron-LM; expert collapse: Shazeer et al. (2017), Chi et al. (2022).
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="experts that get no token any more: one for many steps, or many at once",
        phrase="experts without tokens do not learn: the router has given them up (aux loss, bias update)",
        statistics=("mean",),
    )

    lasting: int = 20
    """Points in a row with an expert that has no token; as many as the steps without an anomaly after which an episode
    ends."""
    share: float = 0.25
    """Rise of the share of experts without tokens that is anomalous at once. Smaller: one expert of a few that pauses for a
    step is reported; larger: experts that die together wait for `lasting`."""
    after: int = 20
    """Points seen before any is judged; half of the experts at once are after 8 already, the first time that
    they are."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be in (0, 1], got {self.share}")
        for name in ("lasting", "after"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise ConfigError(f"{name} must be in [1, {MAX_COUNT}], got {getattr(self, name)}")

    def state(self, num_series: int) -> State:
        """Return the state of new series, 22 bytes each."""
        names = ("usual", "spread", "peak")
        counts = ("streak", "longest", "age", "count")
        state: State = {name: np.zeros(num_series, dtype=np.float32) for name in names}
        state |= {name: np.zeros(num_series, dtype=np.int16) for name in counts}
        return state | {name: np.zeros(num_series, dtype=bool) for name in ("went", "came_back")}

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Score the larger of both: steps in a row / those needed, rise / what is normal."""
        values, usable = np.clip(values, 0.0, 1.0), np.isfinite(values)
        idle = usable & (values > 0.0) & (state["age"] >= self.after)
        needed = np.maximum(self.lasting, PATIENCE * state["longest"].astype(np.int64))
        one = np.where(idle, (state["streak"] + 1.0) / needed, 0.0)
        usual = state["usual"].astype(np.float64)
        rise = np.where(usable, values - usual, 0.0)
        many = np.where(state["count"] >= self.after, np.maximum(rise, 0.0) / self._normal(state), 0.0)
        is_young = usable & (state["count"] >= EARLY) & (state["count"] < self.after) & (usual <= 0.5 * MOST)
        # What a young router came back from once is no collapse when it does so again.
        is_young &= ~state["came_back"]
        many = np.where(is_young & (values >= MOST), values / MOST, many)

        def explain() -> Explanation:
            return np.where(state["count"] > 0, usual, np.nan), {"direction": (rise > 0).astype(np.int8)}

        return Scores(np.minimum(np.maximum(one, many), 1e6), explain)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Follow the usual share, and count steps in which some expert had no token; flagged points move neither."""
        values, usable = np.clip(values, 0.0, 1.0), np.isfinite(values)
        idle, busy = usable & (values > 0.0), usable & (values <= 0.0)
        ended = busy & (state["streak"] > 0)
        lived = ended & (state["age"] > 0)
        state["longest"][lived] = np.maximum(state["longest"][lived], state["streak"][lived])
        state["streak"][busy] = 0
        state["streak"][idle] = np.minimum(state["streak"][idle] + 1, MAX_COUNT)
        state["age"][busy & (state["age"] < self.after)] += 1
        take = usable & ~anomalous
        state["came_back"] |= state["went"] & usable & (values < MOST)
        state["went"] |= usable & (values >= MOST) & (state["count"] >= EARLY)
        rate = np.maximum(1.0 / (state["count"] + 1.0), 0.05)
        change = values - state["usual"].astype(np.float64)
        # The first points say where the share lives; later ones move it, one outlier hardly.
        size = np.where(state["count"] >= self.after, np.minimum(np.abs(change), self.share), np.abs(change))
        peak = np.maximum(state["peak"] * 0.995, np.where(state["count"] >= self.after, size, 0.0))
        np.copyto(state["usual"], state["usual"] + rate * np.copysign(size, change), casting="same_kind", where=take)
        np.copyto(state["spread"], state["spread"] + 0.3 * rate * (size - state["spread"]), casting="same_kind", where=take)
        np.copyto(state["peak"], peak, casting="same_kind", where=take)
        state["count"][take & (state["count"] < self.after + 100)] += 1

    def _normal(self, state: State) -> np.ndarray:
        """Return the rise that scores 1.0."""
        normal = np.maximum(10.0 * state["spread"].astype(np.float64), 1.5 * state["peak"].astype(np.float64))
        return np.maximum(normal, self.share)
