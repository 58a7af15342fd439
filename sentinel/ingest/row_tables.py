"""Small things that a layout and a step are made with: lookups in tables, rows put together, modules that communicate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sentinel.messages import Descriptor
from sentinel.record import ROW_DTYPE


def coupled_modules(descriptor: Descriptor) -> set[tuple[int, str]]:
    """Return (chunk, local name) of the modules that hold weights cut over tensor or context ranks, below them or in them.

    Such a module exchanges data with its group in forward, in backward, or in both.
    """
    place = descriptor.place
    cut = {axis for axis in ("tp", "cp") if place.size(axis) > 1}
    found: set[tuple[int, str]] = set()
    if not cut:
        return found
    for tensor in descriptor.tensors:
        if tensor.kind in ("param", "wgrad") and any(tensor.placements.get(axis) == "shard" for axis in cut):
            module = tensor.name.rpartition(".")[0]
            while (tensor.chunk, module) not in found:
                found.add((tensor.chunk, module))
                module = module.rpartition(".")[0]
    return found


def table_of(ids: npt.NDArray[np.int64], values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return a table that has each value at its id, -1 elsewhere; of an id that is there twice the last."""
    table = np.full(int(ids.max(initial=-1)) + 1, -1, np.int32)
    table[ids] = values
    return table


def holds_any(stats: npt.NDArray[np.void]) -> npt.NDArray[np.bool_] | None:
    """Return which statistics are of any element, finite or not; None where all are. [rows] bool.

    What a module is called with may be nothing (an expert without tokens): that is no zero, it is not there.
    """
    count = stats["count"]
    if count.all():
        return None
    return np.asarray((count | stats["num_nan"] | stats["num_pos_inf"] | stats["num_neg_inf"]) != 0)


def is_bad_row(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows hold a non-finite value: [rows]."""
    return np.asarray((rows["num_nan"] | rows["num_pos_inf"] | rows["num_neg_inf"]) != 0)


def look_up(table: npt.NDArray[np.int32] | None, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """Return what a table has for each id; -1 for ids that it does not have, or where there is no table."""
    found = np.full(len(ids), -1, np.int32)
    if table is not None:
        known = ids < len(table)
        found[known] = table[ids[known]]
    return found


def joined(rows: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Return the rows one behind the other. As bytes: numpy copies records field by field."""
    if len(rows) == 1 and rows[0].dtype == ROW_DTYPE:
        only = rows[0].view()
        only.flags.writeable = False
        return only
    return np.frombuffer(b"".join([np.ascontiguousarray(one).view(np.uint8).data for one in rows if len(one)]), ROW_DTYPE)
