"""Planting faults, so that the demo and the tests know the truth: a corrupted batch, a NaN in one module's work, a
flipped bit in a weight, or a rank that is slow or hangs.

Sentinel knows nothing of this file. A planted module behaves like one with a bug: forward, its output is bad while its
input was good; backward, the gradient it hands back is bad while the gradient it was given was good.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and when and where it strikes."""

    steps: tuple[int, ...]
    """Steps at which it strikes."""
    type: str = "nan"
    """`nan`: into one module; `scale`: one module's work is `factor` times what it should be; `batch`: the data are
    corrupted; `flip`: an exponent bit of one element of the module's weight; `sleep`: the module's forward takes `seconds`
    longer."""
    module: str = ""
    """For all but `batch`: global name of the module."""
    phase: str = "forward"
    """For `nan` and `scale`: `forward` hits the module's output, `backward` the gradient of its input (where the input has
    none, as an embedding's tokens: the gradient of its weight)."""
    dp_rank: int | None = None
    """The replica that it strikes; None: all."""
    tp_rank: int | None = None
    """The tensor-parallel rank that it strikes; None: all."""
    micro_step: int | None = None
    """The micro-batch that it strikes; None: all of the step."""
    is_sudden: bool = False
    """For `nan` and `scale`: the broken code runs only when it strikes; else it is always there, as a bug is, and mostly
    harmless."""

    factor: float = 100.0
    """For `scale`."""

    seconds: float = 0.0
    """For `sleep`."""

    def __post_init__(self) -> None:
        if self.type not in ("nan", "scale", "batch", "flip", "sleep") or self.phase not in ("forward", "backward"):
            raise ValueError(f"no such fault: type {self.type!r}, phase {self.phase!r}")


def read_faults(path: str | Path) -> list[Fault]:
    """Return the faults of a JSON file: a list of objects with the fields of Fault."""
    return [Fault(**{**fields, "steps": tuple(fields["steps"])}) for fields in json.loads(Path(path).read_text())]


class Faults:
    """The faults of one rank, armed step by step."""

    def __init__(self, faults: Sequence[Fault], dp_rank: int = 0, tp_rank: int = 0) -> None:
        self._planted_phases: dict[str, set[str]] = defaultdict(set)
        self._always: set[tuple[str, str]] = set()
        self._nans: dict[tuple[int, str], list[Fault]] = defaultdict(list)
        self._batches: dict[int, list[Fault]] = defaultdict(list)
        self._flips: dict[int, list[Fault]] = defaultdict(list)
        self._sleeps: dict[tuple[int, str], list[Fault]] = defaultdict(list)
        self._sleepers = {fault.module for fault in faults if fault.type == "sleep"}
        self._modules: dict[str, nn.Module] = {}
        for fault in faults:
            if fault.type in ("nan", "scale"):
                # On every rank alike: the replicas of a broken module are broken too.
                self._planted_phases[fault.module].add(fault.phase)
                if not fault.is_sudden:
                    self._always.add((fault.module, fault.phase))
            if fault.dp_rank not in (None, dp_rank) or fault.tp_rank not in (None, tp_rank):
                continue
            for step in fault.steps:
                if fault.type == "batch":
                    self._batches[step].append(fault)
                elif fault.type == "flip":
                    self._flips[step].append(fault)
                elif fault.type == "sleep":
                    self._sleeps[step, fault.module].append(fault)
                else:
                    self._nans[step, fault.module].append(fault)
        self._step = -1
        self._num_forwards: dict[str, int] = defaultdict(int)

    def plant(self, chunks: Iterable[nn.Module]) -> None:
        """Get between the modules that a fault names and their callers. Modules of other stages are passed over."""
        for chunk in chunks:
            for name, module in chunk.named_modules():
                self._modules[name] = module
                if name in self._planted_phases or name in self._sleepers:
                    module.forward = self._planted(name, module, module.forward)  # type: ignore[method-assign]

    def begin_step(self, step: int) -> None:
        """Arm what strikes at `step`.

        Micro-steps are counted from here by forwards, so nothing can be planted at the first step of a pipeline: that
        one begins with a forward of its own, for the shapes.
        """
        self._step = step
        self._num_forwards.clear()
        for fault in self._flips.get(step, ()):
            if fault.module in self._modules:
                flip_bit(self._modules[fault.module].weight)  # type: ignore[arg-type]

    def is_corrupted(self, step: int, micro_step: int) -> bool:
        """Return whether this micro-batch's data are to be spoilt."""
        return any(fault.micro_step in (None, micro_step) for fault in self._batches.get(step, ()))

    def _planted(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        phases = self._planted_phases[name]

        def strikes(phase: str, micro_step: int) -> float:
            """What the work is multiplied by: 1 when nothing strikes, NaN: one element is lost."""
            for fault in self._nans.get((self._step, name), ()):
                if fault.phase == phase and fault.micro_step in (None, micro_step):
                    return math.nan if fault.type == "nan" else fault.factor
            return 1.0

        def run(*args: Any, **kwargs: Any) -> Any:
            micro_step = self._num_forwards[name]
            self._num_forwards[name] += 1
            for fault in self._sleeps.get((self._step, name), ()):
                if fault.micro_step in (None, micro_step):
                    time.sleep(fault.seconds)
            times = {phase: strikes(phase, micro_step) for phase in phases}
            runs = {phase for phase in phases if times[phase] != 1.0 or (name, phase) in self._always}
            if "backward" not in runs:
                output = forward(*args, **kwargs)
            elif args[0].requires_grad:
                output = forward(BadGradient.apply(args[0], times["backward"]), *args[1:], **kwargs)
            else:
                assert isinstance(module, nn.Embedding)
                output = F.embedding(args[0], BadGradient.apply(module.weight, times["backward"]))
            return spoil(output, times["forward"]) if "forward" in runs else output

        return run


class BadGradient(torch.autograd.Function):
    """The identity, whose backward is broken at times: then the gradient it returns is spoilt."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, times: float) -> torch.Tensor:
        ctx.times = times
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return spoil(gradient, ctx.times), None


def flip_bit(weight: torch.Tensor) -> None:
    """Flip an exponent bit of the middle element of a float32 tensor: it is a quarter of what it was, or four times."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    local.data.view(torch.int32).view(-1)[local.numel() // 2] ^= 1 << 24


def spoil(tensor: torch.Tensor, times: float) -> torch.Tensor:
    """Return a copy of `tensor`, so many times as large; NaN: its middle element is. Of a DTensor the local shard."""
    if isinstance(tensor, DTensor):
        local = spoil(tensor.to_local(), times)
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
    mask = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    mask[tensor.numel() // 2] = math.isnan(times)
    spoilt = tensor.masked_fill(mask.view(tensor.shape), math.nan)
    return spoilt if times == 1.0 or math.isnan(times) else spoilt * times
