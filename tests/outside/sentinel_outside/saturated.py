"""A probe: the share of each Tanh's outputs that are nearly 1 or -1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.probes import ProbeContext

NEARLY = 0.99


class Saturated:
    """Logs `saturated/NAME`, of the last micro-step of each step."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._handles: list[RemovableHandle] = []
        context.events.planned.subscribe("saturated", self._watch)
        context.events.removed.subscribe("saturated", self._leave)

    def _watch(self) -> None:
        self._leave()
        for chunk, name, module in self._context.modules():
            if isinstance(module, nn.Tanh):
                self._handles.append(self._context.watch("saturated", chunk, name, module, _Share(self._context, name)))

    def _leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class _Share:
    def __init__(self, context: ProbeContext, name: str) -> None:
        self._context, self._name = context, name

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, micro_step: int) -> None:
        self._context.log(f"saturated/{self._name}", (output.abs() > NEARLY).float().mean())
