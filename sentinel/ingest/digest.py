"""What the rows of one step come to: merged to logical tensors, and which are odd. In C, or in numpy alike."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.row_tables import holds_any
from sentinel.record import ROW_DTYPE, STATS_DTYPE

if TYPE_CHECKING:
    from sentinel.ingest.merge import ClosedStep


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

    def without(self, is_cut: npt.NDArray[np.bool_]) -> Digest:
        """Return it without the tensors of which rows were lost, [num_tensors]; that one is bad stays."""
        stats = self.stats.copy()
        stats[is_cut] = _NOTHING
        return self._replace(stats=stats, present=self.present & ~is_cut)


def digest(view: ClosedStep) -> Digest:
    """Return what the rows of a step come to."""
    layout = view.layout
    if layout.digest_rows is None:
        return digest_in_numpy(view)
    words: list[int] = []
    for part in view.parts:
        rows = part.rows
        if rows.dtype != ROW_DTYPE:
            return digest_in_numpy(view)
        words += (rows.ctypes.data, len(rows), rows.strides[0], *layout.tables_of(part.rank), part.rank)
    return _of_any(Digest(*layout.digest_rows(struct.pack(f"{len(words)}q", *words), len(view.parts), view.num_rows)))


def digest_in_numpy(view: ClosedStep) -> Digest:
    """As `digest`."""
    layout, rows, num_tensors = view.layout, view.rows, len(view.tensors)
    copies, logical, nobody = view.row_copy, view.row_logical, layout.num_copies
    reporting = np.where(layout.is_left_out[logical], nobody, copies) if len(layout.is_left_out) else copies
    counted_rank = np.empty(nobody + 1, np.int32)
    # Ranks rise along the rows: written backwards, the lowest is the last to be written.
    counted_rank[reporting[::-1]] = view.row_rank[::-1]
    counted = (reporting < nobody) & (counted_rank[reporting] == view.row_rank)
    present, is_bad = np.zeros(num_tensors, np.bool_), np.zeros(num_tensors, np.bool_)
    present[logical[counted]] = True
    bad_rows = np.flatnonzero((rows["num_nan"] | rows["num_pos_inf"] | rows["num_neg_inf"]) != 0)
    bad_logical = logical[bad_rows]
    is_bad[bad_logical[bad_logical >= 0]] = True
    checksum, one_of = rows["checksum"], np.zeros(nobody + 1, np.uint64)
    one_of[copies] = checksum
    odd = layout.is_replicated[copies] & (checksum != one_of[copies])
    stats = native.merge_rows(rows, np.where(counted, logical, -1), num_tensors)
    return _of_any(Digest(stats, present, is_bad, bad_rows, np.unique(copies[odd]).astype(np.int64)))


def _of_any(found: Digest) -> Digest:
    """Return it with only those tensors present that hold any element."""
    some = holds_any(found.stats)
    return found if some is None else found._replace(present=found.present & (some | found.is_bad))
