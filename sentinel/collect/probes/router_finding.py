"""Routers of mixtures of experts: which modules choose experts for tokens, among how many, and how many each token gets.

Known by what they are called and by the experts beside them, not by class: the routers of Hugging Face, torchtitan,
Megatron, OLMo-core and DeepSpeed, and a plain linear gate as wide as there are experts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

GATES = frozenset({"gate", "router", "wg", "gating", "gate_network", "gating_network", "router_gate", "gate_layer"})
"""Last parts of names that a router may have."""
CLASSES = re.compile(r"router|top\w*gat|moe\w*gat|tokenchoice|expertchoice|^gat(e|ing)$", re.IGNORECASE)
SURE = re.compile(r"router|top\w*gat|moe\w*gat|tokenchoice|expertchoice", re.IGNORECASE)
"""Names of classes that are routers whether or not experts are beside them."""
NUM_EXPERTS = (
    "num_experts", "n_routed_experts", "num_local_experts", "n_experts", "num_moe_experts", "moe_num_experts",
    "num_routed_experts",
)  # fmt: skip
TOP_K = (
    "top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_router_topk", "moe_top_k", "moe_k", "moe_topk",
    "experts_per_token", "num_selected_experts", "num_experts_top_k", "top_k_experts", "n_activated_experts", "k",
)  # fmt: skip
SCORING = (
    "score_function", "score_func", "scoring_func", "scoring_function", "gating_function", "moe_router_score_function",
    "moe_score_function", "router_score_function",
)  # fmt: skip
BIASES = (
    "expert_bias", "e_score_correction_bias", "score_correction_bias", "correction_bias", "expert_biases", "score_bias",
    "routing_bias",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Router:
    """One router of a chunk."""

    name: str
    module: nn.Module
    holder: nn.Module | None
    """Its parent module, which may have attributes (top_k, the experts) that the router lacks."""
    num_experts: int
    top_k: int
    """Experts of each token; 0: not known."""
    scoring: str
    """softmax, sigmoid or sqrtsoftplus: how logits become scores."""
    gate: nn.Module | None
    """The linear layer whose output are the logits: the router itself, or one inside; None: it has a weight of its own."""

    def bias(self) -> torch.Tensor | None:
        """Return what is added to the scores, or to the logits, of each expert: [num_experts]; None: nothing."""
        sources = (self.module, self.holder)
        places = [(source, word) for word in BIASES for source in sources] + [(self.gate or self.module, "bias")]
        for source, word in places:
            value = getattr(source, word, None)
            if isinstance(value, torch.Tensor) and value.shape == (self.num_experts,):
                return value.detach()
        return None

    def has_choice_bias(self) -> bool:
        """Whether it has a bias per expert, so that experts are chosen by other numbers than the scores."""
        return any(isinstance(getattr(source, word, None), torch.Tensor) for word in BIASES for source in _two(self))

    def weight(self) -> torch.Tensor | None:
        """Return the weight, [num_experts, width], where this rank holds it whole and open to read."""
        value = getattr(self.gate or self.module, "weight", None)
        if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter) or not value.numel():
            return None
        if value.dim() == 1 and value.numel() % self.num_experts == 0:
            return value.detach().view(self.num_experts, -1)  # OLMo-core keeps it flat.
        return value.detach() if value.dim() == 2 and value.shape[0] == self.num_experts else None


def _two(router: Router) -> tuple[nn.Module | None, nn.Module | None]:
    return router.module, router.holder


def find_routers(modules: Mapping[str, nn.Module], is_named: Callable[[str], bool] = lambda name: False) -> list[Router]:
    """Return the routers among the modules of a chunk, name to module, outer ones before those inside them.

    is_named: returns whether a target names this very module; such a one is a router if its output is as wide as experts are
    many.
    """
    found: dict[str, Router] = {}
    for name, module in modules.items():
        last = name.rpartition(".")[2].lower()
        kind = type(module).__name__
        is_meant = is_named(name)
        if not (is_meant or last in GATES or CLASSES.search(kind)) or _is_inside(name, found):
            continue
        holder = modules.get(name.rpartition(".")[0]) if name else None
        reported = _numbers(NUM_EXPERTS, module, holder)
        gate = _gate(module, reported)
        width = _width(gate if gate is not None else module, reported)
        is_sure = is_meant or bool(SURE.search(kind))
        if width < 2 or (reported and not is_sure and width not in reported):
            continue
        if is_sure or _has_experts(holder, width):
            top_k = next((one for one in _numbers(TOP_K, module, holder) if one <= width), 0)
            found[name] = Router(name, module, holder, width, top_k, _scoring(module, holder), gate)
    return list(found.values())


def _is_inside(name: str, found: Mapping[str, Router]) -> bool:
    while name:
        name = name.rpartition(".")[0]
        if name in found:
            return True
    return False


def _sources(module: nn.Module, holder: nn.Module | None) -> Iterator[Any]:
    for one in (module, holder):
        if one is not None:
            yield one
            for word in ("config", "args", "router_config", "moe_args"):
                config = getattr(one, word, None)
                if config is not None and not isinstance(config, (nn.Module, torch.Tensor)):
                    yield config


def _numbers(words: tuple[str, ...], module: nn.Module, holder: nn.Module | None) -> list[int]:
    """Return the whole numbers of these names that a router, its config and its holder have, the nearest first."""
    found = []
    for source in _sources(module, holder):
        for word in words:
            value = source.get(word) if isinstance(source, dict) else getattr(source, word, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                found.append(value)
    return found


def _scoring(module: nn.Module, holder: nn.Module | None) -> str:
    """Return how logits become scores: by an attribute, else by the functions that the module's code calls."""
    for source in _sources(module, holder):
        for word in SCORING:
            value = getattr(source, word, None)
            if value is not None and not callable(value):
                text = str(getattr(value, "value", value)).lower()
                for known in ("sqrtsoftplus", "sigmoid", "softmax"):
                    if known in text:
                        return known
    for one in (module, holder):
        called = {name for name in _called_in(one) if name in ("sigmoid", "softmax")}
        if len(called) == 1:
            return called.pop()
    return "softmax"


def _called_in(module: nn.Module | None) -> Iterator[str]:
    """Yield the names that the methods of a module's own class use."""
    for method in vars(type(module)).values() if module is not None and type(module).__module__[:9] != "torch.nn." else ():
        yield from getattr(getattr(method, "__code__", None), "co_names", ())


def _gate(module: nn.Module, reported: list[int]) -> nn.Module | None:
    """Return the linear layer that makes the logits: the module, or the last one inside it of that width."""
    if _is_linear(module):
        return module
    if isinstance(getattr(module, "weight", None), torch.Tensor):
        return None
    inner = [one for one in module.modules() if one is not module and _is_linear(one)]
    fitting = [one for one in inner if _width(one, []) in reported] or inner
    return fitting[-1] if fitting else None


def _is_linear(module: nn.Module) -> bool:
    """Return whether it is a linear layer: torch's, or one with `linear` in the name of its class and a weight of two
    dimensions."""
    if isinstance(module, nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return "linear" in type(module).__name__.lower() and isinstance(weight, torch.Tensor) and weight.dim() == 2


def _width(module: nn.Module, reported: list[int]) -> int:
    """Return the number of outputs; what the caller gives where the module does not show it."""
    out = getattr(module, "out_features", None)
    if isinstance(out, int):
        return out
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.numel():
        return int(weight.shape[0])
    return reported[0] if reported else 0


def _has_experts(holder: nn.Module | None, width: int) -> bool:
    """Whether a module holds experts: all of them, or this rank's share."""
    if holder is None:
        return False
    for name, child in holder.named_children():
        if "expert" in name.lower() and "shared" not in name.lower():
            number = len(child) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else 0
            if number == 0 or (number <= width and width % number == 0):
                return True
    return any(isinstance(getattr(holder, word, None), int) and getattr(holder, word) == width for word in NUM_EXPERTS)
