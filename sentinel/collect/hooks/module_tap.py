"""The taps of one module: what it takes and returns becomes rows, and its gradients are asked for.

Nothing here changes, copies or waits for a tensor, and nothing escapes into autograd: every hook ends at `Recorder.guard`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.compiled.graphs import compiler_is_back, compiler_steps_aside, run_as_it_is, trace_tensors
from sentinel.collect.compiled.ops import (
    ENTERS_GRAPH,
    HAS_GRADIENT,
    IN_GRAPH,
    IS_FIRST,
    IS_INPUT,
    IS_PARAMETER,
    IS_WITHOUT_GRAPH,
    LEAVES_GRAPH,
    NO_TICKET,
    Ticket,
    enlist,
    new_serial,
)
from sentinel.collect.hooks.gradient_taps import KEYS, GradientTap, SummandTap
from sentinel.collect.hooks.nesting import tensors_in
from sentinel.collect.hooks.pickle_stub import inert_methods
from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.hooks.sites import BORDER
from sentinel.collect.hooks.structure import Border
from sentinel.collect.kernels.native import NativeKernel
from sentinel.collect.parallel.pipelining import INFERENCE_GUARD
from sentinel.collect.parallel.placements import is_async, local_of
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.native import take_again, tensor_reader
from sentinel.record import Kind

if TYPE_CHECKING:
    from sentinel.collect.hooks.chunk import Chunk

INPUTS = frozenset({Kind.ACTIVATION_IN, Kind.DGRAD_IN})
OUTPUTS = frozenset({Kind.ACTIVATION, Kind.DGRAD})
NO_INPUTS = "rows of its inputs, and of their gradients, are missing from this step"
NO_OUTPUTS = "rows of its outputs, and of their gradients, are missing from this step"
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Returns a number for the backward that this thread is inside of; -1: none, or nobody can tell, for it is private."""


def in_backward() -> bool:
    """Whether this thread is inside a backward: a forward that runs now is a recompute.

    Where nobody can tell, recomputes inside a backward are counted.
    """
    return graph_task() >= 0


class ModuleTap:
    """The hooks of one module."""

    def __init__(self, chunk: Chunk, name: str, module: nn.Module) -> None:
        self.chunk = chunk
        self.name = name
        self.module = module
        self.takes_in: frozenset[Kind] = frozenset()
        self.takes_out: frozenset[Kind] = frozenset()
        self._asks = {True: False, False: False}
        """Whether it is an input -> its gradient is taken."""
        self._measures = {True: False, False: False}
        """The same of the tensor itself."""
        self.borders: dict[bool, Border] = {}
        self.takes_all = False
        """Every tensor of the site, not only the first as at a border."""
        self.may_rest = False
        """Steps that measure no module have no need of it: it sees no border under another name."""
        self._pre: RemovableHandle | None = None
        self._post: RemovableHandle | None = None
        self._inputs: dict[str, TensorEntry] = {}
        self._outputs: dict[str, TensorEntry] = {}
        self.site = enlist(self)
        self.is_border_in = self.is_border_out = False
        """As in `borders`, for graphs: a guard each."""
        self.stays = False
        """In a compiled part: hooks stay on, whatever is wanted."""
        self.has_passed = False
        """Its module was called, and was seen."""
        self._recomputed: set[str] = set()
        """Paths of inputs that a gradient goes through, as reentrant checkpointing shows when it runs a forward again."""
        self._taken_over: set[tuple[bool, str]] = set()
        """(is input, path) of the borders that went on, in a compiled graph, where another site had met their tensor."""
        self._met: dict[tuple[bool, str], TensorEntry] = {}
        """(is input, path) -> as what a border's tensor was measured at another site, before it was measured here."""
        self.has_gradient = False
        """It gave out a tensor that a gradient goes through."""
        self._former: list[Any] = []
        """What `compiler_is_back` needs, while the module runs without it."""
        self._answers: dict[tuple[bool, str], tuple[TensorEntry, bool]] = {}
        """(is input, path) -> what passed there in the last compiled forward, and whether its gradient is wanted."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleTap:
        return self

    def __reduce__(self) -> Any:
        return inert_methods(type(self))

    def configure(self, kinds: frozenset[Kind], borders: list[Border]) -> None:
        """Take these kinds here, and everything at a border; hooks that are not needed go."""
        self.may_rest = False
        self.borders = {border.is_input: border for border in borders}
        self.takes_all = bool(kinds)
        self.takes_in = kinds & INPUTS
        self.takes_out = kinds & OUTPUTS
        # A tensor of this site may turn out to be a border: then it is measured with its gradient, whatever is wanted here.
        if True in self.borders or (self.takes_in and self.chunk.wants_borders):
            self.takes_in = INPUTS
        if False in self.borders or (self.takes_out and self.chunk.wants_borders):
            self.takes_out = OUTPUTS
        self._asks = {True: Kind.DGRAD_IN in self.takes_in, False: Kind.DGRAD in self.takes_out}
        self._measures = {True: Kind.ACTIVATION_IN in self.takes_in, False: Kind.ACTIVATION in self.takes_out}
        self.is_border_in, self.is_border_out = True in self.borders, False in self.borders
        self.has_passed = False
        if self is self.chunk.own:
            return  # The chunk's own hooks call this tap.
        if (self.takes_in or self.stays) and self._pre is None:
            self._pre = self.module.register_forward_pre_hook(self._before, with_kwargs=True)
        elif not (self.takes_in or self.stays) and self._pre is not None:
            self._pre.remove()
            self._pre = None
        if (self.takes_out or self.stays) and self._post is None:
            self._post = self.module.register_forward_hook(self._after)
        elif not (self.takes_out or self.stays) and self._post is not None:
            self._post.remove()
            self._post = None

    def stand(self) -> None:
        """Keep hooks on from now on, whatever is wanted: a compiler will trace a graph through them."""
        self.stays = True
        if self is self.chunk.own:
            return  # The chunk's own hooks call this tap.
        if self._pre is None:
            self._pre = self.module.register_forward_pre_hook(self._before, with_kwargs=True)
        if self._post is None:
            self._post = self.module.register_forward_hook(self._after)

    def rest(self) -> None:
        """A whole forward has passed: find out whether this tap is needed where only the black box is measured."""
        entries = [*self._inputs.values(), *self._outputs.values()]
        self.may_rest = not self.borders and not any(entry.flags & BORDER for entry in entries)

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
        if torch.compiler.is_compiling():
            trace_tensors(self.site, module, (args, kwargs), self.is_border_in, IS_INPUT | IS_FIRST)
            return
        former, costs = compiler_steps_aside(), self.chunk.recorder.recording.costs
        payer = costs.turn_to(costs.first_due(self.takes_in)) if costs.is_on else 0
        try:
            if former is not None or kwargs or len(args) != 1 or not take_again(self, args[0], True, module):
                self._called(module, args, kwargs)
        except Exception as error:
            self.chunk.recorder.guard(self.name, error, given=(args, kwargs), lost=NO_INPUTS)
        finally:
            if costs.is_on:
                costs.turn_to(payer)
            if former is not None and self._is_left_alone(module):
                self._former.append(former)  # Until it returns; if it raises, until the compiled call has ended.
            else:
                compiler_is_back(former)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            trace_tensors(self.site, module, (output,), self.is_border_out, IS_FIRST)
            return
        former, costs = compiler_steps_aside(), self.chunk.recorder.recording.costs
        payer = costs.turn_to(costs.first_due(self.takes_out)) if costs.is_on else 0
        try:
            if former is not None or not take_again(self, output, False, module):
                self._returned(module, output)
        except Exception as error:
            self.chunk.recorder.guard(self.name, error, given=output, lost=NO_OUTPUTS)
        finally:
            if costs.is_on:
                costs.turn_to(payer)
            compiler_is_back(self._former.pop() if self._former else former)

    def _is_left_alone(self, module: nn.Module) -> bool:
        """Whether the compiler, which met a module of torch's by itself, would compile it for no reason but our hooks."""
        is_torchs = type(module).__module__.startswith(("torch.nn.", "torch.ao.")) and not module._modules
        return is_torchs and len(module._forward_hooks) == len(module._forward_pre_hooks) == 1 and self._post is not None

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        chunk = self.chunk
        if module is not self.module or not chunk.recorder.is_alive or (self.may_rest and not chunk.recorder.sites.is_due):
            return
        self.has_passed = True
        if chunk.in_forward and not in_backward():
            self.take_inputs(args, kwargs)
        elif chunk.recomputes and torch.is_grad_enabled() and in_backward():
            for source in (args, kwargs):
                self._take_recomputed(source, self._inputs, Kind.DGRAD_IN in self.takes_in)

    def _returned(self, module: nn.Module, output: Any) -> None:
        chunk = self.chunk
        if module is not self.module or not chunk.recorder.is_alive or (self.may_rest and not chunk.recorder.sites.is_due):
            return
        self.has_passed = True
        if chunk.in_forward and not in_backward():
            self.take_outputs(output)
        elif chunk.recomputes and torch.is_grad_enabled() and in_backward():
            self._take_recomputed(output, self._outputs, Kind.DGRAD in self.takes_out)

    def take_inputs(self, args: Any, kwargs: Any) -> None:
        """Measure the inputs that no site has measured in this forward, and name the others a second time."""
        chunk = self.chunk
        if not self.takes_in:
            return
        is_first = True
        for source in (args, kwargs) if kwargs else (args,):
            for path, tensor in tensors_in(source):
                was_first, is_first = is_first, False
                # Beside the first, what carries no gradient is a mask or a table, and a mask may hold -inf by design; a
                # parameter that is handed on (a tied weight, a bias to be fused) is measured as what it is.
                if not was_first and (
                    not self.takes_all or not self._carries_gradient(path, tensor) or isinstance(tensor, nn.Parameter)
                ):
                    continue
                known = chunk.known(tensor)
                is_same = known is not None
                if known is not None:
                    chunk.settle(self.name, tensor)
                else:
                    known = chunk.source(tensor)
                if known is None or (was_first and self._goes_on(known, path, True)):
                    entry = self._own(path, tensor, True, was_first)
                    self._take(entry, tensor, Kind.ACTIVATION_IN, path, known, was_first=was_first, is_same=is_same)
                    continue
                if not is_same:
                    chunk.remember(tensor, known)
                self._meet_again(known.entry, path, True, was_first, tensor)
                if not is_same and Kind.DGRAD_IN in self.takes_in and tensor.requires_grad and tensor.grad_fn is not None:
                    tap = SummandTap(chunk, known.entry, self.name + path)
                    tensor.register_hook(tap)  # type: ignore[no-untyped-call]

    def _carries_gradient(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether a gradient goes through an input; where checkpointing runs without a graph, as the recompute has shown."""
        return tensor.requires_grad or (not torch.is_grad_enabled() and path in self._recomputed)

    def take_outputs(self, output: Any) -> None:
        """Measure the outputs that no inner site has measured in this forward, and name the others a second time."""
        chunk = self.chunk
        if not self.takes_out:
            return
        chunk.settle(self.name)
        is_first = True
        for path, tensor in tensors_in(output):
            was_first, is_first = is_first, False
            self.has_gradient |= tensor.requires_grad
            if not was_first and (not self.takes_all or isinstance(tensor, nn.Parameter)):
                continue
            known = chunk.known(tensor)
            is_same = known is not None
            known = known or chunk.source(tensor)
            if known is None or (was_first and self._goes_on(known, path, False)):
                entry = self._own(path, tensor, False, was_first)
                self._take(entry, tensor, Kind.ACTIVATION, path, known, was_first=was_first, is_same=is_same)
                continue
            chunk.remember(tensor, known)
            self._meet_again(known.entry, path, False, was_first, tensor)

    def _take(
        self,
        entry: TensorEntry,
        tensor: torch.Tensor,
        kind: Kind,
        path: str,
        former: Sighting | None,
        *,
        was_first: bool,
        is_same: bool,
    ) -> None:
        """Measure a tensor; former: as what it has passed before, as the same object or held in another way."""
        chunk, sites = self.chunk, self.chunk.recorder.sites
        takes, grad_kind = (self.takes_in, Kind.DGRAD_IN) if kind is Kind.ACTIVATION_IN else (self.takes_out, Kind.DGRAD)
        chunk.order.place(entry)
        chunk.note_take(entry)
        sighting = Sighting(entry, is_border=was_first and (kind is Kind.ACTIVATION_IN) in self.borders)
        chunk.remember(tensor, sighting)
        if former is not None:
            sighting.row = chunk.take_over(former, entry)
        if kind in takes:
            if is_async(tensor):
                sighting.row = sites.reserve(entry, chunk.micro_step) if sighting.row < 0 else sighting.row
                chunk.postpone(self.name, tensor, sighting)
            elif sighting.row < 0:
                measure = sites.observe if former is None or not sites.is_due else sites.catch_up
                sighting.row = measure(entry, local_of(tensor), chunk.micro_step)
            elif not is_same:
                sites.catch_up(entry, local_of(tensor), chunk.micro_step, sighting.row)
        if grad_kind in takes and not isinstance(tensor, nn.Parameter):
            origin = chunk.origin(tensor) if kind is Kind.ACTIVATION_IN else None
            grad = self._own_gradient(entry, tensor if origin is None else local_of(tensor), grad_kind, path)
            if torch.is_grad_enabled():
                chunk.note_with_graph(entry, grad)
            else:
                chunk.note_without_graph(entry, tensor, kind)
            is_made_without_graph = entry.id in chunk.without_graph and kind is Kind.ACTIVATION
            if tensor.requires_grad and not is_made_without_graph and sites.is_looked_at(grad):
                sighting.hook = chunk.hook_gradient(tensor, grad, origin)
        if former is not None:
            sites.name_alike(former.entry, entry)
        chunk.locals.ask(entry, tensor, self.module, kind is Kind.ACTIVATION)

    def _take_recomputed(self, values: Any, entries: dict[str, TensorEntry], is_wanted: bool) -> None:
        """Reentrant checkpointing ran the first forward without a graph: the gradients hang on the recomputed tensors."""
        chunk = self.chunk
        for path, tensor in tensors_in(values) if is_wanted else ():
            if tensor.requires_grad and entries is self._inputs:
                self._recomputed.add(path)
            entry = entries.get(path)
            if entry is None or entry.grad is None or entry.id not in chunk.without_graph or not tensor.requires_grad:
                continue
            known = chunk.known(tensor)
            if known is not None and not self._goes_on(known, path, entries is self._inputs):
                continue
            if chunk.recorder.sites.is_looked_at(entry.grad):
                if known is not None:
                    chunk.give_up(known)
                sighting = Sighting(entry, is_border=bool(entry.border))
                chunk.remember(tensor, sighting)
                micro_step, chunk.micro_step = chunk.micro_step, chunk.backward_micro_step
                sighting.hook = chunk.hook_gradient(tensor, entry.grad)
                chunk.micro_step = micro_step

    # -- in compiled graphs (the Listener of compiled_ops.py) ---------------------------------------------------------

    def tensor_passes(self, tensor: torch.Tensor, former: Ticket, path: str, how: int) -> Ticket:
        """A compiled graph runs, and hands over what passes here."""
        chunk, sites = self.chunk, self.chunk.recorder.sites
        self.has_passed = True
        if not chunk.recorder.is_alive or (self.may_rest and not sites.is_due):
            return former
        is_input, was_first = bool(how & IS_INPUT), bool(how & IS_FIRST)
        if in_backward() and (former.entry < 0 or (is_input, path) in self._taken_over):
            # A checkpointed part runs again: its backward gets this ticket instead of the first one.
            entry, is_wanted = self._answers.get((is_input, path), (None, False))
            return former if entry is None else self._ticket(Sighting(entry), chunk.backward_micro_step, is_wanted)
        takes = self.takes_in if is_input else self.takes_out
        if not is_input:
            self.has_gradient |= bool(how & (HAS_GRADIENT | IS_WITHOUT_GRAPH))
        if not chunk.in_forward or in_backward() or not takes or not (was_first or self.takes_all):
            return former
        in_graph = bool(how & IN_GRAPH)
        known = chunk.graphs.sighting_of(former)
        is_here = known is not None  # Seen in this very graph, which has one ticket for the tensor: the last.
        if known is None and (how & ENTERS_GRAPH or not in_graph):
            known = chunk.known(tensor, in_graph=in_graph)
        is_border = known is not None and was_first and self._goes_on(known, path, is_input)
        if known is not None and not is_border:
            is_wanted = self._name_again(known.entry, path, is_input, was_first, tensor) and bool(how & HAS_GRADIENT)
            if is_here:
                return self._ticket(known, chunk.micro_step, True) if is_wanted else former
            self._answers[is_input, path] = known.entry, is_wanted
            return self._ticket(known, chunk.micro_step, is_wanted)
        entry = self._own(path, tensor, is_input, was_first)
        chunk.order.place(entry)
        chunk.note_take(entry)
        sighting = Sighting(entry, is_border=was_first and is_input in self.borders)
        if not in_graph:
            chunk.remember(tensor, sighting)
        elif how & LEAVES_GRAPH:
            chunk.graphs.remember(tensor, sighting, in_graph=True)
        kind, grad_kind = (Kind.ACTIVATION_IN, Kind.DGRAD_IN) if is_input else (Kind.ACTIVATION, Kind.DGRAD)
        if known is not None:
            sighting.row = chunk.take_over(known, entry)
            self._taken_over.add((is_input, path))
        if kind in takes and sighting.row < 0:
            measure = sites.observe if known is None or not sites.is_due else sites.catch_up
            sighting.row = measure(entry, tensor, chunk.micro_step)
        is_wanted = False
        if grad_kind in takes and not how & IS_PARAMETER:
            grad = self._own_gradient(entry, tensor, grad_kind, path)
            is_wanted = bool(how & (HAS_GRADIENT | IS_WITHOUT_GRAPH)) and sites.is_looked_at(grad)
        if known is not None:
            sites.name_alike(known.entry, entry)
        elif former.entry >= 0:  # Another model's tensor too: the graph has one ticket for it.
            return former
        self._answers[is_input, path] = entry, is_wanted
        return self._ticket(sighting, chunk.micro_step, is_wanted)

    def gradient_passes(self, gradient: torch.Tensor, ticket: Ticket) -> None:
        """The gradient of a ticket's tensor arrived."""
        entry = self.chunk.graphs.entry_of(ticket)
        if entry is not None and entry.grad is not None and self.chunk.graphs.is_first_answer(ticket):
            tap = GradientTap(self.chunk, entry.grad, ticket.micro_step)
            tap.step = ticket.step
            tap(gradient)

    def forward_begins(self) -> None:
        """Never: a module is no chunk."""

    def forward_ends(self) -> Ticket:
        """Never: a module is no chunk."""
        return NO_TICKET

    def guard_op(self, error: Exception) -> None:
        """Count and tell an exception that stops here."""
        self.chunk.recorder.guard(self.name, error, lost=NO_OUTPUTS)

    def _ticket(self, sighting: Sighting, micro_step: int, is_wanted: bool) -> Ticket:
        serial = new_serial() if is_wanted else -new_serial()
        ticket = Ticket(int(self.site), sighting.entry.id, micro_step, self.chunk.recorder.ended_steps, serial)
        sighting.serial = max(sighting.serial, serial)
        self.chunk.graphs.note(ticket, sighting)
        return ticket

    # -- names ---------------------------------------------------------------------------------------------------------

    def _own(self, path: str, tensor: torch.Tensor, is_input: bool, was_first: bool) -> TensorEntry:
        """Return the entry of a tensor that this site is the first to see."""
        entries, kind = (self._inputs, Kind.ACTIVATION_IN) if is_input else (self._outputs, Kind.ACTIVATION)
        entry = entries.get(path)
        if entry is None:
            met = self._met.get((is_input, path)) if was_first else None
            if met is None or met.id in self.chunk.repeated:
                met = self.chunk.recorder.sites.entry(self.chunk.vpp_stage, self.name + path, kind, tensor)
            entry = entries[path] = met
        border = self.borders.get(is_input)
        if was_first and border is not None and not entry.border:
            entry.border, entry.border_index = border.label, border.index
            entry.flags |= BORDER
        return entry

    def _own_gradient(self, entry: TensorEntry, tensor: torch.Tensor, grad_kind: Kind, path: str) -> TensorEntry:
        """Return the entry of the gradient of such a tensor."""
        grad = entry.grad
        if grad is None:
            grad = self.chunk.recorder.sites.entry(self.chunk.vpp_stage, self.name + path, grad_kind, tensor)
            entry.grad = grad
            grad.border, grad.border_index = entry.border, entry.border_index
            grad.consumers, grad.also = list(entry.consumers), list(entry.also)
            grad.flags |= entry.flags & BORDER
        grad.site_pos = entry.site_pos
        return grad

    def _goes_on(self, known: Sighting, path: str, is_input: bool) -> bool:
        """Whether what another site has met is a border that was measured under its own name before: so it goes on.

        So is what a module gives out that was called before in this forward: its name stands for another tensor.
        """
        own = (self._inputs if is_input else self._outputs).get(path)
        if own is None and (is_input, path) not in self._met:
            return known.entry.id in self.chunk.repeated and is_input in self.borders and not known.is_border
        is_own_border = own is not None and bool(own.border) and is_input in self.borders
        return is_own_border and known.entry is not own and not known.is_border

    def _meet_again(self, entry: TensorEntry, path: str, is_input: bool, was_first: bool, tensor: torch.Tensor) -> None:
        if self._name_again(entry, path, is_input, was_first, tensor) and tensor.requires_grad:
            assert entry.grad is not None
            self.chunk.hook_gradient(tensor, entry.grad)

    def _name_again(self, entry: TensorEntry, path: str, is_input: bool, was_first: bool, tensor: torch.Tensor) -> bool:
        """Name a second time what another site has met; measure it where only a border asks for that.

        Return whether its gradient is asked for from now on, and was not.
        """
        sites = self.chunk.recorder.sites
        if is_input:
            sites.add_consumer(entry, self.name)
        else:
            sites.add_producer(entry, self.name + path)
        if was_first and is_input in self.borders:
            grad = entry.grad
            was_measured, was_looked_at = sites.is_measured(entry), grad is not None and sites.is_looked_at(grad)
            self._widen_border(entry, is_input)
            if entry.chunk == self.chunk.vpp_stage:
                self._met[is_input, path] = entry
            if not was_measured and sites.is_measured(entry) and not is_async(tensor):
                sites.catch_up(entry, local_of(tensor), self.chunk.micro_step)
            return grad is not None and not was_looked_at and sites.is_looked_at(grad)
        return False

    def _widen_border(self, entry: TensorEntry, is_input: bool) -> None:
        """One tensor may be two borders (a chunk that begins with a block): its gradient was made behind the later one."""
        border = self.borders.get(is_input)
        if border is None or entry.chunk != self.chunk.vpp_stage:
            return
        if not entry.border:
            entry.border, entry.border_index = border.label, border.index
            entry.flags |= BORDER
            self.chunk.recorder.sites.placed(True)
        grad = entry.grad
        if grad is not None and grad.border_index < border.index:
            grad.border_index = border.index
            # The last block of a pipeline's stage ends a block as it does in one process; what a later stage receives is the
            # output of a block before it, and no other part of the residual stream.
            is_received = grad.border == "chunk_input" and self.chunk.depth > 0
            if grad.border != "block_output" and not is_received:
                grad.border = border.label
            grad.flags |= BORDER
            self.chunk.recorder.sites.placed(True)


for _hook in (ModuleTap._before, ModuleTap._after):
    run_as_it_is(_hook.__code__)
if tensor_reader is not None:
    tensor_reader.know_passing(
        torch.Tensor, NativeKernel, Sighting, GradientTap, OrderedDict, KEYS, torch.is_grad_enabled, graph_task,
        INFERENCE_GUARD, BORDER,
    )  # fmt: skip
