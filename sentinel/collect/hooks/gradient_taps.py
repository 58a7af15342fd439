"""Tensor hooks that measure gradients in the backward, each under the micro_step of the forward that made the tensor."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from sentinel.collect.parallel.pipelining import in_inference
from sentinel.collect.parallel.placements import ORDINARY, arrived
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.native import take_gradient
from sentinel.record import Kind

if TYPE_CHECKING:
    from sentinel.collect.hooks.chunk import Chunk


NO_SUMMAND = "the row of this rank's part of its gradient is missing from this step"


KEYS = itertools.count(-1, -1)
"""Keys of our hooks in a tensor's dictionary of hooks, falling from -1; those of torch's handles rise from 0."""


def hang(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` with the gradient of a tensor that has a grad_fn, for as long as its graph exists.

    As `Tensor.register_hook`, without the handle by which a hook is taken off again: making one costs more than all else.

    Source: torch/_tensor.py, Tensor.register_hook.
    """
    node: Any = tensor.grad_fn
    join = getattr(node, "_register_hook_dict", None)
    if type(tensor) is not torch.Tensor or join is None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        join(tensor)
    hooks[next(KEYS)] = hook


class GradientTap:
    """A tensor hook that measures one gradient, once, under the micro-step of its own forward."""

    __slots__ = ("chunk", "entry", "handle", "is_done", "micro_step", "step")

    def __init__(self, chunk: Chunk, entry: TensorEntry, micro_step: int) -> None:
        self.chunk = chunk
        self.entry = entry
        self.micro_step = micro_step
        self.step = chunk.recorder.ended_steps  # Its number may be changed while it runs.
        self.handle: RemovableHandle | None = None
        self.is_done = False

    def __call__(self, gradient: torch.Tensor | None) -> None:
        recorder = self.chunk.recorder
        costs = recorder.recording.costs
        former = costs.turn_to(costs.kind_of(self.entry)) if costs.is_on else 0
        try:
            if not take_gradient(self, gradient):
                self._take(gradient)
        except Exception as error:
            recorder.guard(self.entry.name, error, given=gradient, lost="the row of its gradient in this step is missing")
        finally:
            if costs.is_on:
                costs.turn_to(former)

    def _take(self, gradient: torch.Tensor | None) -> None:
        chunk, recorder = self.chunk, self.chunk.recorder
        if gradient is None or self.is_done or not recorder.is_alive:
            return  # Of a node with several outputs, one that nobody used has none.
        self.is_done = True  # Zero-bubble schedules walk the graph twice.
        if self.handle is not None:
            self.handle.remove()
        if self.step != recorder.ended_steps or in_inference() or chunk.recomputed.is_answered(self.entry, self.micro_step):
            return
        chunk.backward_micro_step = self.micro_step
        if type(gradient) not in ORDINARY:
            if hasattr(gradient, "placements"):  # A gradient may be partial where its tensor was not.
                recorder.sites.describe(self.entry, gradient)
            gradient = arrived(gradient)
        recorder.sites.observe(self.entry, gradient, self.micro_step)
        chunk.passes.after_backward_hook(chunk)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientTap:
        return self


class SummandTap(GradientTap):
    """A tensor hook that measures a gradient only while it is still one rank's summand.

    On the way back through a DTensor made of a tensor that all ranks hold alike, the gradient is a sum over the ranks that
    is formed only then: behind it a NaN is on all ranks, here only on the rank that made it. So its site lies between that
    tensor's and those that follow: in backward every rank's summand comes before the sum on any rank.
    """

    __slots__ = ("name", "source")

    def __init__(self, chunk: Chunk, source: TensorEntry, name: str) -> None:
        super().__init__(chunk, source, chunk.micro_step)
        self.source = source
        self.name = name

    def __call__(self, gradient: torch.Tensor | None) -> None:
        placements = getattr(gradient, "placements", ())
        if gradient is None or self.is_done or not any(placement.is_partial() for placement in placements):
            return
        try:
            self.entry = self.chunk.recorder.sites.entry(self.chunk.vpp_stage, self.name, Kind.DGRAD_IN, gradient)
            self.entry.site_pos = self.chunk.order.behind(self.source)
        except Exception as error:
            self.chunk.recorder.guard(self.name, error, given=gradient, lost=NO_SUMMAND)
            return
        super().__call__(gradient)


class BackwardMark:
    """A tensor hook on a chunk's output that measures nothing: it reports that a backward runs, and its micro_step."""

    __slots__ = ("chunk", "micro_step")

    def __init__(self, chunk: Chunk, micro_step: int) -> None:
        self.chunk = chunk
        self.micro_step = micro_step

    def __call__(self, gradient: torch.Tensor) -> None:
        recorder = self.chunk.recorder
        try:
            if recorder.is_alive and not in_inference():
                self.chunk.backward_micro_step = self.micro_step
                self.chunk.passes.after_backward_hook(self.chunk)
        except Exception as error:
            recorder.guard("", error, lost="that a backward runs was not noted: the step may end late")
