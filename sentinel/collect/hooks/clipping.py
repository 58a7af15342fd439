"""Gradient clipping, seen from inside: the last moment at which gradients are still whole.

`torch.nn.utils.clip_grad_norm_` and friends look their inner functions up in their module, so wrapping those catches
callers that imported the public names. `clip_grads_with_norm_` is an alias bound at import: it is replaced as well.
FSDP1 scales by hand in a method of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from sentinel.collect.hooks.interception import Interception

OnClip = Callable[[list[torch.Tensor], "torch.Tensor | None"], None]
"""Called with (parameters about to be clipped, their total norm or None); an empty list: the norm is of those clipped
last."""
OnGrads = Callable[[list[torch.Tensor]], None]
"""Called with the gradients about to be clipped by value."""

METHODS = (("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "clip_grad_norm_"),)
"""(module, class, method) of wrappers around a model that clip its gradients themselves."""


class ClipWatch:
    """Calls back before any gradient is clipped through torch.nn.utils, while installed."""

    def __init__(self, on_clip: OnClip, on_grads: OnGrads) -> None:
        self.on_clip = on_clip
        self.on_grads = on_grads

    def install(self) -> None:
        """Wrap the inner functions of torch.nn.utils.clip_grad."""
        _clips.join(self)

    def remove(self) -> None:
        """Undo `install`; torch is as before when the last monitor is gone."""
        _clips.leave(self)


def _replace_all(clips: Interception[ClipWatch]) -> None:
    inner = sys.modules["torch.nn.utils.clip_grad"]
    public = sys.modules["torch.nn.utils"]
    scale = getattr(inner, "_clip_grads_with_norm_", None)
    if scale is not None:
        wrapped = _before_scaling(scale)
        clips.replace(inner, "_clip_grads_with_norm_", wrapped)
        for module in (inner, public):
            if hasattr(module, "clip_grads_with_norm_"):
                clips.replace(module, "clip_grads_with_norm_", wrapped)
        # Trainers import the alias by name.
        clips.replace_imported({scale: wrapped})
    for name, owner, method in METHODS:
        kind = getattr(sys.modules.get(name), owner, None)
        if kind is not None:
            clips.replace(kind, method, _before_method(getattr(kind, method)))
    group = getattr(inner, "_group_tensors_by_device_and_dtype", None)
    if group is not None:
        clips.replace(inner, "_group_tensors_by_device_and_dtype", _before_grouping(group))


_clips: Interception[ClipWatch] = Interception(_replace_all)


def _before_scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = total_norm if isinstance(total_norm, torch.Tensor) else None
        for user in list(_clips.users):
            user.on_clip(parameters, norm)
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    return clip_grads_with_norm_


def _before_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_norm_(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        parameters: list[torch.Tensor] = list(model.parameters())
        for user in list(_clips.users):
            user.on_clip(parameters, None)
        norm = original(model, *args, **kwargs)
        if isinstance(norm, torch.Tensor):
            for user in list(_clips.users):
                user.on_clip([], norm)
        return norm

    return clip_grad_norm_


def _before_grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def group_tensors(tensorlists: Any, *args: Any, **kwargs: Any) -> Any:
        # Total norms are taken through here too, also in the middle of an accumulation.
        if sys._getframe(1).f_code.co_name == "clip_grad_value_":
            for user in list(_clips.users):
                user.on_grads(tensorlists[0])
        return original(tensorlists, *args, **kwargs)

    return group_tensors
