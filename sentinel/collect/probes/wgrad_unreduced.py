"""The gradient of each micro-batch on this rank, before ranks are averaged: hooks on the leaves that autograd writes to.

A hook on a leaf sees what one backward adds, never the running sum, and before DDP, FSDP, Megatron or DeepSpeed reduce it:
all of them work behind the accumulation. What one backward adds to a weight that is used several times in it comes summed.
A split backward (zero bubble) makes the gradients of weights later, in a walk of its own: they are seen then.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.hooks.backwards import in_backward
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.nesting import tensors_in
from sentinel.collect.hooks.parameters import Parameter
from sentinel.collect.hooks.pickle_stub import stub_hook
from sentinel.collect.parallel.pipelining import in_inference
from sentinel.collect.parallel.placements import arrived, axes_of, is_dtensor, part_of, placements_of
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.place import Place
from sentinel.record import Kind

_NAME = "wgrad_unreduced"


class WgradUnreduced:
    """One row for each parameter and micro-step; the rows of micro-steps are folded unless `per_micro_step` is asked for."""

    def __init__(self, context: ProbeContext) -> None:
        self.context = context
        self._marks: dict[int, BackwardOrder] = {}
        """vpp_stage -> which micro-step's backward runs there."""
        self._handles: list[RemovableHandle] = []
        self._leaves: dict[int, tuple[weakref.ref[torch.Tensor], RemovableHandle]] = {}
        self._num_known = -1
        self._seen: set[int] = set()
        """Entries that have a row in the running step."""
        self._roots: list[Owner] = []
        context.events.planned.subscribe(_NAME, self._plan)
        context.events.begun.subscribe(_NAME, self._begin)
        context.events.removed.subscribe(_NAME, self._remove)

    def _begin(self) -> None:
        self._seen.clear()
        if self.context.plan.wants(Kind.WGRAD_UNREDUCED):
            if self._num_known != len(self.context.parameters.all):
                self._plan()
            for root in self._roots:  # Its own forward has begun: hooks put on it now are not called any more.
                root.look()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for leaf, handle in self._leaves.values():
            if leaf() is not None:
                handle.remove()
        self._handles, self._leaves, self._roots, self._num_known = [], {}, [], -1

    def _plan(self) -> None:
        """Put hooks where gradients are wanted: on leaves, and on the modules that hold them."""
        self._remove()
        context = self.context
        if not context.plan.wants(Kind.WGRAD_UNREDUCED):
            return
        self._num_known = len(context.parameters.all)
        wanted = {
            (one.entry.chunk, one.entry.name): one
            for one in context.parameters.all
            if one.param.requires_grad and context.plan.wants_at(Kind.WGRAD_UNREDUCED, one.entry.name, one.entry.chunk)
        }
        for chunk in context.chunks if wanted else ():
            order = self._marks.setdefault(chunk.vpp_stage, BackwardOrder(chunk))
            for name, module in chunk.structure.modules.items():
                prefix = f"{name}." if name else ""
                mine = {attr: wanted.get((chunk.vpp_stage, prefix + attr)) for attr in module._parameters}
                owner = Owner(self, chunk, module, {attr: one for attr, one in mine.items() if one is not None})
                if not owner.parameters and module is not chunk.root:
                    continue
                self._handles.append(context.watch(_NAME, chunk, name, module, order.note_outputs))
                for one in owner.parameters.values():
                    self.hook(one, one.param, chunk)
                if any(is_dtensor(p.param) or hasattr(p.param, "_fsdp_flattened") for p in owner.parameters.values()):
                    self._handles.append(module.register_forward_pre_hook(owner))
                    if module is chunk.root:
                        self._roots.append(owner)

    def hook(self, one: Parameter, leaf: torch.Tensor, chunk: Chunk) -> None:
        """Put a hook on a leaf, unless it has one already."""
        known = self._leaves.get(id(leaf))
        if known is not None and known[0]() is leaf:
            return
        handle = leaf.register_hook(LeafHook(self, one, chunk))  # type: ignore[no-untyped-call]
        self._leaves[id(leaf)] = weakref.ref(leaf), handle

    def micro_step(self, chunk: Chunk) -> int:
        """Return the micro_step whose backward runs on a chunk."""
        order = self._marks[chunk.vpp_stage]
        if order.step == chunk.recorder.ended_steps:
            return order.micro_step
        return chunk.backward_micro_step if chunk.had_backward else chunk.micro_step

    def measure(self, one: Parameter, gradient: torch.Tensor, micro_step: int, entry: TensorEntry) -> None:
        """Measure the gradient of one backward into a row. Launches one kernel; does not wait."""
        context = self.context
        if getattr(one.param, "grad_added_to_main_grad", False):
            # The kernel that made it has added it to main_grad; what autograd hands on here was never written.
            message = f"{entry.name}: gradient_accumulation_fusion adds its gradient to main_grad, nobody sees it alone"
            context.recording.report("unsupported", message, f"{_NAME} {entry.name}")
            return
        if gradient.layout is not torch.strided:
            message = f"{entry.name}: a gradient of layout {gradient.layout} is not measured"
            context.recording.report("unsupported", message, f"{_NAME} {entry.name}")
            return
        if entry.id not in self._seen:
            self._seen.add(entry.id)
            context.count({Kind.WGRAD_UNREDUCED.label: 1})
        context.recording.observe(entry, arrived(gradient), micro_step)


class BackwardOrder:
    """Knows the micro_step whose backward runs on a chunk, by the gradients of its modules' outputs as they arrive."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.micro_step = 0
        self.step = -1

    def note_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, micro_step: int) -> None:
        """Mark the outputs of a module: the gradients of its weights come right after those of its outputs."""
        mark = OutputMark(self, micro_step)
        for _, tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(mark)  # type: ignore[no-untyped-call]


class OutputMark:
    """A tensor hook that measures nothing: it notes the micro_step of the backward that reaches it."""

    __slots__ = ("_micro_step", "_order", "_step")

    def __init__(self, order: BackwardOrder, micro_step: int) -> None:
        self._order = order
        self._micro_step = micro_step
        self._step = order.chunk.recorder.ended_steps

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputMark:
        return self

    def __call__(self, gradient: torch.Tensor) -> None:
        if not in_inference():
            self._order.micro_step, self._order.step = self._micro_step, self._step


class Owner:
    """A forward pre-hook of a module whose parameters may be replaced while it runs: by gathered ones, or views of them."""

    def __init__(self, probe: WgradUnreduced, chunk: Chunk, module: nn.Module, parameters: dict[str, Parameter]) -> None:
        self.parameters = parameters
        self._probe = probe
        self._chunk = chunk
        self._module = module
        self._views: dict[str, weakref.ref[torch.Tensor]] = {}
        """Name of a parameter -> the tensor that took its place at the last look."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return self

    def __reduce__(self) -> Any:
        return stub_hook()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is self._module and self._chunk.recorder.is_alive and not torch.compiler.is_compiling():
            try:
                if self._chunk.in_forward or in_backward():
                    self.look()
            except Exception as error:
                self._probe.context.guard(_NAME, error, probe=_NAME)

    def look(self) -> None:
        """Hook the tensors that take the place of the parameters in the forward that begins."""
        for attr, one in self.parameters.items():
            # FSDP1 replaces the parameter by a plain attribute.
            value = self._module.__dict__.get(attr, self._module._parameters.get(attr))
            if not isinstance(value, torch.Tensor) or value is one.param or not value.requires_grad:
                continue
            if value.is_leaf:
                self._probe.hook(one, value, self._chunk)
            elif attr not in self._views or self._views[attr]() is not value:
                self._views[attr] = weakref.ref(value)
                value.register_hook(LeafHook(self._probe, one, self._chunk))  # type: ignore[no-untyped-call]


class LeafHook:
    """A tensor hook that measures what one backward adds to a parameter, or to a view that takes its place."""

    __slots__ = ("_chunk", "_entry", "_one", "_probe", "_seen")

    def __init__(self, probe: WgradUnreduced, one: Parameter, chunk: Chunk) -> None:
        self._probe = probe
        self._one = one
        self._chunk = chunk
        self._entry: TensorEntry | None = None
        self._seen: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> LeafHook:
        return self

    def __reduce__(self) -> Any:
        return stub_hook()

    def __call__(self, gradient: torch.Tensor) -> None:
        probe, chunk = self._probe, self._chunk
        context = probe.context
        if not chunk.recorder.is_alive or not context.is_measuring() or in_inference() or torch.compiler.is_compiling():
            return
        costs = context.recording.costs
        former = costs.turn_to_probe(_NAME)
        try:
            with torch.no_grad():
                entry = self._described(gradient)
                if context.plan.measures(entry):
                    probe.measure(self._one, gradient, probe.micro_step(chunk), entry)
        except Exception as error:
            context.guard(self._one.entry.name, error, probe=_NAME, given=gradient)
        finally:
            costs.turn_to(former)

    def _described(self, gradient: torch.Tensor) -> TensorEntry:
        context, one = self._probe.context, self._one
        place = context.place()
        seen = (gradient.shape, gradient.dtype, getattr(gradient, "placements", None), place)
        if self._entry is None or seen != self._seen:
            entry = context.table.entry(one.entry.chunk, one.entry.name, Kind.WGRAD_UNREDUCED)
            entry.site_pos = one.entry.site_pos
            held = context.parameters.storage.param(one.param)
            placements, part = placed(gradient, place, held.placements if held else {}, held.part if held else "")
            context.table.describe(entry, gradient, placements, part)
            self._entry, self._seen = entry, seen
        return self._entry


def placed(gradient: Any, place: Place, words: dict[str, str], part: str) -> tuple[dict[str, str], str]:
    """Return (axis -> placement, part) of an unreduced gradient: every data-parallel rank holds that of its own samples.

    words, part: of the parameter as its trainer holds it, for a gradient that is no DTensor.
    """
    if is_dtensor(gradient):
        placements = placements_of(gradient, Kind.WGRAD_UNREDUCED, place)
        said = {axis for axis, *_ in axes_of(gradient, place)}
        placements.update({axis: "shard" for axis in placements if axis in ("dp", "cp", "ep") and axis not in said})
        return placements, part_of(gradient, place, placements)
    placements = {axis: words.get(axis, "unknown") for axis in ("dp", "tp", "cp", "ep") if place.size(axis) > 1}
    for axis in placements:
        if axis in ("dp", "cp") or (axis == "ep" and placements[axis] == "replicate"):
            placements[axis] = "shard"
    # `etp=1` says more than the axes do; a stretch of the flattened parameter (`0:100`) is not what a backward makes.
    cuts = [word for word in part.split(",") if "=" in word and word.partition("=")[0] not in placements]
    if cuts:
        cuts += [f"{axis}={place.coordinate(axis)}" for axis, word in placements.items() if word == "shard"]
    return placements, ",".join(cuts)
