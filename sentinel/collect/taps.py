"""Hooks on modules and tensors: what passes a site becomes a row.

A forward hook takes inputs and outputs, a tensor hook takes gradients. Nothing here changes, copies or waits for a
tensor, and nothing escapes into autograd: every hook ends at `Recorder.guard`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.aliases import Aliases
from sentinel.collect.gradient_taps import BackwardMark, GradientTap, SummandTap
from sentinel.collect.inert import Inert
from sentinel.collect.nesting import tensors_in
from sentinel.collect.pipelining import in_inference
from sentinel.collect.placements import arrived, is_async, local_of
from sentinel.collect.recorder import Recorder
from sentinel.collect.structure import Border, Structure
from sentinel.collect.tensor_parallel import LocalTensors
from sentinel.collect.tensors import Entry
from sentinel.record import Flag, Kind

_graph_task = getattr(torch._C, "_current_graph_task_id", None)


def in_backward() -> bool:
    """Whether this thread is inside a backward: a forward that runs now is a recompute.

    `_current_graph_task_id` is private; without it, recomputes inside a backward cannot be told and are counted.
    """
    return _graph_task is not None and _graph_task() >= 0


SITE_GAP = 64
"""Distance of two neighbouring sites in `site_pos`: room for sites that are seen first in a later forward."""


class Chunk:
    """One model chunk of this rank: its modules, its micro-steps, and which tensors were seen in the running forward."""

    def __init__(self, recorder: Recorder, root: nn.Module, structure: Structure, vpp_stage: int, depth: int) -> None:
        self.recorder = recorder
        self.root = root
        self.structure = structure
        self.vpp_stage = vpp_stage
        self.depth = depth
        self.offsets: dict[str, int] = {}
        """As ChunkInfo.offsets: an adapter's trainer counts its layers and experts itself."""
        self.tied: dict[str, str] = {}
        """Local name of a parameter that is a copy of another chunk's -> canonical name of that one."""
        self.in_forward = False
        self.micro_step = 0
        self.num_forwards = 0
        self.had_backward = False
        self.backward_micro_step = 0
        self.generation = 0
        self.next_pos = SITE_GAP
        self._cursor = 0
        """site_pos of the site that the running forward passed last."""
        self._is_placed = False
        """A whole forward has passed since the taps were changed: every usual site has its place."""
        self.recomputes = False
        """A forward without graph was seen inside a training forward: reentrant checkpointing."""
        self.without_graph: set[int] = set()
        """Ids of the entries whose tensors were seen in such a forward."""
        self._asked_twice: dict[tuple[int, int], bool] = {}
        """(id of a gradient's entry, micro_step) hooked in such a forward and again in its recompute -> was measured."""
        self.has_trained = False
        self.taps: dict[str, ModuleTap] = {}
        self._pending: list[tuple[str, torch.Tensor, Entry, int]] = []
        """Outputs that a collective still writes: (module, tensor, site, reserved row)."""
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, Entry]] = {}
        self.locals = LocalTensors()
        self.aliases: Aliases | None = None
        """An adapter's, whose trainer hands tensors on under new objects."""
        self._handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Chunk:
        return self  # A copied model (an EMA, say) carries hooks that see it is not theirs, and do nothing.

    def __reduce__(self) -> Any:
        return Inert, ()

    # -- the chunk's own forward -------------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch the chunk's forward; the taps are installed one by one by `plan`."""
        self._handles = [
            self.root.register_forward_pre_hook(self._root_pre, with_kwargs=True),
            self.root.register_forward_hook(self._root_post, always_call=True),
        ]

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for tap in self.taps.values():
            tap.remove()
        self.taps = {}

    def plan(self, wanted: Callable[[str], frozenset[Kind]], black_box: bool) -> None:
        """Install, change or remove taps: `wanted(module name)` are the kinds to take there, borders come on top."""
        borders: dict[str, list[Border]] = {}
        if black_box:
            for border in self.structure.borders:
                borders.setdefault(border.module, []).append(border)
        for name, module in self.structure.modules.items():
            kinds, mine = wanted(name), borders.get(name, [])
            tap = self.taps.get(name)
            if not kinds and not mine:
                if tap is not None:
                    tap.remove()
                    del self.taps[name]
                continue
            if tap is None:
                tap = self.taps[name] = ModuleTap(self, name, module)
            tap.configure(kinds, mine)
        self.generation += 1
        self.next_pos, self._is_placed = SITE_GAP, False

    def _is_training(self) -> bool:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_inference() or in_backward():
            return False
        if self.root.training:
            self.has_trained = True
            return True
        # A model that was never put into training mode is trained in evaluation mode; others are evaluated in it.
        return not self.has_trained

    def _root_pre(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self.root or not self.recorder.is_alive:
            return
        try:
            self.in_forward = False
            if self.recorder.is_paused or not self._is_training():
                return
            self.recorder.before_forward(self)
            self.in_forward = True
            self._seen, self._pending, self._cursor = {}, [], 0
            self.locals.begin(self.recorder.sites.place)
            if self.aliases is not None:
                self.aliases.forget()
            for tap in self.taps.values():
                tap.come_last()
            own = self.taps.get("")
            if own is not None:
                own.take_inputs(args, kwargs)
        except Exception as error:
            self.recorder.guard("", error)

    def _root_post(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self.root or not self.in_forward:
            return
        try:
            # Called with None while an exception passes: the forward failed and may be tried again.
            if output is None and sys.exc_info()[0] is not None:
                self.in_forward, self._seen, self._pending = False, {}, []
                self.locals.forget()
                self.recorder.forward_failed(self)
                return
            tap = self.taps.get("")
            if tap is not None:
                tap.take_outputs(output)
            self.settle("")
            self.in_forward, self._seen = False, {}
            if not self._is_placed:
                self._is_placed = True
                for one in self.taps.values():
                    one.rest()
            self._mark(output)
            if self.locals.is_split:
                self.recorder.sites.placed(self.locals.resolve(tensor for _, tensor in tensors_in(output)))
                self.locals.forget()
            self.recorder.after_forward(self)
        except Exception as error:
            self.in_forward = False
            self.recorder.guard("", error)

    def _mark(self, output: Any) -> None:
        """A bare hook on the output tells that a backward runs, and whose: also where its gradient is not measured here."""
        for _, tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(BackwardMark(self, self.micro_step))  # type: ignore[no-untyped-call]
                return

    # -- tensors -----------------------------------------------------------------------------------------------------

    def known(self, tensor: torch.Tensor) -> Entry | None:
        """Return the entry under which this very tensor, unchanged since, was already measured in this forward."""
        found = self._seen.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1] == tensor._version:
            return found[2]
        return self.aliases.find(tensor) if self.aliases is not None else None

    def remember(self, tensor: torch.Tensor, entry: Entry) -> None:
        """Let later sites of this forward find the tensor."""
        self._seen[id(tensor)] = (weakref.ref(tensor), tensor._version, entry)
        self.locals.remember(tensor, entry)
        if self.aliases is not None:
            self.aliases.remember(tensor, entry)

    def source(self, tensor: torch.Tensor) -> Entry | None:
        """Return the entry of the logical tensor that this one holds in another way: made a DTensor, gathered, localised."""
        found = self.locals.source(tensor)
        entry = self.known(found) if isinstance(found, torch.Tensor) else found
        # Of a sum that was not formed yet only the summands were measured: what is formed of it is measured by itself.
        return None if entry is None or "partial" in entry.placements.values() else entry

    def postpone(self, module: str, tensor: torch.Tensor, entry: Entry, row: int) -> None:
        """Keep an output that a collective still writes until somebody has read it."""
        if row >= 0 or self.recorder.sites.has_onlookers:
            self._pending.append((module, tensor, entry, row))

    def settle(self, module: str, one: torch.Tensor | None = None) -> None:
        """Measure what was postponed and is read by now: inside `module`, which has ended, or `one` about to be read."""
        if not self._pending:
            return
        left = []
        for inner, tensor, entry, row in self._pending:
            if tensor is one or (one is None and (not module or inner.startswith(module + "."))):
                self.recorder.sites.fill(row, entry, arrived(tensor), self.micro_step)
            else:
                left.append((inner, tensor, entry, row))
        self._pending = left

    def origin(self, tensor: torch.Tensor) -> tuple[Any, int] | None:
        """Return the node that made the logical tensor, where that is not the one that made this tensor of it."""
        if not self.locals.is_split or tensor.grad_fn is None:
            return None
        origin = self.locals.origin(tensor)
        return None if origin[0] is tensor.grad_fn else origin

    def place_site(self, entry: Entry) -> None:
        """Give the site its place in forward order, at its first appearance since the taps were last changed.

        One that appears later (an output that is usually handed on as it is, until somebody changes it) comes right behind
        the site before it, so that ranks which never see it agree on all others.
        """
        if entry.generation != self.generation:
            entry.generation = self.generation
            if self._is_placed:
                entry.site_pos = self._cursor + 1
            else:
                entry.site_pos = self.next_pos
                self.next_pos += SITE_GAP
        self._cursor = entry.site_pos

    def note_without_graph(self, entry: Entry, tensor: torch.Tensor, kind: Kind) -> None:
        """A forward that reentrant checkpointing will run again: what is made in it has no gradient, what it is given has.

        Megatron adds residuals with gradients on: where an input comes from cannot be told before the backward.
        """
        self.recomputes = True
        if kind is Kind.ACTIVATION or tensor.grad_fn is not None or not tensor.requires_grad:
            self.without_graph.add(entry.id)
            if tensor.requires_grad and entry.grad is not None:
                self._asked_twice[entry.grad.id, self.micro_step] = False

    def is_answered(self, entry: Entry, micro_step: int) -> bool:
        """Whether another hook has measured this gradient; from now on it is."""
        key = (entry.id, micro_step)
        if key not in self._asked_twice:
            return False
        was, self._asked_twice[key] = self._asked_twice[key], True
        return was

    def hook_gradient(self, tensor: torch.Tensor, entry: Entry, origin: tuple[Any, int] | None = None) -> None:
        """Take the gradient of `tensor` when its backward comes, once; or that of the logical tensor at its origin."""
        hook = GradientTap(self, entry, self.micro_step)
        if origin is not None:
            node, number = origin
            node.register_prehook(lambda gradients: None if gradients[number] is None else hook(gradients[number]))
            return
        handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if tensor.grad_fn is None:
            # A leaf outlives the step: a pipeline's receive buffer would collect one hook a step.
            hook.handle = handle
            self.recorder.keep_until_step_ends(handle)


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
