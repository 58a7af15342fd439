"""How a tensor is placed over the mesh: from its DTensor placements, else from what kind of tensor it is."""

from __future__ import annotations

import sys
from typing import Any

import torch

from sentinel.collect.topology import AXIS_OF
from sentinel.place import Place
from sentinel.record import BACKWARD_KINDS, FORWARD_KINDS, Kind

UNSUPPORTED = frozenset({"partial", "owned", "flat_shard"})
"""Reserved: not measured yet, said once."""


def local_of(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor: the local shard of a DTensor, itself otherwise. No collective, no copy."""
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    whole: torch.Tensor = tensor
    return whole if local is None else local


def is_async(tensor: Any) -> bool:
    """Whether a collective still writes this tensor; it is read at its consumer."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def placements_of(tensor: Any, kind: Kind, place: Place) -> dict[str, str]:
    """Return mesh axis -> `replicate`, `shard`, `partial` or `unknown` for the axes that are split.

    A DTensor says it itself. Plain parameters and reduced gradients are replicas over dp and unknown over the other axes
    inside a model; plain activations hold this rank's samples (shard over dp) and are unknown over tp, cp and ep.
    """
    found: dict[str, str] = {}
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None and hasattr(tensor, "placements"):
        names = mesh.mesh_dim_names or ()
        for at, placement in enumerate(tensor.placements):
            axis = AXIS_OF.get(names[at].lower(), "") if at < len(names) else ""
            if not axis:
                axis = "tp" if place.tp_size > 1 and mesh.size(at) == place.tp_size else "dp"
            word = "partial" if placement.is_partial() else "shard" if placement.is_shard() else "replicate"
            if found.get(axis) in (None, "replicate"):
                found[axis] = word
    is_data = kind in FORWARD_KINDS or kind in BACKWARD_KINDS
    if place.dp_size > 1:
        found.setdefault("dp", "shard" if is_data else "replicate")
    for axis in ("tp", "cp", "ep"):
        if place.size(axis) > 1 and axis not in found:
            found[axis] = "unknown" if is_data or mesh is None else "replicate"
    return found
