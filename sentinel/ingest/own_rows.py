"""OwnRowIndex: what each rank measured itself of some tensors, found among the rows of a step in one pass."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.row_tables import holds_any, look_up
from sentinel.moments import EMPTY, Moments
from sentinel.record import ROW_DTYPE, STATS_DTYPE

if TYPE_CHECKING:
    from sentinel.ingest.merge import ClosedStep
    from sentinel.ingest.model_layout import ModelLayout

IN_ALL = -1
"""Quantity of the tensors that are taken as one on each rank."""


class OwnRowIndex:
    """Which rows of a layout are looked at, rank by rank; made once, asked every step.

    An entry is one rank's part of one quantity: a logical tensor, or all those that are taken as one.
    """

    def __init__(self, layout: ModelLayout, watched: npt.NDArray[np.bool_], is_in_all: npt.NDArray[np.bool_]) -> None:
        """watched: [tensors] which are looked at; is_in_all: [tensors] which of those are one quantity, `IN_ALL`."""
        self._kinds = frozenset(layout.kinds[watched].tolist())
        quantity_of = np.where(is_in_all, IN_ALL, np.arange(len(watched)))
        # Ranks with the same table hold the same quantities.
        held: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.int64]]] = {}
        for rank in layout.places:
            logical = layout.table_of(rank)
            if id(logical) not in held:
                taken = (logical >= 0) & watched[logical] if len(watched) else np.zeros(len(logical), np.bool_)
                held[id(logical)] = logical, taken, quantity_of[logical[taken]]
        num_ranks = max(layout.places, default=0) + 1
        own = {rank: (held[id(layout.table_of(rank))][2] - IN_ALL) * num_ranks + rank for rank in layout.places}
        entries = np.unique(np.concatenate([np.empty(0, np.int64), *own.values()]))
        self.index = entries // num_ranks + IN_ALL
        """[entries] the quantity: index of the tensor, or IN_ALL; rising."""
        self.rank = entries % num_ranks
        """[entries] ranks of one quantity rise."""
        self._tables: dict[int, npt.NDArray[np.int32]] = {}
        for rank, codes in own.items():
            logical, taken, _ = held[id(layout.table_of(rank))]
            table = np.full(len(logical), -1, np.int32)
            table[taken] = np.searchsorted(entries, codes)
            self._tables[rank] = table
        self._places = {rank: (table.ctypes.data, 0, len(table)) for rank, table in self._tables.items()}
        self._room = 2 * len(entries)

    def take(self, view: ClosedStep) -> tuple[Moments, npt.NDArray[np.int64]]:
        """Return what each entry measured in a step, and of how many rows that hold any element: [entries] each."""
        stats, entry = self._rows_of(view.carrying(self._kinds))
        some = holds_any(stats)
        if some is not None:
            stats, entry = stats[some], entry[some]
        num_rows = np.bincount(entry, minlength=len(self.index))
        if len(entry) and num_rows.max() > 1:
            return Moments.merge_groups(stats, entry, len(self.index)), num_rows
        merged = np.full(len(self.index), EMPTY)
        merged[entry] = stats
        return Moments(merged), num_rows

    def _rows_of(self, view: ClosedStep) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32]]:
        """Return the statistics of the rows that are looked at, in their order, and the entry of each."""
        if native.take_rows is None or any(part.rows.dtype != ROW_DTYPE for part in view.parts):
            none = np.empty(0, np.int32)
            tables = [look_up(self._tables.get(part.rank), part.rows["tensor"]) for part in view.parts]
            entry = np.concatenate([none, *tables])
            rows = view.rows[entry >= 0]
            stats = np.empty(len(rows), STATS_DTYPE)
            for name in STATS_DTYPE.names or ():
                stats[name] = rows[name]
            return stats, entry[entry >= 0]
        words: list[int] = []
        for part in view.parts:
            rows = part.rows
            words += (rows.ctypes.data, len(rows), rows.strides[0], *self._places.get(part.rank, (0, 0, 0)), part.rank)
        packed = struct.pack(f"{len(words)}q", *words)
        stats, entry, num = native.take_rows(packed, len(view.parts), self._room)
        if num > self._room:
            self._room = 2 * num
            stats, entry, num = native.take_rows(packed, len(view.parts), self._room)
        return stats[:num], entry[:num]
