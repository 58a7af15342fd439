"""DuplicateRanks: ranks that ought to work on data of their own, and measure the same number to the last bit."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.group import Points, StepPoints
from sentinel.errors import ConfigError

PATIENCE = 4
"""Times a coincidence must outlast the longest one before it, as VectorisedStillness's."""
JITTER = -0.25
"""Correlation of successive changes below which a number moves as data do: halfway between -0.5, where each value is drawn
anew, and 0, of a random walk; what training moves, as a learned position, is above 0."""
_RATE = 0.03


class DuplicateRanks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data-parallel ranks whose loss, activation or unreduced gradient is the same to the last bit: they read the same data.

    Two batches never give a float64 of thousands of elements twice. After steps in which a rank's number was nobody else's:
    anomalous once it is a peer's for `lasting` steps, and for four times as many as ever before (losses that are logged with
    few digits meet now and then); what the rank measured itself is written down (`info`) at the first.

    From the first step on: reported after `from_start` steps, of what the rank measured itself alone (a logged loss may be
    the mean over all), and only where it moves as data do: the correlation of successive changes is below -1/4, which is
    -1/2 for values drawn anew and 0 and more for what training moves, so that a learned position is no duplicate. Ranks that
    differ on another axis than the data-parallel one are not compared.

    Source: bit-equality of moments over disjoint batches has probability zero; a sampler that is not given its rank is the
    classic cause (torch.utils.data.distributed.DistributedSampler left out). First differences of white noise correlate
    with -1/2: Box & Jenkins, Time Series Analysis (1970).
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="data-parallel ranks whose numbers are equal to the last bit: they read the same data",
        statistics=("rms",),
        over="peers",
        takes_all=True,
        max_sites=8,
    )
    """Sites of a model that are looked at: one would do, if it depends on the data."""

    lasting: int = 3
    """Steps in a row that make it no coincidence."""
    from_start: int = 50
    """Steps in a row, from the first on, after which ranks that never differed are reported; 50 changes are enough to tell
    numbers that the data move from numbers that training moves."""
    after: int = 20
    """Steps in which a rank's number was nobody else's, before it is judged by `lasting`."""

    def __post_init__(self) -> None:
        for name in ("lasting", "from_start", "after"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def state(self, num_members: int) -> State:
        """Return 56 bytes a rank and quantity."""
        return {
            "age": np.zeros(num_members, dtype=np.int64),
            "streak": np.zeros(num_members, dtype=np.int64),
            "longest": np.zeros(num_members, dtype=np.int64),
            "last": np.full(num_members, np.nan),
            "change": np.full(num_members, np.nan),
            "product": np.zeros(num_members),
            "square": np.zeros(num_members),
        }

    def score(self, points: Points, group: np.ndarray, state: State) -> Scores:
        """Score steps in a row as a duplicate / those needed; 0.0 for what is nobody else's, zero or not finite."""
        is_duplicate, first = _duplicates(points["value"], group)
        if isinstance(points, StepPoints):
            points.made = is_duplicate, first
        run, is_own = state["streak"] + 1.0, points["is_own"]
        is_proven = state["age"] >= self.after
        proven = run / np.maximum(self.lasting, PATIENCE * state["longest"])
        moves_as_data = state["product"] < JITTER * state["square"]
        unproven = np.where(is_own & (state["age"] == 0) & moves_as_data, run / self.from_start, 0.0)
        score = np.where(is_duplicate, np.where(is_proven, proven, unproven), 0.0)
        is_out = is_duplicate & is_proven
        alone = np.where(is_out & is_own & (state["longest"] == 0), 1.0, 0.0)
        return Scores.of(
            score, points["value"],
            is_sure=np.zeros(len(score), dtype=bool), is_out=is_out, alone=alone, first=first,
        )  # fmt: skip

    def learn(self, points: Points, group: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Count the steps with and without a duplicate; follow how a number moves. What is not finite counts for nothing."""
        value = points["value"]
        made = points.made if isinstance(points, StepPoints) else None
        is_duplicate, _ = made or _duplicates(value, group)
        known = np.isfinite(value) & (value != 0.0) & (np.bincount(group)[group] > 1)
        ended = known & ~is_duplicate
        lived = ended & (state["age"] > 0)
        state["longest"] = np.where(lived, np.maximum(state["longest"], state["streak"]), state["longest"])
        state["streak"] = np.where(ended, 0, state["streak"] + (known & is_duplicate))
        state["age"] = np.where(ended, np.minimum(state["age"] + 1, self.after), state["age"])
        change = np.clip(value - state["last"], -1e150, 1e150)
        product, square = change * state["change"], change * change
        both = known & np.isfinite(product)
        np.copyto(state["product"], state["product"] + _RATE * (product - state["product"]), where=both)
        np.copyto(state["square"], state["square"] + _RATE * (square - state["square"]), where=both)
        np.copyto(state["change"], change, where=known)
        np.copyto(state["last"], value, where=known)


def _duplicates(value: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [members] each: whether another of its group has the same value, and the position of the first that has."""
    usable = np.isfinite(value) & (value != 0.0)
    order = np.lexsort((np.arange(len(value)), np.where(usable, value, np.nan), group))
    starts = np.ones(len(order), dtype=bool)
    ordered, of = value[order], group[order]
    starts[1:] = (ordered[1:] != ordered[:-1]) | (of[1:] != of[:-1]) | ~usable[order][1:]
    number = np.cumsum(starts) - 1
    size, first = np.bincount(number), order[np.flatnonzero(starts)]
    is_duplicate, leads = np.zeros(len(value), dtype=bool), np.arange(len(value))
    is_duplicate[order], leads[order] = size[number] > 1, first[number]
    return is_duplicate, leads
