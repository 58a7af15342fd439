"""The taps of one module: what it takes and returns becomes rows, and its gradients are asked for.

Nothing here changes, copies or waits for a tensor, and nothing escapes into autograd: every hook ends at `Recorder.guard`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.gradient_taps import SummandTap
from sentinel.collect.inert import Inert
from sentinel.collect.nesting import tensors_in
from sentinel.collect.placements import is_async, local_of
from sentinel.collect.structure import Border
from sentinel.collect.tensors import Entry
from sentinel.record import Flag, Kind

if TYPE_CHECKING:
    from sentinel.collect.taps import Chunk

_graph_task = getattr(torch._C, "_current_graph_task_id", None)


def in_backward() -> bool:
    """Whether this thread is inside a backward: a forward that runs now is a recompute.

    `_current_graph_task_id` is private; without it, recomputes inside a backward cannot be told and are counted.
    """
    return _graph_task is not None and _graph_task() >= 0


class ModuleTap:
    """The hooks of one module."""

    def __init__(self, chunk: Chunk, name: str, module: nn.Module) -> None:
        self.chunk = chunk
        self.name = name
        self.module = module
        self.takes_in: frozenset[Kind] = frozenset()
        self.takes_out: frozenset[Kind] = frozenset()
        self.borders: dict[bool, Border] = {}
        self.takes_all = False
        """Every tensor of the site, not only the first as at a border."""
        self.may_rest = False
        """Steps that measure no module have no need of it: it sees no border under another name."""
        self._pre: RemovableHandle | None = None
        self._post: RemovableHandle | None = None
        self._inputs: dict[str, Entry] = {}
        self._outputs: dict[str, Entry] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleTap:
        return self

    def __reduce__(self) -> Any:
        return Inert, ()

    def configure(self, kinds: frozenset[Kind], borders: list[Border]) -> None:
        """Take these kinds here, and everything at a border; hooks that are not needed go."""
        self.may_rest = False
        self.borders = {border.is_input: border for border in borders}
        self.takes_all = bool(kinds)
        self.takes_in = kinds & {Kind.ACTIVATION_IN, Kind.DGRAD_IN}
        self.takes_out = kinds & {Kind.ACTIVATION, Kind.DGRAD}
        if True in self.borders:
            self.takes_in = frozenset({Kind.ACTIVATION_IN, Kind.DGRAD_IN})
        if False in self.borders:
            self.takes_out = frozenset({Kind.ACTIVATION, Kind.DGRAD})
        if self.name == "" and self.module is self.chunk.root:
            return  # The chunk's own hooks call this tap.
        if self.takes_in and self._pre is None:
            self._pre = self.module.register_forward_pre_hook(self._before, with_kwargs=True)
        elif not self.takes_in and self._pre is not None:
            self._pre.remove()
            self._pre = None
        if self.takes_out and self._post is None:
            self._post = self.module.register_forward_hook(self._after)
        elif not self.takes_out and self._post is not None:
            self._post.remove()
            self._post = None

    def rest(self) -> None:
        """A whole forward has passed: find out whether this tap is needed where only the black box is measured."""
        entries = [*self._inputs.values(), *self._outputs.values()]
        self.may_rest = not self.borders and not any(entry.flags & Flag.BORDER for entry in entries)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in (self._pre, self._post):
            if handle is not None:
                handle.remove()
        self._pre = self._post = None

    def come_last(self) -> None:
        """See what the next module sees: hooks that users added later may replace inputs and outputs."""
        pairs: Any = ((self._pre, self.module._forward_pre_hooks), (self._post, self.module._forward_hooks))
        for handle, hooks in pairs:
            if handle is not None and next(reversed(hooks)) != handle.id:
                hooks.move_to_end(handle.id)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        chunk = self.chunk
        if module is not self.module or not chunk.recorder.is_alive or (self.may_rest and not chunk.recorder.sites.is_due):
            return
        try:
            if chunk.in_forward and not in_backward():
                self.take_inputs(args, kwargs)
            elif chunk.recomputes and torch.is_grad_enabled() and in_backward():
                for source in (args, kwargs):
                    self._take_recomputed(source, self._inputs, Kind.DGRAD_IN in self.takes_in)
        except Exception as error:
            chunk.recorder.guard(self.name, error)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        chunk = self.chunk
        if module is not self.module or not chunk.recorder.is_alive or (self.may_rest and not chunk.recorder.sites.is_due):
            return
        try:
            if chunk.in_forward and not in_backward():
                self.take_outputs(output)
            elif chunk.recomputes and torch.is_grad_enabled() and in_backward():
                self._take_recomputed(output, self._outputs, Kind.DGRAD in self.takes_out)
        except Exception as error:
            chunk.recorder.guard(self.name, error)

    def take_inputs(self, args: Any, kwargs: Any) -> None:
        """Measure the inputs that no site has measured in this forward, and name the others a second time."""
        chunk, sites = self.chunk, self.chunk.recorder.sites
        if not self.takes_in:
            return
        is_first = True
        for source in (args, kwargs):
            for path, tensor in tensors_in(source):
                was_first, is_first = is_first, False
                # Beside the first, what carries no gradient is a mask or a table, and a mask may hold -inf by design; a
                # parameter that is handed on (a tied weight, a bias to be fused) is measured as what it is.
                if not was_first and (not self.takes_all or not tensor.requires_grad or isinstance(tensor, nn.Parameter)):
                    continue
                entry = chunk.known(tensor)
                if entry is not None:
                    chunk.settle(self.name, tensor)
                    sites.add_consumer(entry, self.name)
                    if was_first:
                        self._widen_border(entry, True)
                    continue
                entry = chunk.source(tensor)
                if entry is not None:
                    chunk.remember(tensor, entry)
                    sites.add_consumer(entry, self.name)
                    if was_first:
                        self._widen_border(entry, True)
                    if Kind.DGRAD_IN in self.takes_in and tensor.requires_grad and tensor.grad_fn is not None:
                        tensor.register_hook(SummandTap(chunk, entry, self.name + path))  # type: ignore[no-untyped-call]
                    continue
                entry = self._inputs.get(path)
                if entry is None:
                    entry = self._inputs[path] = sites.entry(chunk.vpp_stage, self.name + path, Kind.ACTIVATION_IN, tensor)
                if was_first:
                    self._name_border(entry, True)
                self._take(entry, tensor, Kind.ACTIVATION_IN, Kind.DGRAD_IN, path, self.takes_in)

    def take_outputs(self, output: Any) -> None:
        """Measure the outputs that no inner site has measured in this forward, and name the others a second time."""
        chunk, sites = self.chunk, self.chunk.recorder.sites
        if not self.takes_out:
            return
        chunk.settle(self.name)
        is_first = True
        for path, tensor in tensors_in(output):
            was_first, is_first = is_first, False
            if not was_first and (not self.takes_all or isinstance(tensor, nn.Parameter)):
                continue
            entry = chunk.known(tensor) or chunk.source(tensor)
            if entry is not None:
                chunk.remember(tensor, entry)
                sites.add_producer(entry, self.name + path)
                if was_first:
                    self._widen_border(entry, False)
                continue
            entry = self._outputs.get(path)
            if entry is None:
                entry = self._outputs[path] = sites.entry(chunk.vpp_stage, self.name + path, Kind.ACTIVATION, tensor)
            if was_first:
                self._name_border(entry, False)
            self._take(entry, tensor, Kind.ACTIVATION, Kind.DGRAD, path, self.takes_out)

    def _take(
        self, entry: Entry, tensor: torch.Tensor, kind: Kind, grad_kind: Kind, path: str, takes: frozenset[Kind]
    ) -> None:
        chunk, sites = self.chunk, self.chunk.recorder.sites
        chunk.place_site(entry)
        chunk.remember(tensor, entry)
        if kind in takes:
            if is_async(tensor):
                chunk.postpone(self.name, tensor, entry, sites.reserve(entry, chunk.micro_step))
            else:
                sites.observe(entry, local_of(tensor), chunk.micro_step)
        if grad_kind in takes and not isinstance(tensor, nn.Parameter):
            origin = chunk.origin(tensor) if kind is Kind.ACTIVATION_IN else None
            if entry.grad is None:
                whole = tensor if origin is None else local_of(tensor)
                entry.grad = sites.entry(chunk.vpp_stage, self.name + path, grad_kind, whole)
                entry.grad.border, entry.grad.border_index = entry.border, entry.border_index
                entry.grad.consumers, entry.grad.also = list(entry.consumers), list(entry.also)
                entry.grad.flags |= entry.flags & Flag.BORDER
            entry.grad.site_pos = entry.site_pos
            if torch.is_grad_enabled():
                chunk.without_graph.discard(entry.id)
            else:
                chunk.note_without_graph(entry, tensor, kind)
            is_made_without_graph = entry.id in chunk.without_graph and kind is Kind.ACTIVATION
            if tensor.requires_grad and not is_made_without_graph and sites.is_looked_at(entry.grad):
                chunk.hook_gradient(tensor, entry.grad, origin)
        chunk.locals.ask(entry, tensor, self.module, kind is Kind.ACTIVATION)

    def _take_recomputed(self, values: Any, entries: dict[str, Entry], is_wanted: bool) -> None:
        """Reentrant checkpointing ran the first forward without a graph: the gradients hang on the recomputed tensors."""
        chunk = self.chunk
        for path, tensor in tensors_in(values) if is_wanted else ():
            entry = entries.get(path)
            if entry is None or entry.grad is None or entry.id not in chunk.without_graph:
                continue
            if tensor.requires_grad and chunk.known(tensor) is None and chunk.recorder.sites.is_looked_at(entry.grad):
                chunk.remember(tensor, entry)
                micro_step, chunk.micro_step = chunk.micro_step, chunk.backward_micro_step
                chunk.hook_gradient(tensor, entry.grad)
                chunk.micro_step = micro_step

    def _name_border(self, entry: Entry, is_input: bool) -> None:
        border = self.borders.get(is_input)
        if border is not None and not entry.border:
            entry.border, entry.border_index = border.label, border.index
            entry.flags |= Flag.BORDER

    def _widen_border(self, entry: Entry, is_input: bool) -> None:
        """One tensor may be two borders (a chunk that begins with a block): its gradient was made behind the later one."""
        border = self.borders.get(is_input)
        if border is None or entry.chunk != self.chunk.vpp_stage:
            return
        if not entry.border:
            entry.border, entry.border_index = border.label, border.index
            entry.flags |= Flag.BORDER
        grad = entry.grad
        if grad is not None and grad.border_index < border.index:
            grad.border, grad.border_index = border.label, border.index
            grad.flags |= Flag.BORDER
