"""OwnRowIndex: what each rank measured itself of some tensors, found among the rows of a step in one pass."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.row_tables import holds_any, look_up
from sentinel.moments import Moments
from sentinel.record import ROW_DTYPE, STATS_DTYPE

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
        self.index = quantity[self._order]
        """[entries] the quantity: index of the tensor, or IN_ALL; rising."""
        self.rank = rank_of[self._order]
        """[entries] ranks of one quantity rise."""

    def values(self, view: ClosedStep, statistic: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return a statistic of what each entry measured in a step, and of how many rows that hold any element: [entries]
        each. NaN: there is no such row, or one holds what is not finite."""
        values, num_rows = np.full(len(self.index), np.nan), np.zeros(len(self.index), np.int64)
        parts = view.carrying(self._kinds).parts
        for at in range(0, len(parts), BLOCK_RANKS):
            self._take(parts[at : at + BLOCK_RANKS], statistic, values, num_rows)
        return values[self._order], num_rows[self._order]

    def _take(
        self, parts: Sequence[RankStep], statistic: str, values: npt.NDArray[np.float64], num_rows: npt.NDArray[np.int64]
    ) -> None:
        """Find what some ranks measured. values, num_rows: [entries], rank by rank, where it is put."""
        places = [self._place.get(part.rank, (_NOBODY, 0, 0)) for part in parts]
        nums = np.array([num for _, _, num in places], np.int64)
        offsets = np.cumsum(nums) - nums
        stats, number, counts = self._rows_of(parts, [table for table, _, _ in places])
        entry = number + np.repeat(offsets, counts)
        some = holds_any(stats)
        if some is not None:
            stats, entry = stats[some], entry[some]
        num_here = np.bincount(entry, minlength=int(nums.sum()))
        is_several = bool((num_here > 1).any())
        moments = Moments.merge_groups(stats, entry, len(num_here)) if is_several else Moments(stats)
        found = np.array(moments.statistic(statistic), np.float64)
        found[(moments.stats["num_nan"] + moments.stats["num_pos_inf"] + moments.stats["num_neg_inf"]) > 0] = np.nan
        if not is_several:
            found, measured = np.full(len(num_here), np.nan), found
            found[entry] = measured
        to = np.repeat(np.array([begin for _, begin, _ in places], np.int64) - offsets, nums) + np.arange(len(num_here))
        values[to], num_rows[to] = found, num_here

    @staticmethod
    def _rows_of(
        parts: Sequence[RankStep], tables: Sequence[npt.NDArray[np.int32]]
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the statistics of the rows that are looked at, in their order, which of its rank's quantities each is of,
        and how many there are of each rank."""
        if native.take_rows is None or any(part.rows.dtype != ROW_DTYPE for part in parts):
            numbers = [look_up(table, part.rows["tensor"]) for part, table in zip(parts, tables, strict=True)]
            every = [part.rows[number >= 0] for part, number in zip(parts, numbers, strict=True)]
            counts = np.array([len(rows) for rows in every], np.int64)
            stats = np.empty(int(counts.sum()), STATS_DTYPE)
            for name in STATS_DTYPE.names or ():
                stats[name] = np.concatenate([rows[name] for rows in every])
            return stats, np.concatenate([number[number >= 0] for number in numbers]), counts
        words: list[int] = []
        for part, table in zip(parts, tables, strict=True):
            rows = part.rows
            words += (rows.ctypes.data, len(rows), rows.strides[0], table.ctypes.data, 0, len(table), part.rank)
        return native.take_rows(struct.pack(f"{len(words)}q", *words), len(parts), sum(len(part.rows) for part in parts))
