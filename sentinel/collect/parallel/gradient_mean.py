"""The divisor of gradients between backward and optimizer, by which those of activations are divided too.

Each rank's loss is a mean over its own samples, and pipelines take one of each micro-batch: inside the backward a gradient
is that much larger than in one process with the whole batch. The divisor of weight gradients is read from what divides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from sentinel.collect.parallel.topology import Topology
from sentinel.place import Place


def gradient_divisor(models: Sequence[nn.Module], topology: Topology, place: Place) -> float:
    """Return the divisor of the sum of gradients over all ranks and micro-batches.

    FSDP2's own factor where it was set; 1 where Megatron adds up losses of tokens (`calculate_per_token_loss`), for it
    divides by their number itself (`StepRows.take_scaling`); else the ranks that hold samples or tokens of their own, over
    which DDP, FSDP, DeepSpeed and Megatron take the mean; times the micro-batches of a pipeline that divides by them.
    """
    factors = [factor for model in models for factor in _fsdp_factors(model)]
    if not factors and any(_is_summed(model) for model in models):
        factors = [1.0]
    return (factors[0] if factors else float(num_shares(place))) * topology.num_micro_batches


def _is_summed(model: nn.Module) -> bool:
    """Whether Megatron takes the sum of the gradients over its ranks, not their mean.

    Source: megatron/core/distributed/distributed_data_parallel.py, `gradient_scaling_factor`.
    """
    return bool(getattr(getattr(model, "config", None), "calculate_per_token_loss", False))


def num_shares(place: Place) -> int:
    """Return the number of ranks with samples or tokens of their own.

    Expert-parallel ranks are data-parallel ones to all else; some meshes count them in dp, others beside it.
    """
    shares, experts = place.dp_size * place.cp_size, place.ep_size
    whole = place.world_size // (place.pp_size * place.tp_size)
    return shares * experts if experts > 1 and shares * experts == whole else shares


def _fsdp_factors(model: nn.Module) -> list[float]:
    """Return the factors that `set_gradient_divide_factor` was given for the parts of a model under FSDP2."""
    found = []
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", None)
        state = None if state is None else state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            factor = getattr(group, "gradient_divide_factor", None)
            if factor is not None:
                found.append(float(factor))
    return found
