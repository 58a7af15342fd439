"""What the rows of one step come to: merged to logical tensors, and which are odd. In C, or in numpy alike."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.row_tables import holds_any, joined
from sentinel.native.library import DigestRows
from sentinel.record import ROW_DTYPE, STATS_DTYPE
from sentinel.step_view import RankStep

_NOTHING = np.zeros((), STATS_DTYPE)
_NOTHING["min"], _NOTHING["max"] = np.inf, -np.inf


class Digest(NamedTuple):
    """One step. See the properties of `ClosedStep` of the same names."""

    stats: npt.NDArray[np.void]
    present: npt.NDArray[np.bool_]
    is_bad: npt.NDArray[np.bool_]
    bad_rows: npt.NDArray[np.int64]
    odd_copies: npt.NDArray[np.int64]
    """Numbers of replicated shards whose rows do not all have one checksum."""
    has_rows: npt.NDArray[np.bool_]
    """[num_copies] whether there is any row of the shard."""

    def without(self, is_cut: npt.NDArray[np.bool_]) -> Digest:
        """Return it without the tensors of which rows were lost, [num_tensors]; that one is bad stays."""
        stats = self.stats.copy()
        stats[is_cut] = _NOTHING
        return self._replace(stats=stats, present=self.present & ~is_cut)

    def of_any(self) -> Digest:
        """Return it with only those tensors present that hold any element."""
        some = holds_any(self.stats)
        return self if some is None else self._replace(present=self.present & (some | self.is_bad))


class RowTables(Protocol):
    """What the rows of some ranks stand for: the tensors and shards of a layout, or of what one machine holds of it."""

    num_copies: int
    """Distinct shards, copies taken as one."""
    is_left_out: npt.NDArray[np.bool_]
    """[num_tensors] whether it has no statistics of its own."""
    is_replicated: npt.NDArray[np.bool_]
    """[num_copies + 1] whether there are several of it."""

    @property
    def digest_rows(self) -> DigestRows | None:
        """What merges the rows of a step in C; None without the library."""

    def tables_of(self, rank: int) -> tuple[int, int, int]:
        """Return where a rank's tables of tensors and of copies lie in memory, and how long they are."""

    def logical_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the index of the tensor of each local id; -1 for ids that are not known."""

    def copies_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the number of the shard that each local id is a copy of; -1 for ids that are not known."""


def digest(parts: Sequence[RankStep], tables: RowTables) -> Digest:
    """Return what the rows of some ranks come to. parts: ranks rising."""
    if tables.digest_rows is None:
        return digest_in_numpy(parts, tables)
    words: list[int] = []
    num_rows = 0
    for part in parts:
        rows = part.rows
        if rows.dtype != ROW_DTYPE:
            return digest_in_numpy(parts, tables)
        num_rows += len(rows)
        words += (rows.ctypes.data, len(rows), rows.strides[0], *tables.tables_of(part.rank), part.rank)
    return Digest(*tables.digest_rows(struct.pack(f"{len(words)}q", *words), len(parts), num_rows))


def digest_in_numpy(parts: Sequence[RankStep], tables: RowTables) -> Digest:
    """As `digest`."""
    rows, num_tensors, nobody = joined([part.rows for part in parts]), len(tables.is_left_out), tables.num_copies
    none = np.empty(0, np.int32)
    logical = np.concatenate([none, *(tables.logical_of(part.rank, part.rows["tensor"]) for part in parts)])
    copies = np.concatenate([none, *(tables.copies_of(part.rank, part.rows["tensor"]) for part in parts)])
    copies = np.where(copies >= 0, copies, nobody)
    row_rank = np.repeat(np.array([part.rank for part in parts], np.int32), [len(part.rows) for part in parts])
    reporting = np.where(tables.is_left_out[logical], nobody, copies) if num_tensors else copies
    counted_rank = np.empty(nobody + 1, np.int32)
    # Ranks rise along the rows: written backwards, the lowest is the last to be written.
    counted_rank[reporting[::-1]] = row_rank[::-1]
    counted = (reporting < nobody) & (counted_rank[reporting] == row_rank)
    present, is_bad = np.zeros(num_tensors, np.bool_), np.zeros(num_tensors, np.bool_)
    present[logical[counted]] = True
    bad_rows = np.flatnonzero((rows["num_nan"] | rows["num_pos_inf"] | rows["num_neg_inf"]) != 0)
    bad_logical = logical[bad_rows]
    is_bad[bad_logical[bad_logical >= 0]] = True
    checksum, one_of = rows["checksum"], np.zeros(nobody + 1, np.uint64)
    one_of[copies] = checksum
    odd = tables.is_replicated[copies] & (checksum != one_of[copies])
    stats = native.merge_rows(rows, np.where(counted, logical, -1), num_tensors)
    has_rows = np.zeros(nobody + 1, np.bool_)
    has_rows[copies] = True
    return Digest(stats, present, is_bad, bad_rows, np.unique(copies[odd]).astype(np.int64), has_rows[:-1])
