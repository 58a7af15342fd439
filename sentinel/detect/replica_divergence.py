"""ReplicaDivergence: copies of one tensor that are no longer the same, bit for bit."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.detect.group import Points


class ReplicaDivergence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies that must be bit-identical and are not: those that differ from what most hold are wrong.

    Where no value is held by more copies than any other, it is not known which is wrong: all are named, none is sure.
    """

    declares: ClassVar[Declaration] = Declaration(
        summary="copies of a weight, its gradient or optimizer state that are no longer the same, bit for bit",
        statistics=("checksum",),
        over="copies",
    )

    def state(self, num_members: int) -> State:
        """Return no arrays: copies are compared within one step."""
        return {}

    def score(self, points: Points, group: np.ndarray, state: State) -> Scores:
        """Score 1.0 for copies that differ from the most common one of their group, 0.0 for those; with ties 1.0 for all."""
        checksum = points["checksum"]
        order = np.lexsort((checksum, group))
        of_group, words = group[order], checksum[order]
        is_new = np.ones(len(order), dtype=bool)
        is_new[1:] = (of_group[1:] != of_group[:-1]) | (words[1:] != words[:-1])
        value = np.cumsum(is_new) - 1
        votes = np.bincount(value, minlength=1)
        _, number = np.unique(of_group, return_inverse=True)
        most = np.zeros(int(number.max()) + 1 if len(number) else 0, dtype=np.int64)
        np.maximum.at(most, number, votes[value])
        # A tie: two values of one group have the most votes.
        winners = np.bincount(number[is_new & (votes[value] == most[number])], minlength=len(most))
        is_tied = winners[number] > 1
        accused = is_tied | (votes[value] < most[number])
        score, is_sure = np.zeros(len(order)), np.zeros(len(order), dtype=bool)
        score[order] = accused
        is_sure[order] = ~is_tied
        return Scores.of(score, np.full(len(order), np.nan), is_sure=is_sure)

    def learn(self, points: Points, group: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Learn nothing."""
