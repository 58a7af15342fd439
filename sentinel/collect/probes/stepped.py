"""The parameters that an optimizer steps, as it holds them: what all probes of its work go through."""

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
    """One parameter of the model, and what its optimizer has for it on this rank."""

    one: Parameter
    param: torch.Tensor
    """What the optimizer steps; may be a DTensor."""
    grad: torch.Tensor | None
    """None: the optimizer leaves this parameter alone in this step."""
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    """Empty until the optimizer has stepped it once."""
    held: HeldPiece
    """What lies here of `param`, and how tensors shaped like it are placed."""


def stepped_by(optimizer: Any, parameters: WatchedParameters) -> list[Stepped]:
    """Return the parameters that an optimizer steps on this rank, in the model's order."""
    is_owner = is_zero_redundancy(optimizer)
    inner = optimizer.optim if is_owner else optimizer
    groups = {id(param): group for group in getattr(inner, "param_groups", ()) for param in group["params"]}
    state: Mapping[Any, Any] = getattr(inner, "state", {})
    holding = parameters.holding
    found = []
    for one in parameters.all:
        group = groups.get(id(one.param))
        if group is None:
            master = holding.master(one.param)
            group = None if master is None else groups.get(id(master.tensor))
            if master is not None and group is not None:
                found.append(_by_master(one, master, group, state.get(master.tensor) or {}, holding))
            continue
        held = holding.state(one.param, one.param.detach())
        if is_owner and "dp" in held.placements:
            held = held._replace(placements={**held.placements, "dp": "owned"})
        found.append(Stepped(one, one.param, one.param.grad, group, state.get(one.param) or {}, held))
    return found


def _by_master(one: Parameter, master: Master, group: Any, state: Mapping[str, Any], holding: ParameterStorage) -> Stepped:
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
    return Stepped(one, param, mine(gradient), group, kept, holding.state(one.param, param))


def per_rank(placements: Mapping[str, str]) -> dict[str, str]:
    """Return placements of what is said of a tensor as a whole and cannot be formed of its shards."""
    return {axis: "unknown" if word in ("shard", "partial") else word for axis, word in placements.items()}


def is_cut(placements: Mapping[str, str]) -> bool:
    """Whether ranks hold shards, and no summands, of a tensor: then sums over all of it are sums of theirs."""
    return "shard" in placements.values() and "partial" not in placements.values()


def describe_formed(
    table: TensorTable, entry: TensorEntry, names: Sequence[str], held: HeldPiece, shown: torch.Tensor
) -> tuple[TensorEntry, ...]:
    """Describe a value of a whole parameter, and return the entries of the summands that it is formed of.

    names: suffixes of those. None where the rank holds the whole parameter, or nobody can add the ranks' parts up.
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
