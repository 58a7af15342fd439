"""Stepped: the parameters that an optimizer steps, with gradient, state and the piece that this rank holds."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sentinel.collect.hooks.parameters import Parameter, WatchedParameters
from sentinel.collect.parallel.parameter_storage import HeldPiece, Master, ParameterStorage
from sentinel.collect.rows.tensor_table import TensorEntry, TensorTable
from sentinel.record import Kind


@dataclasses.dataclass(frozen=True)
class Stepped:
    """One parameter of the model, with what its optimizer keeps for it on this rank."""

    one: Parameter
    param: torch.Tensor
    """The tensor that the optimizer steps: the parameter, or a master copy of its shard. May be a DTensor."""
    grad: torch.Tensor | None
    """Its gradient; None: the optimizer does not step this parameter in this step."""
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    """The optimizer's state for it; empty until its first step."""
    held: HeldPiece
    """The local piece of `param`, and the placements of tensors shaped like it."""


def stepped_by(optimizer: Any, parameters: WatchedParameters) -> list[Stepped]:
    """Return the parameters that an optimizer steps on this rank, in the model's order."""
    is_owner = is_zero_redundancy(optimizer)
    inner = optimizer.optim if is_owner else optimizer
    groups = {id(param): group for group in getattr(inner, "param_groups", ()) for param in group["params"]}
    state: Mapping[Any, Any] = getattr(inner, "state", {})
    storage = parameters.storage
    found = []
    for one in parameters.all:
        group = groups.get(id(one.param))
        if group is None:
            master = storage.master(one.param)
            group = None if master is None else groups.get(id(master.tensor))
            if master is not None and group is not None:
                found.append(_by_master(one, master, group, state.get(master.tensor) or {}, storage))
            continue
        held = storage.state(one.param, one.param.detach())
        if is_owner and "dp" in held.placements:
            held = held._replace(placements={**held.placements, "dp": "owned"})
        found.append(Stepped(one, one.param, one.param.grad, group, state.get(one.param) or {}, held))
    return found


def _by_master(one: Parameter, master: Master, group: Any, state: Mapping[str, Any], storage: ParameterStorage) -> Stepped:
    """Return a parameter whose optimizer steps another tensor: whatever has that tensor's length is cut alike."""
    whole = master.tensor.numel()

    def mine(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != whole or master.numel < 0:
            return tensor
        return tensor.detach().reshape(-1).narrow(0, master.start if master.numel else 0, master.numel)

    param = mine(master.tensor.detach())
    gradient = getattr(master.tensor, "decoupled_grad", None)  # Megatron's, in another type than the copy's.
    gradient = master.tensor.grad if gradient is None else gradient
    kept = {key: value if key == "step" else mine(value) for key, value in state.items()}
    return Stepped(one, param, mine(gradient), group, kept, storage.state(one.param, param))


def per_rank(placements: Mapping[str, str]) -> dict[str, str]:
    """Return the placements of a value of a whole tensor that cannot be computed from its shards: one series a rank."""
    return {axis: "unknown" if word in ("shard", "partial") else word for axis, word in placements.items()}


def is_cut(placements: Mapping[str, str]) -> bool:
    """Return whether ranks hold shards of a tensor, and no partial sums, so that sums over all of it are sums of theirs."""
    return "shard" in placements.values() and "partial" not in placements.values()


def describe_formed(
    table: TensorTable, entry: TensorEntry, names: Sequence[str], held: HeldPiece, shown: torch.Tensor
) -> tuple[TensorEntry, ...]:
    """Describe a value of a whole parameter, and return the entries of the summands that the daemon computes it from.

    names: suffixes of the summands. shown: a tensor of the dtype that the entries have. (): this rank holds the whole
    parameter, or the sums of ranks do not add up.
    """
    if not is_cut(held.placements):
        table.describe(entry, shown, per_rank(held.placements), "", ())
        return ()
    table.describe(entry, shown, held.placements, held.part, ())
    found = []
    for name in names:
        one = table.entry(entry.chunk, f"{entry.name}:{name}", Kind(entry.kind))
        one.is_part, one.site_pos = True, entry.site_pos
        table.describe(one, shown, held.placements, held.part, ())
        found.append(one)
    if not entry.parts:
        entry.parts, table.is_changed = tuple(one.id for one in found), True
    return tuple(found)


def is_zero_redundancy(optimizer: Any) -> bool:
    """Whether each rank keeps the state of some parameters alone (torch.distributed.optim.ZeroRedundancyOptimizer)."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
