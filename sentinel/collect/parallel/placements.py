"""How a tensor is placed over the mesh: from its DTensor placements, else from what kind of tensor it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from sentinel.collect.parallel.topology import AXIS_OF
from sentinel.kinds import BACKWARD_KINDS, FORWARD_KINDS
from sentinel.place import Place
from sentinel.record import Kind

PLACEMENTS = ("replicate", "shard", "owned", "partial", "unknown")
"""Placements over one axis. Shards are merged, replicas compared; an owned tensor is held by one rank of the axis alone; of
partial sums only non-finite counts are judged; an unknown one is a series of its own on each rank."""

ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types of plain tensors: no DTensor, and nothing that a collective still writes."""


def local_of(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor: the local shard of a DTensor, itself otherwise. No collective, no copy."""
    if type(tensor) in ORDINARY:
        plain: torch.Tensor = tensor
        return plain
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    whole: torch.Tensor = tensor
    return whole if local is None else local


def is_dense(tensor: Any) -> bool:
    """Return whether this rank's part of a tensor is dense: not sparse, as the gradient of an embedding may be."""
    return local_of(tensor).layout is torch.strided


def is_async(tensor: Any) -> bool:
    """Return whether a collective may still write this tensor or its local shard; such a one is measured at its reader."""
    if type(tensor) in ORDINARY:
        return False
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(local_of(tensor), module.AsyncCollectiveTensor)


def arrived(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, after waiting, as its reader would, for the collective that writes it."""
    local: Any = local_of(tensor)
    return local_of(local.trigger_wait()) if is_async(local) else local


def is_dtensor(tensor: Any) -> bool:
    """Return whether the tensor is a DTensor, which knows its placements."""
    if type(tensor) in ORDINARY:
        return False
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def axes_of(tensor: Any, place: Place) -> list[tuple[str, str, int, Any]]:
    """Return (axis, name of the mesh dimension, this rank's coordinate, placement) of each dimension of a DTensor's mesh."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate() or ()
    found = []
    for at, placement in enumerate(tensor.placements):
        name = names[at] if at < len(names) else f"{at}"
        axis = AXIS_OF.get(name.lower(), "")
        if not axis:
            axis = "tp" if place.tp_size > 1 and mesh.size(at) == place.tp_size else "dp"
        found.append((axis, name, int(coordinate[at]) if at < len(coordinate) else 0, placement))
    return found


def placements_of(tensor: Any, kind: Kind, place: Place) -> dict[str, str]:
    """Return axis -> one of PLACEMENTS, for the axes that are split.

    A DTensor has its own. Plain parameters and reduced gradients are replicas over dp and cp; plain activations hold
    this rank's samples (shard over dp and ep) and tokens (shard over cp). All else is unknown over tp and ep.
    """
    found: dict[str, str] = {}
    is_placed = is_dtensor(tensor)
    if is_placed:
        for axis, _, _, placement in axes_of(tensor, place):
            word = "partial" if placement.is_partial() else "shard" if is_shard(placement) else "replicate"
            if found.get(axis) in (None, "replicate") or word == "partial":
                found[axis] = word
    is_data = kind in FORWARD_KINDS or kind in BACKWARD_KINDS
    for axis in ("dp", "tp", "cp", "ep"):
        if place.size(axis) > 1 and axis not in found:
            if is_data:
                found[axis] = "unknown" if axis == "tp" else "shard"
            else:
                found[axis] = "replicate" if is_placed or axis in ("dp", "cp") else "unknown"
    return found


def part_of(tensor: Any, place: Place, placements: Mapping[str, str] | None = None) -> str:
    """Return which part of a DTensor this rank holds: `dp_shard=1,tp=0`; empty: all of it, or no DTensor.

    placements: of the tensor. An axis that its mesh does not have may cut it all the same, as the batch of an activation.
    """
    if not is_dtensor(tensor):
        return ""
    axes = axes_of(tensor, place)
    cut = [f"{name}={at}" for _, name, at, placement in axes if is_shard(placement)]
    if cut and placements:
        others = placements.keys() - {axis for axis, _, _, _ in axes}
        cut += [f"{axis}={place.coordinate(axis)}" for axis in placements if axis in others and placements[axis] == "shard"]
    return ",".join(cut)


def is_shard(placement: Any) -> bool:
    """Whether a placement of torch.distributed.tensor cuts its dimension; strided shards (FSDP over TP) do too."""
    return bool(placement.is_shard()) or type(placement).__name__ == "_StridedShard"
