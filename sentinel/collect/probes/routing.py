"""Loads, entropies and margins of a router's decisions, from its logits and its output. Nothing waits for a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

BLOCK = 1 << 20
"""Elements computed on in one go: 4 MiB of fp32, 8 MiB where indices are sorted with it."""


@dataclasses.dataclass
class Decisions:
    """The decisions of one forward, over all its tokens."""

    entropy: torch.Tensor
    """[tokens] entropy of the normalized scores, in nats."""
    margin: torch.Tensor | None
    """[tokens] score of the last expert chosen less that of the first not chosen; None: none is left out, or not known."""
    relative_margin: torch.Tensor | None
    """[tokens] `margin` divided by the score of the last expert chosen."""
    scores: torch.Tensor
    """[experts] float64: normalized scores, summed over tokens."""
    preferred: torch.Tensor | None
    """[experts] int64: number of tokens whose k best scores include the expert."""


def decide(logits: torch.Tensor, top_k: int, scoring: str) -> Decisions:
    """Return the decisions that follow from logits.

    logits: [tokens, experts] of any float type. top_k: experts of a token; 0: not known. scoring: `softmax`, `sigmoid` or
    `sqrtsoftplus`; scores of the latter two are divided by their sum, as for an auxiliary loss.
    """
    num_experts = logits.shape[1]
    has_boundary = 0 < top_k < num_experts
    entropies, tops = [], []
    total = torch.zeros(num_experts, dtype=torch.float64, device=logits.device)
    preferred = torch.zeros(num_experts, dtype=torch.int64, device=logits.device)
    for block in torch.split(logits, max(1, BLOCK // num_experts)):
        scores = normalized(block.float(), scoring)
        entropies.append(torch.special.entr(scores).sum(-1))
        total += scores.sum(0, dtype=torch.float64)
        if top_k:
            best = scores.topk(min(top_k + 1, num_experts), -1)
            preferred += load_of(best.indices[:, :top_k], num_experts)
            if has_boundary:
                tops.append(best.values[:, top_k - 1 :])
    margin = relative = None
    if has_boundary:
        chosen, left = torch.cat(tops).unbind(-1)
        margin = chosen - left
        relative = margin / chosen.clamp(min=torch.finfo(torch.float32).tiny)
    return Decisions(torch.cat(entropies), margin, relative, total, preferred if top_k else None)


def normalized(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Return the scores of logits, [tokens, experts], that sum to 1 for each token. scoring: as in `decide`."""
    if scoring == "softmax":
        return torch.softmax(logits, -1)
    scores = logits.sigmoid() if scoring == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)


def load_of(indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the number of tokens routed to each expert, [experts] int64.

    indices: [tokens, k]; others than experts' are none.
    """
    load = torch.zeros(num_experts, dtype=torch.int64, device=indices.device)
    for block in torch.split(indices, max(1, BLOCK // num_experts)):
        # A dropped token has an index past the end, and an index past the end is the end of a CUDA context.
        safe = torch.where((block < 0) | (block >= num_experts), num_experts, block.long())
        chosen = torch.zeros((len(block), num_experts + 1), dtype=torch.bool, device=block.device)
        load += chosen.scatter_(1, safe, True).sum(0)[:num_experts]
    return load


def returned_load(output: Any, num_experts: int, top_k: int, num_tokens: int) -> torch.Tensor | None:
    """Return the load, [experts] int64, that a router's output contains as indices, as a map of decisions, or as counts.

    None: the output contains none of them.
    """
    tensors = [one.detach() for one in _tensors(output)]
    whole = [one for one in tensors if not one.is_floating_point() and one.dtype is not torch.bool]
    for one in whole:
        k = one.shape[-1] if one.dim() > 1 else 1
        is_fitting = k == top_k if top_k else k < num_experts
        if is_fitting and one.numel() == num_tokens * k and k <= num_experts:
            return load_of(one.reshape(num_tokens, k), num_experts)
    for one in tensors:
        if one.dtype is torch.bool and one.dim() > 1:
            if one.shape[-1] == num_experts and one.numel() == num_tokens * num_experts:
                return one.reshape(-1, num_experts).sum(0)
            if one.dim() == 3 and one.shape[:2] == (num_tokens, num_experts):  # [tokens, experts, capacity]: DeepSpeed.
                return one.flatten(1).view(num_tokens, num_experts, -1).any(-1).sum(0)
    for one in whole:
        if one.shape == (num_experts,):
            return one.to(torch.int64)
    for one in whole:
        # A mask of ones and zeros: Switch.
        if one.shape[-1:] == (num_experts,) and one.numel() == num_tokens * num_experts:
            return one.reshape(-1, num_experts).sum(0)
    return None


def returned_logits(output: Any, num_experts: int) -> torch.Tensor | None:
    """Return the first float tensor of a router's output with a value for each expert, as [tokens, experts]; None: none."""
    for one in _tensors(output):
        if one.is_floating_point() and one.dim() > 1 and one.shape[-1] == num_experts:
            return one.detach().reshape(-1, num_experts)
    return None


def returned_losses(output: Any) -> list[torch.Tensor]:
    """Return the 0-dim float tensors in a router's output, which are auxiliary losses; []: there are none."""
    if isinstance(output, torch.Tensor):
        return []
    return [one.detach() for one in _tensors(output) if one.is_floating_point() and one.dim() == 0]


def _tensors(value: Any, nesting: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif nesting < 3 and isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one, nesting + 1)
    elif nesting < 3 and isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one, nesting + 1)
    elif nesting < 3 and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), nesting + 1)


def balance_of(load: torch.Tensor) -> torch.Tensor:
    """Return E * sum((p - 1/E)**2) of a load, [experts], as 0-dim float64: 0 for an even load, E - 1 where one has all.

    Source: Megatron-LM's tensor metrics (router_metrics.py), load imbalance.
    """
    share = shares(load)
    return (share - 1.0 / len(share)).square().sum() * len(share)


def coupling_of(load: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (coupling, alignment) of the load and the summed scores, [experts] each, as 0-dim float64.

    Coupling is E times the inner product of their deviations from an even distribution, alignment the cosine of the two;
    0 where either is even.

    Source: as `balance_of`; there of single sequences, here of all tokens of a rank's step.
    """
    one, other = (shares(x) - 1.0 / len(x) for x in (load, scores))
    inner = (one * other).sum()
    size = (one.square().sum() * other.square().sum()).sqrt()
    return inner * len(one), torch.where(size > 0.0, inner / size, 0.0)


def shares(load: torch.Tensor) -> torch.Tensor:
    """Return values divided by their sum, float64; zeros where the sum is 0."""
    wide = load.double()
    return wide / wide.sum().clamp(min=torch.finfo(torch.float64).tiny)


def similarity(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cosines between the weights of all pairs of experts, which of them count), [experts, experts] each.

    weight: [experts, width]. Each pair of different experts counts once.
    """
    rows = weight.float()
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-30)
    cosine = rows @ rows.T
    return cosine, torch.ones_like(cosine, dtype=torch.bool).triu(1)
