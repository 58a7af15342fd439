"""Faults that are really planted in a training: in its data, modules, gradients, weights, optimizer or schedule.

Sentinel knows nothing of this file. A fault picks its victim by what it is (the middle matrix of the model, the first query
weight), so that each works on every architecture it means anything for; `applies` says on which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from healthy_models import Attention, Batch, Experts
from healthy_training import Fault, Training
from torch import nn
from torch.utils.hooks import RemovableHandle


def middle(model: nn.Module) -> tuple[str, nn.Module]:
    """Return name and module of the middle one of the matrices and kernels in blocks; of all where there are none."""
    called = (nn.Linear, nn.Conv2d, nn.LSTM)  # Not torch's attention's out_proj, whose forward is never called.
    found = [(name, module) for name, module in model.named_modules() if type(module) in called]
    inner = [one for one in found if "blocks" in one[0] and "experts" not in one[0] and not one[0].endswith("gate")]
    return (inner or found)[len(inner or found) // 2]


def weight_of(module: nn.Module) -> nn.Parameter:
    """Return the first weight of a module."""
    return next(p for p in module.parameters() if p.dim() >= 2)


def experts_of(model: nn.Module) -> Experts:
    """Return the first mixture of experts."""
    return next(module for module in model.modules() if isinstance(module, Experts))


class OfOutput(Fault):
    """The output of the middle matrix goes through `change`, in the steps [0, steps)."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], steps: int = 1) -> None:
        self._change, self._steps = change, steps
        self._handle: RemovableHandle | None = None

    def begin(self, training: Training, since: int) -> None:
        """Put the hook on, or take it off."""
        self.remove(training)
        if since < self._steps:
            # Before Sentinel's own hook: a bug inside the module, not behind it.
            self._handle = middle(training.model)[1].register_forward_hook(self._hook, prepend=True)

    def _hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._change(output[0]), *output[1:])
        return self._change(output)

    def remove(self, training: Training) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _BadGradient(torch.autograd.Function):
    """The identity, whose backward spoils one element."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return spoil(gradient, ctx.value), None


def spoil(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Return a copy whose middle element is `value`."""
    mask = torch.zeros(tensor.numel(), dtype=torch.bool)
    mask[tensor.numel() // 2] = True
    return tensor.masked_fill(mask.view(tensor.shape), value)


class OfBatch(Fault):
    """The data are changed in the steps [0, steps)."""

    def __init__(self, change: Callable[[Training, Batch, np.random.Generator], Batch], steps: int) -> None:
        self._change, self._steps = change, steps
        self._rng = np.random.default_rng(12345)

    def batch(self, training: Training, batch: Batch, since: int) -> Batch:
        """Return the changed data."""
        return self._change(training, batch, self._rng) if since < self._steps else batch


class Repeated(Fault):
    """The loader hands out one batch again and again."""

    def __init__(self) -> None:
        self._batch: Batch | None = None

    def batch(self, training: Training, batch: Batch, since: int) -> Batch:
        """Return the first one."""
        self._batch = batch if self._batch is None else self._batch
        return self._batch


class Rate(Fault):
    """The learning rate is changed."""

    def __init__(self, change: Callable[[float, int], float]) -> None:
        self._change = change

    def rate(self, rate: float, since: int) -> float:
        """Return the changed rate."""
        return self._change(rate, since)


class Once(Fault):
    """Something is done to the weights, or to the optimizer, before the first step."""

    def __init__(self, do: Callable[[Training], None]) -> None:
        self._do = do

    def begin(self, training: Training, since: int) -> None:
        """Do it."""
        if since == 0:
            with torch.no_grad():
                self._do(training)


class OfGradient(Fault):
    """Something is done to the gradients of each step, as a faulty backward would."""

    def __init__(self, do: Callable[[Training], None], steps: int = 10**9) -> None:
        self._do, self._steps = do, steps

    def begin(self, training: Training, since: int) -> None:
        """Nothing: the gradients are not there yet."""

    def after_backward(self, training: Training, since: int) -> None:
        """Do it."""
        if since < self._steps:
            with torch.no_grad():
                self._do(training)


class Frozen(Fault):
    """A layer's weights get no gradients any more (requires_grad is False)."""

    def begin(self, training: Training, since: int) -> None:
        """Freeze it."""
        for p in middle(training.model)[1].parameters():
            p.requires_grad_(False)

    def remove(self, training: Training) -> None:
        """Thaw it."""
        for p in middle(training.model)[1].parameters():
            p.requires_grad_(True)


class ZeroedGradient(Fault):
    """The gradient of one layer's weights is zero: written by the backward itself, so that every hook sees zeros."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def begin(self, training: Training, since: int) -> None:
        """Put the hooks on, once."""
        if not self._handles:
            for p in middle(training.model)[1].parameters():
                self._handles.append(p.register_hook(torch.zeros_like))

    def remove(self, training: Training) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()


class DeadExpert(Fault):
    """No token chooses the first expert any more: what a gate's row that ran away does."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None

    def begin(self, training: Training, since: int) -> None:
        """Put the hook on, once."""
        if self._handle is None:
            self._handle = experts_of(training.model).gate.register_forward_hook(self._hook, prepend=True)

    def _hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        away = torch.zeros(output.shape[-1])
        away[0] = -30.0
        return output + away

    def remove(self, training: Training) -> None:
        """Take it off."""
        if self._handle is not None:
            self._handle.remove()


class DroppedGroup(Fault):
    """The optimizer forgets one layer: its weights stand still while gradients flow."""

    def __init__(self) -> None:
        self._saved: dict[int, torch.Tensor] = {}

    def begin(self, training: Training, since: int) -> None:
        """Take it out of its group."""
        mine = {id(p) for p in middle(training.model)[1].parameters()}
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in mine]


def _scale_query(training: Training) -> None:
    for module in training.model.modules():
        if isinstance(module, Attention):
            module.query.weight.mul_(30.0)
            return
        if isinstance(module, nn.MultiheadAttention):
            module.in_proj_weight[: module.embed_dim].mul_(30.0)
            return


def _collapse_router(training: Training) -> None:
    # The gate prefers two experts for whatever comes: their rows are large and lie along the mean of the tokens.
    gate = experts_of(training.model).gate.weight
    gate[2:].mul_(0.01)
    gate[:2].mul_(20.0)
    gate[1].copy_(-gate[0])


def _zero_state(*names: str) -> Callable[[Training], None]:
    def zero(training: Training) -> None:
        for optimizer in training.optimizers:
            for state in optimizer.state.values():
                for name in names:
                    if isinstance(state.get(name), torch.Tensor):
                        state[name].zero_()

    return zero


def _flip(training: Training) -> None:
    flip(weight_of(middle(training.model)[1]), 30)


def flip(weight: torch.Tensor, bit: int) -> None:
    """Flip one bit of the middle element of a float32 tensor. 30 is the top bit of the exponent."""
    weight.data.view(torch.int32).view(-1)[weight.numel() // 2] ^= 1 << bit


def _zero_weight(training: Training) -> None:
    weight_of(middle(training.model)[1]).zero_()


def _permuted(training: Training, batch: Batch, rng: np.random.Generator) -> Batch:
    flat = batch[1].flatten()
    return batch[0], flat[torch.from_numpy(rng.permutation(len(flat)))].view(batch[1].shape)


def _padding(training: Training, batch: Batch, rng: np.random.Generator) -> Batch:
    return torch.zeros_like(batch[0]), torch.zeros_like(batch[1])


def _scaled_gradients(training: Training) -> None:
    for p in training.model.parameters():
        if p.grad is not None:
            p.grad.mul_(8.0)


@dataclasses.dataclass(frozen=True)
class Planted:
    """One entry of the library."""

    make: Callable[[], Fault]
    applies: Callable[[Training], bool] = lambda training: True
    grows: bool = False
    """It is no event: it only grows, and what counts is the lead."""


def _has(kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Callable[[Training], bool]:
    return lambda training: any(isinstance(module, kind) for module in training.model.modules())


def _holds(*names: str) -> Callable[[Training], bool]:
    return lambda training: any(
        name in state for one in training.optimizers for state in one.state.values() for name in names
    )


_MOMENTA = ("exp_avg", "momentum_buffer")

LIBRARY: dict[str, Planted] = {
    "none (control)": Planted(Fault),
    "NaN in an activation": Planted(lambda: OfOutput(lambda x: spoil(x, float("nan")))),
    "inf in an activation": Planted(lambda: OfOutput(lambda x: spoil(x, float("inf")))),
    "NaN in a gradient": Planted(lambda: OfOutput(lambda x: _BadGradient.apply(x, float("nan")))),
    "inf in a gradient": Planted(lambda: OfOutput(lambda x: _BadGradient.apply(x, float("inf")))),
    "activation x1000, one step": Planted(lambda: OfOutput(lambda x: x * 1e3)),
    "one activation element 1e4": Planted(lambda: OfOutput(lambda x: spoil(x, 1e4))),
    "fp16 overflow of an activation": Planted(
        lambda: OfOutput(lambda x: (x.float() * 1e6).half().float().to(x.dtype), 4), lambda t: t.recipe.precision == "fp16"
    ),
    "learning rate x100, 3 steps": Planted(lambda: Rate(lambda rate, since: rate * (100.0 if since < 3 else 1.0))),
    "learning rate x10 from now on": Planted(lambda: Rate(lambda rate, since: rate * 10.0)),
    "schedule restarts (lr from 0 to its peak)": Planted(
        lambda: Rate(lambda rate, since: rate * min(1.0, (since + 1) / 100)), grows=True
    ),
    "corrupted batch, one step": Planted(lambda: OfBatch(lambda t, b, rng: t.data.corrupted(b, rng), 1)),
    "batch of padding, one step": Planted(lambda: OfBatch(_padding, 1)),
    "labels shuffled, 5 steps": Planted(lambda: OfBatch(_permuted, 5)),
    "one batch repeated": Planted(Repeated, grows=True),
    "exponent bit of a weight": Planted(lambda: Once(_flip)),
    "a layer's weights zeroed": Planted(lambda: Once(_zero_weight)),
    "a layer's gradient zeroed": Planted(ZeroedGradient),
    "a layer frozen": Planted(Frozen),
    "a layer left out of the optimizer": Planted(DroppedGroup),
    "gradients x8 (a missing mean)": Planted(lambda: OfGradient(_scaled_gradients)),
    "query weights x30": Planted(lambda: Once(_scale_query), _has((Attention, nn.MultiheadAttention))),
    "router collapse": Planted(lambda: Once(_collapse_router), _has(Experts)),
    "an expert dies": Planted(DeadExpert, _has(Experts)),
    "exp_avg_sq lost": Planted(lambda: Once(_zero_state("exp_avg_sq")), _holds("exp_avg_sq")),
    "momentum lost": Planted(lambda: Once(_zero_state(*_MOMENTA)), _holds(*_MOMENTA)),
}
"""Name -> fault."""

LAST = {
    "gpt": "query weights x30",
    "moe": "router collapse",
    "convnet": "corrupted batch, one step",
    "vit": "activation x1000, one step",
    "lstm": "NaN in a gradient",
    "fp16": "fp16 overflow of an activation",
    "tiny": "query weights x30",
    "diffusion": "exponent bit of a weight",
}
"""Recipe -> the fault that ends its recordings."""
