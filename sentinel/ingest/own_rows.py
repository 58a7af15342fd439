"""OwnRowIndex: what each rank measured itself of some tensors, found among the rows of a step in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.row_tables import holds_any, look_up
from sentinel.moments import Moments
from sentinel.record import STATS_DTYPE

if TYPE_CHECKING:
    from sentinel.ingest.merge import ClosedStep
    from sentinel.ingest.model_layout import ModelLayout
    from sentinel.step_view import RankStep

IN_ALL = -1
"""Quantity of the tensors that are taken as one on each rank."""
BLOCK_RANKS = 32
"""Ranks whose rows are looked at together. Too small: calls cost more than values; too large: of thousands of ranks all rows
are fetched from memory for each of their fields, and not from a cache."""
_NOBODY = np.empty(0, np.int32)


class OwnRowIndex:
    """Which rows of a layout are looked at, rank by rank; made once, asked every step.

    An entry is one rank's part of one quantity: a logical tensor, or all those that are taken as one.
    """

    def __init__(self, layout: ModelLayout, watched: npt.NDArray[np.bool_], is_in_all: npt.NDArray[np.bool_]) -> None:
        """watched: [tensors] which are looked at; is_in_all: [tensors] which of those are one quantity, `IN_ALL`."""
        self._kinds = frozenset(layout.kinds[watched].tolist())
        quantity_of = np.where(is_in_all, IN_ALL, np.arange(len(watched)))
        ranks = sorted(layout.places)
        # Ranks with the same table of tensors hold the same quantities: (theirs, rising; id -> which of them).
        held: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]] = {}
        for rank in ranks:
            logical = layout.table_of(rank)
            if id(logical) not in held:
                taken = (logical >= 0) & watched[logical] if len(watched) else np.zeros(len(logical), np.bool_)
                own, number = np.unique(quantity_of[logical[taken]], return_inverse=True)
                table = np.full(len(logical), -1, np.int32)
                table[taken] = number.reshape(-1)
                held[id(logical)] = own.astype(np.int64), table
        own_of = {rank: held[id(layout.table_of(rank))] for rank in ranks}
        nums = np.array([len(own) for own, _ in own_of.values()], np.int64)
        begins = (np.cumsum(nums) - nums).tolist()
        self._place = {
            rank: (table, begin, len(own)) for (rank, (own, table)), begin in zip(own_of.items(), begins, strict=True)
        }
        """Rank -> (id -> which of its quantities, -1: none; where these begin, rank by rank; how many they are)."""
        quantity = np.concatenate([np.empty(0, np.int64), *(own for own, _ in own_of.values())])
        rank_of = np.repeat(np.array(ranks, np.int64), nums)
        self._order = np.argsort(quantity, kind="stable")
        """[entries] the place of each among the entries rank by rank."""
        self._to_order = np.empty_like(self._order)
        self._to_order[self._order] = np.arange(len(self._order))
        """The other way round."""
        self.index = quantity[self._order]
        """[entries] the quantity: index of the tensor, or IN_ALL; rising."""
        self.rank = rank_of[self._order]
        """[entries] ranks of one quantity rise."""

        self._newest: _Ranks | None = None

    def values(self, view: ClosedStep, statistic: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return a statistic of what each entry measured in a step, and of how many rows that hold any element: [entries]
        each. NaN: there is no such row, or one holds what is not finite."""
        of = view.carrying(self._kinds)
        ranks = self._ranks_of(of.parts)
        if statistic == "rms" and native.take_rms is not None and of.row_words is not None:
            words = np.concatenate([of.row_words, ranks.words], axis=1)
            words[:, -1] = ranks.begins
            measured = native.take_rms(words.tobytes(), len(words), self._to_order)
            if measured is not None:
                return measured
        values, num_rows = np.full(len(self.index), np.nan), np.zeros(len(self.index), np.int64)
        for at in range(0, len(of.parts), BLOCK_RANKS):
            block = slice(at, at + BLOCK_RANKS)
            nums, begins = ranks.nums[block], ranks.begins[block]
            offsets = np.cumsum(nums) - nums
            stats, number, counts = _rows_of(of, ranks, block)
            found, num_here = _measured(stats, number + np.repeat(offsets, counts), int(nums.sum()), statistic)
            to = np.repeat(begins - offsets, nums) + np.arange(len(num_here))
            values[to], num_rows[to] = found, num_here
        return values[self._order], num_rows[self._order]

    def _ranks_of(self, parts: Sequence[RankStep]) -> _Ranks:
        """Return where the entries of some ranks are; nearly always those of the step before."""
        ranks = tuple([part.rank for part in parts])
        if self._newest is None or self._newest.ranks != ranks:
            places = [self._place.get(rank, (_NOBODY, 0, 0)) for rank in ranks]
            words = [(table.ctypes.data, 0, len(table), rank) for rank, (table, _, _) in zip(ranks, places, strict=True)]
            self._newest = _Ranks(
                ranks, [table for table, _, _ in places], np.array(words, np.int64).reshape(-1, 4),
                np.array([num for _, _, num in places], np.int64), np.array([begin for _, begin, _ in places], np.int64),
            )  # fmt: skip
        return self._newest


class _Ranks(NamedTuple):
    """Of each of some ranks."""

    ranks: tuple[int, ...]
    tables: Sequence[npt.NDArray[np.int32]]
    """Id of a tensor -> which of its rank's quantities it is; -1: none."""
    words: npt.NDArray[np.int64]
    """[ranks, 4] of STEP_PART, behind those of the rows."""
    nums: npt.NDArray[np.int64]
    """Quantities of each."""
    begins: npt.NDArray[np.int64]
    """Where its entries begin, rank by rank."""


def _rows_of(
    view: ClosedStep, ranks: _Ranks, block: slice
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return the statistics of some ranks' rows that are looked at, in their order, which of its rank's quantities each is
    of, and how many there are of each rank."""
    if native.take_rows is not None and view.row_words is not None:
        words = np.concatenate([view.row_words[block], ranks.words[block]], axis=1)
        return native.take_rows(words.tobytes(), len(words), int(words[:, 1].sum()))
    every = [part.rows for part in view.parts[block]]
    numbers = [look_up(table, rows["tensor"]) for rows, table in zip(every, ranks.tables[block], strict=True)]
    looked_at = [rows[number >= 0] for rows, number in zip(every, numbers, strict=True)]
    stats = np.empty(sum(map(len, looked_at)), STATS_DTYPE)
    for name in STATS_DTYPE.names or ():
        stats[name] = np.concatenate([rows[name] for rows in looked_at])
    return stats, np.concatenate([number[number >= 0] for number in numbers]), np.array([*map(len, looked_at)], np.int64)


def _measured(
    stats: npt.NDArray[np.void], entry: npt.NDArray[Any], num_entries: int, statistic: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return a statistic of each entry's rows, and of how many that hold any element. entry: [rows] which each is of."""
    some = holds_any(stats)
    if some is not None:
        stats, entry = stats[some], entry[some]
    num_rows = np.bincount(entry, minlength=num_entries)
    is_several = bool((num_rows > 1).any())
    moments = Moments.merge_groups(stats, entry, num_entries) if is_several else Moments(stats)
    values, stats = np.array(moments.statistic(statistic), np.float64), moments.stats
    values[(stats["num_nan"] + stats["num_pos_inf"] + stats["num_neg_inf"]) > 0] = np.nan
    if is_several:
        return values, num_rows
    found = np.full(num_entries, np.nan)
    found[entry] = values
    return found, num_rows
