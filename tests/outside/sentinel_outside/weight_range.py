"""A probe: the largest absolute weight of the model, behind each optimizer's step."""

from __future__ import annotations

from typing import Any

import torch

from sentinel.collect.probes import ProbeContext


class WeightRange:
    """Logs `weight_range`."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        context.events.updated.subscribe("weight_range", self._measure)

    @torch.no_grad()
    def _measure(self, optimizer: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._context.log("weight_range", torch.stack([param.detach().abs().max() for param in params]).max())
