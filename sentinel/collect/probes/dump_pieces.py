"""Where the piece that this rank holds lies in the whole tensor, so that dumps of all ranks can be joined offline."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sentinel.collect.parallel.placements import is_dtensor
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.dump import Piece
from sentinel.kinds import BACKWARD_KINDS, FORWARD_KINDS
from sentinel.place import Place
from sentinel.record import Kind

_STRETCH = re.compile(r"(\d+):(\d+)")
_CUT = re.compile(r"[^=,]+=(\d+)")


def piece_of(
    entry: TensorEntry, local: torch.Tensor, micro_step: int, place: Place, whole: Any, first_n: int | None
) -> Piece:
    """Return the description of `local`, this rank's piece of a tensor: name, whole shape, and where the piece begins.

    whole: the parameter that the tensor belongs to, a DTensor where it is cut; None: it belongs to none. first_n: indices
    kept of each dimension; None: all.
    """
    shape = tuple(entry.shape)
    start, flat, why = _where(entry, local, shape, place, whole)
    if first_n is not None and not why and (flat is not None or tuple(local.shape) != shape):
        start, flat, why = None, None, f"the first {first_n} of each dimension of a shard"
    elif first_n is not None and start is not None:
        shape = tuple(min(first_n, size) for size in shape)
    return Piece(
        kind=Kind(entry.kind).label, name=entry.name, chunk=entry.chunk, micro_step=micro_step, shape=shape, start=start,
        flat=flat, why_apart=why, placements=dict(entry.placements), part=entry.part,
    )  # fmt: skip


def _where(
    entry: TensorEntry, local: torch.Tensor, shape: tuple[int, ...], place: Place, whole: Any
) -> tuple[tuple[int, ...] | None, tuple[int, int] | None, str]:
    """Return (start of the box, stretch of the flattened whole, why neither is known)."""
    placements = entry.placements
    for word, why in (("unknown", "its placement is not known"), ("partial", "each rank holds a summand of it")):
        axes = [axis for axis, one in placements.items() if one == word]
        if axes:
            return None, None, f"{why} over {', '.join(axes)}"
    stretch = _STRETCH.fullmatch(entry.part)
    if stretch is not None:
        return None, (int(stretch[1]), int(stretch[2])), ""
    if whole is not None and is_dtensor(whole) and tuple(whole.shape) == shape:
        start = _box(whole, shape, tuple(local.shape))
        return start, None, "" if start is not None else "its shards are not boxes of the whole"
    if "shard" not in placements.values():
        if tuple(local.shape) == shape:
            return (0,) * len(shape), None, ""
        return None, None, f"it is held in another shape than its own, {list(local.shape)} of {list(shape)}"
    if Kind(entry.kind) in FORWARD_KINDS or Kind(entry.kind) in BACKWARD_KINDS:
        start = _one_cut(entry.part, placements, shape, tuple(local.shape), place)
        if start is not None:
            return start, None, ""
        return None, None, "each rank has its own samples or tokens"
    return None, None, "how its shards are cut is not known"


def _box(whole: Any, shape: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return where the shard of a DTensor begins in the whole; None when it is no box of this size."""
    from torch.distributed.tensor import _utils

    starts = [0] * len(shape)
    sizes = list(shape)
    kept: dict[int, torch.Tensor] = {}
    coordinate = whole.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for at, placement in enumerate(whole.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        if type(placement).__name__ == "Shard":
            # As torch.chunk cuts: all alike but the last, which may be small or empty.
            index = kept.get(dim, torch.arange(shape[dim], device="cpu"))
            each = -(-len(index) // whole.device_mesh.size(at)) if len(index) else 0
            kept[dim] = index[each * coordinate[at] : each * (coordinate[at] + 1)]
        else:
            # FSDP over tensor parallel: torch itself says which indices those are.
            size, found = _utils._get_shard_size_and_offsets(
                sizes[dim], whole.device_mesh.size(at), coordinate[at], placement, kept.get(dim), shape[dim], False
            )
            if found is None:
                return None
            kept[dim] = found[:size]
        sizes[dim] = len(kept[dim])
    for dim, index in kept.items():
        if len(index):
            starts[dim] = int(index[0])
            if int(index[-1]) - int(index[0]) + 1 != len(index):
                return None
        else:
            starts[dim] = shape[dim]
    return tuple(starts) if tuple(sizes) == local else None


def _one_cut(
    part: str, placements: Mapping[str, str], shape: Sequence[int], local: Sequence[int], place: Place
) -> tuple[int, ...] | None:
    """Return where a DTensor's shard begins that is cut once, along one dimension; None: it is not known."""
    cuts = _CUT.findall(part)
    axes = [axis for axis, word in placements.items() if word == "shard"]
    dims = [dim for dim, (whole, own) in enumerate(zip(shape, local, strict=True)) if whole != own] if cuts else []
    if len(cuts) != 1 or len(axes) != 1 or len(dims) != 1 or len(shape) != len(local):
        return None
    each = math.ceil(shape[dims[0]] / place.size(axes[0]))
    start = min(int(cuts[0]) * each, shape[dims[0]])
    if local[dims[0]] != max(0, min(each, shape[dims[0]] - start)):
        return None
    return tuple(start if dim == dims[0] else 0 for dim in range(len(shape)))
