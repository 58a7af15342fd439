"""The parameters that an optimizer steps, as it holds them: what all probes of its work go through."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

from sentinel.collect.gradients import Parameter, Parameters
from sentinel.collect.holding import Held


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
    held: Held
    """What lies here of `param`, and how tensors shaped like it are placed."""


def stepped_by(optimizer: Any, parameters: Parameters) -> list[Stepped]:
    """Return the parameters that an optimizer steps on this rank, in the model's order."""
    is_owner = is_zero_redundancy(optimizer)
    inner = optimizer.optim if is_owner else optimizer
    groups = {id(param): group for group in getattr(inner, "param_groups", ()) for param in group["params"]}
    state: Mapping[Any, Any] = getattr(inner, "state", {})
    found = []
    for one in parameters.all:
        group = groups.get(id(one.param))
        if group is None:
            continue
        held = parameters.holding.state(one.param, one.param.detach())
        if is_owner and "dp" in held.placements:
            held = held._replace(placements={**held.placements, "dp": "owned"})
        found.append(Stepped(one, one.param, one.param.grad, group, state.get(one.param) or {}, held))
    return found


def per_rank(placements: Mapping[str, str]) -> dict[str, str]:
    """Return placements of what is said of a tensor as a whole and cannot be merged over its shards."""
    return {axis: "unknown" if word in ("shard", "partial") else word for axis, word in placements.items()}


def is_zero_redundancy(optimizer: Any) -> bool:
    """Whether each rank keeps the state of some parameters alone (torch.distributed.optim.ZeroRedundancyOptimizer)."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
