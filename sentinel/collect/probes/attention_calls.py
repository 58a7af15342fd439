"""Attention, seen where it is computed: torch's functions for it, and the softmax of those who write it out.

Replaced are functions of torch.nn.functional and torch, wherever they were imported by name, and `Tensor.softmax`; inside
torch itself callers look them up. A wrapper calls the original first, with its own arguments, and reports it afterwards.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn import functional

from sentinel.collect.hooks.interception import Interception
from sentinel.collect.probes.attention_scores import AttentionScores

LOWER_RIGHT = 2
"""torch.nn.attention.bias.CausalVariant.LOWER_RIGHT."""


class Attending(Protocol):
    """Called at each computation of attention."""

    def is_attentive(self) -> bool:
        """Whether a call made now is to be measured; asked before anything else is done."""
        ...

    def attended(self, call: Attended, frame: FrameType) -> None:
        """Called when an attention function has returned. frame: of its caller."""
        ...

    def normalized(self, logits: torch.Tensor, dim: int, frame: FrameType) -> None:
        """Called when a softmax over `dim` of `logits` has returned. frame: of its caller."""
        ...


class Attended:
    """One call of an attention function: queries, keys, and the function that forms its scores from them if measured."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, scores: Callable[[torch.Tensor, torch.Tensor], AttentionScores]
    ) -> None:
        self.q = q
        self.k = k
        self.scores = scores
        """Given what this rank holds of q and k."""


class _Calls(Interception[Attending]):
    is_inside = False
    """A function whose calls are recorded is running: what it calls itself belongs to it."""

    def listening(self) -> list[Attending]:
        return [] if self.is_inside else [user for user in self.users if user.is_attentive()]


def _replace_all(calls: Interception[Attending]) -> None:
    assert isinstance(calls, _Calls)
    sdpa = functional.scaled_dot_product_attention
    found: list[tuple[Any, str, Any]] = [(functional, "scaled_dot_product_attention", _reporting(calls, sdpa, _of_sdpa))]
    found.append((functional, "softmax", _reporting_softmax(calls, functional.softmax)))
    found.append((torch, "softmax", _reporting_softmax(calls, torch.softmax)))
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None:
        found.append((flex, "flex_attention", _reporting(calls, flex.flex_attention, _of_flex)))
    for _, name, ours in found:
        _let_script(name, ours)
    ours_of = {getattr(owner, name): ours for owner, name, ours in found}
    for owner, name, ours in found:
        calls.replace(owner, name, ours)
    calls.replace(torch.Tensor, "softmax", _reporting_softmax(calls, torch.Tensor.softmax))
    # Torch compares its own functions by identity: there only what is looked up at each call is replaced.
    calls.replace_imported(ours_of)


calls: Interception[Attending] = _Calls(_replace_all)


_scriptable: list[Any] = []
"""Replacements that TorchScript knows by their address: they are kept for ever, so that no other object gets that
address."""


def _let_script(name: str, ours: Any) -> None:
    """Let torch.jit.script take a replacement for the operator that it stands for: it cannot read one."""
    operator = {"scaled_dot_product_attention": "aten::scaled_dot_product_attention", "softmax": "aten::softmax"}.get(name)
    register = getattr(sys.modules.get("torch.jit._builtins"), "_register_builtin", None)
    if operator is not None and register is not None:
        _scriptable.append(ours)
        register(ours, operator)


def _reporting(calls: _Calls, original: Callable[..., Any], read: Callable[..., Attended | None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        users = calls.listening()
        calls.is_inside, was_inside = True, calls.is_inside
        try:
            result = _called(original, attention, args, kwargs)
        finally:
            calls.is_inside = was_inside
        for user in users:
            call = read(*args, **kwargs)
            if call is not None:
                user.attended(call, sys._getframe(1))
        return result

    return attention


def _called(original: Callable[..., Any], ours: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the original. Tensors with ideas of their own compare the function by identity with what torch has."""
    own = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    if functional.scaled_dot_product_attention is not ours or not torch.overrides.has_torch_function(own):
        return original(*args, **kwargs)
    functional.scaled_dot_product_attention = original
    try:
        return original(*args, **kwargs)
    finally:
        functional.scaled_dot_product_attention = ours


def _reporting_softmax(calls: _Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def softmax(input: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(input, *args, **kwargs)
        users = calls.listening()
        if not users:
            return original(input, *args, **kwargs)
        calls.is_inside = True
        try:
            result = original(input, *args, **kwargs)
        finally:
            calls.is_inside = False
        dim = kwargs.get("dim", args[0] if args else None)
        if isinstance(dim, int) and isinstance(input, torch.Tensor):
            for user in users:
                user.normalized(input, dim, sys._getframe(1))
        return result

    return softmax


def _of_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attended | None:
    causal = 0 if is_causal else None
    variant = getattr(attn_mask, "variant", None)
    mask = attn_mask
    if variant is not None and type(attn_mask) is not torch.Tensor:
        # torch.nn.attention.bias: a causal mask that is never formed.
        causal, mask = key.shape[-2] - query.shape[-2] if variant.value == LOWER_RIGHT else 0, None
    return Attended(query, key, lambda q, k: AttentionScores(q, k, mask, causal=causal, scale=scale))


def _of_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Attended | None:
    mask_mod = None if block_mask is None else block_mask.mask_mod
    return Attended(query, key, lambda q, k: AttentionScores(q, k, scale=scale, score_mod=score_mod, mask_mod=mask_mod))
