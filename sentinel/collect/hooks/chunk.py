"""One model chunk's forwards: when one begins and ends, which tensors it has seen, and which taps its modules carry."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.compiled.capability import why_unusable
from sentinel.collect.compiled.graphs import (
    CUDA_GRAPHS,
    TOO_LATE,
    compiled_parts,
    compiler_is_back,
    compiler_steps_aside,
    gate,
    is_inside,
    run_as_it_is,
    set_gate,
    trace_begin,
    trace_end,
    trace_tensors,
)
from sentinel.collect.compiled.ops import (
    IS_FIRST,
    IS_INPUT,
    NO_TICKET,
    Ticket,
    enlist,
    new_serial,
    on_cuda_graph,
    on_root_traced,
)
from sentinel.collect.compiled.passed_tensors import GraphMemory
from sentinel.collect.hooks.aliases import Aliases, aliases_of
from sentinel.collect.hooks.gradient_taps import BackwardMark, GradientTap, hang
from sentinel.collect.hooks.module_tap import ModuleTap
from sentinel.collect.hooks.module_tap import in_backward as in_backward
from sentinel.collect.hooks.nesting import tensors_in
from sentinel.collect.hooks.partial_functions import partial_functions
from sentinel.collect.hooks.pickle_stub import inert_methods
from sentinel.collect.hooks.recorder import PassListener, Recorder
from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.hooks.site_order import SiteOrder
from sentinel.collect.hooks.structure import Border, Structure
from sentinel.collect.hooks.weak import weakly
from sentinel.collect.parallel.pipelining import in_inference
from sentinel.collect.parallel.placements import arrived
from sentinel.collect.parallel.tensor_parallel import LocalTensors
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.costs import OWN, TRAINER
from sentinel.native import take_again
from sentinel.record import Kind

NO_FORWARD = "rows of this forward of the model, and of its backward, may be missing"
MAX_LOOKS = 4
"""Forwards in which compiled parts are looked for, after each change of the taps (chosen)."""


class Chunk:
    """One model chunk of this rank: its modules, its micro-steps, and which tensors were seen in the running forward."""

    def __init__(
        self, recorder: Recorder, passes: PassListener, root: nn.Module, structure: Structure, vpp_stage: int
    ) -> None:
        """passes: told of each training forward and backward."""
        self.recorder = recorder
        self.passes = passes
        self.root = root
        self.structure = structure
        self.vpp_stage = vpp_stage
        self.depth = 0
        self.model = ""
        """Which of several models of the trainer it belongs to; empty: there is one."""
        self.offsets: dict[str, int] = {}
        """As ChunkInfo.offsets: an adapter's trainer counts its layers and experts itself."""
        self.tied: dict[str, str] = {}
        """Local name of a parameter that is a copy of another chunk's -> canonical name of that one."""
        self.in_forward = False
        self.forward = object()
        """Stands for the training forward that runs, or ran last."""
        self.micro_step = 0
        self.num_forwards = 0
        self.had_backward = False
        self.backward_micro_step = 0
        self.generation = 0
        self.repeated: set[int] = set()
        """Ids of the entries that stand for several tensors of one forward: of modules that are called more than once."""
        self.order = SiteOrder()
        self._is_known = False
        """A whole forward has passed since the taps were changed: every usual site was met."""
        self.is_settled = False
        """Every usual site was met, and nothing of the running forward is compiled, split, recomputed, handed on under new
        objects or shown to anybody: tensors may be taken as they were before (`take_again`, in C)."""
        self.recomputes = False
        """A forward without graph was seen inside a training forward: reentrant checkpointing."""
        self.without_graph: set[int] = set()
        """Ids of the entries whose tensors were seen in such a forward."""
        self._asked_twice: dict[tuple[int, int], bool] = {}
        """(id of a gradient's entry, micro_step) hooked in such a forward and again in its recompute -> was measured."""
        self.flows: set[str] = set()
        """As ChunkInfo.flows."""
        self.has_trained = False
        self.taps: dict[str, ModuleTap] = {}
        self._pending: list[tuple[str, torch.Tensor, Sighting]] = []
        """Outputs that a collective still writes: (module, tensor, site with its reserved row)."""
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, Sighting]] = {}
        self._nodes: dict[Any, str] = {}
        """grad_fn of the tensors of the running forward -> their sites; while sites are being met for the first time."""
        self.locals = LocalTensors()
        self.aliases: Aliases | None = None
        """Of a trainer that hands tensors on under new objects: FSDP2's, or an adapter's."""
        self._handles: list[RemovableHandle] = []
        self._undo: list[Callable[[], None]] = []
        self.site = enlist(self)
        self.own = ModuleTap(self, "", root)
        """The tap of the chunk itself."""
        self.graphs = GraphMemory()
        self.wants_borders = self.wants_sites = False
        """What the graphs of compiled parts are to hold."""
        self.compiled: list[str] = []
        """Names of the parts whose hooks stay on, because a compiler was told to compile them."""
        self._num_looks = 0
        """Forwards in which compiled parts were looked for since the taps were changed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Chunk:
        return self  # A copied model (an EMA, say) carries hooks that see it is not theirs, and do nothing.

    def __reduce__(self) -> Any:
        return inert_methods(type(self))

    # -- the chunk's own forward -------------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch the chunk's forward; the taps are installed one by one by `plan`."""
        self._handles = [
            self.root.register_forward_pre_hook(self._root_pre, with_kwargs=True),
            self.root.register_forward_hook(self._root_post, always_call=True),
        ]
        for calls, call in ((on_root_traced, weakly(self._traced_whole)), (on_cuda_graph, weakly(self._traced_for_cuda))):
            calls.append(call)
            self._undo.append(partial(calls.remove, call))
        self.find_compiled()

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for tap in self.taps.values():
            tap.remove()
        self.taps, self.compiled = {}, []
        self.wants_borders = self.wants_sites = False
        while self._undo:
            self._undo.pop()()
        set_gate()

    def plan(self, wanted: Callable[[str], frozenset[Kind]], black_box: bool) -> None:
        """Install, change or remove taps: `wanted(module name)` are the kinds to take there, borders come on top."""
        borders: dict[str, list[Border]] = {}
        if black_box:
            for border in self.structure.borders:
                borders.setdefault(border.module, []).append(border)
        wants_sites = False
        self.wants_borders = black_box
        if self.aliases is None:
            self.aliases = aliases_of(self.structure.modules.values())
        for name, module in self.structure.modules.items():
            kinds, mine = wanted(name), borders.get(name, [])
            tap = self.taps.get(name)
            if tap is None:
                if not kinds and not mine and not any(is_inside(name, part) for part in self.compiled):
                    continue
                tap = self.taps[name] = self._new_tap(name, module)
            if not kinds and not mine and not tap.stays:
                tap.remove()
                del self.taps[name]
                continue
            tap.configure(kinds, mine)
            wants_sites |= bool(kinds)
        self.generation += 1
        self._is_known, self._num_looks, self.is_settled = False, 0, False
        self.wants_sites = wants_sites
        set_gate(self)

    def _new_tap(self, name: str, module: nn.Module) -> ModuleTap:
        tap = self.own if module is self.root else ModuleTap(self, name, module)
        tap.stays = any(is_inside(name, part) for part in self.compiled)
        return tap

    # -- compiled parts ----------------------------------------------------------------------------------------------

    def find_compiled(self, *, is_whole: bool = False) -> None:
        """Put hooks on every module of the parts that are compiled, before a graph is traced through them: they stay.

        is_whole: the chunk itself is being compiled, however that came to pass.
        """
        self._num_looks += 1
        parts = [""] if is_whole else compiled_parts(self.structure.modules)
        fresh = [part for part in parts if not any(is_inside(part, known) for known in self.compiled)]
        if not fresh:
            return
        problem = why_unusable()
        if gate.is_usable == bool(problem):
            gate.is_usable = not problem
        if problem:
            self.recorder.sites.blind("compiled", f"{problem}: the inside of compiled modules is not measured")
            return
        self.compiled += fresh
        self.is_settled = False
        for name, module in self.structure.modules.items():
            if any(is_inside(name, part) for part in fresh):
                tap = self.taps.get(name)
                if tap is None:
                    tap = self.taps[name] = self._new_tap(name, module)
                tap.stand()

    def _traced_whole(self) -> None:
        """A graph is being traced that holds a chunk's whole forward, perhaps this one's."""
        self.find_compiled(is_whole=True)

    def _traced_for_cuda(self) -> None:
        self.recorder.sites.blind("cuda_graphs", CUDA_GRAPHS)

    def _tell_blind_parts(self) -> None:
        """A whole forward has passed: say which part was compiled before its hooks were there, so that none of them ran."""
        blind = []
        for part in self.compiled:
            inner = [tap for name, tap in self.taps.items() if name != part and is_inside(name, part)]
            asked = [tap for tap in inner if tap.takes_in or tap.takes_out]
            top = self.taps.get(part)
            was_called = not part or top is None or top.has_passed
            if asked and was_called and not any(tap.has_passed for tap in inner):
                blind.append(part or "the model")
        if blind:
            named = ", ".join(blind[:3]) + (f" and {len(blind) - 3} more" if len(blind) > 3 else "")
            self.recorder.sites.blind("compiled_before_attach", TOO_LATE.format(named))

    # -- the Listener of compiled_ops.py: a forward that is inside a graph from its beginning to its end -------------

    def forward_begins(self) -> None:
        """The graph begins the chunk's forward."""
        if self.in_forward:  # The last one never ended: it failed.
            self._fail()
        if self.recorder.is_alive and not self.recorder.is_paused and self._is_trained() and not in_inference():
            self._begin()

    def forward_ends(self) -> Ticket:
        """The graph ends the chunk's forward."""
        if not self.in_forward:
            return NO_TICKET
        self._end()
        self.passes.after_forward(self)
        return Ticket(int(self.site), -1, self.micro_step, self.recorder.ended_steps, new_serial())

    def gradient_passes(self, gradient: torch.Tensor, ticket: Ticket) -> None:
        """The gradient of the chunk's output arrived."""
        if ticket.step == self.recorder.ended_steps and self.graphs.is_first_answer(ticket):
            BackwardMark(self, ticket.micro_step)(gradient)

    def tensor_passes(self, tensor: torch.Tensor, former: Ticket, path: str, how: int) -> Ticket:
        """Never: the chunk's own tensors pass at `own`."""
        return former

    def guard_op(self, error: Exception) -> None:
        """Count and tell an exception that stops here."""
        self.recorder.guard("", error, lost=NO_FORWARD)

    # -- its hooks -----------------------------------------------------------------------------------------------------

    def _is_training(self) -> bool:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_inference() or in_backward():
            return False
        return self._is_trained()

    def _is_trained(self) -> bool:
        if in_backward():
            return False
        if self.root.training:
            self.has_trained = True
            return True
        # A model that was never put into training mode is trained in evaluation mode; others are evaluated in it.
        return not self.has_trained

    def _root_pre(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            if module is self.root:
                trace_begin(self.site)
                trace_tensors(self.own.site, module, (args, kwargs), self.own.is_border_in, IS_INPUT | IS_FIRST)
            return
        former = compiler_steps_aside()
        try:
            self._called(module, args, kwargs, is_compiled=former is not None)
        finally:
            compiler_is_back(former)

    def _root_post(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if module is self.root:
                trace_tensors(self.own.site, module, (output,), self.own.is_border_out, IS_FIRST)
                trace_end(self.site, output)
            return
        former = compiler_steps_aside()
        try:
            self._returned(module, output)
        finally:
            compiler_is_back(former)

    def _called(self, module: nn.Module, args: Any, kwargs: Any, *, is_compiled: bool) -> None:
        if module is not self.root or not self.recorder.is_alive:
            return
        costs = self.recorder.recording.costs
        costs.turn_to(OWN)
        try:
            if is_compiled or self._num_looks < MAX_LOOKS:
                self.find_compiled(is_whole=is_compiled)
            self.in_forward = False
            if self.recorder.is_paused or not self._is_training():
                return
            self._begin()
            for tap in self.taps.values():
                tap.come_last()
            if "" in self.taps and (kwargs or len(args) != 1 or not take_again(self.own, args[0], True, None)):
                self.own.take_inputs(args, kwargs)
        except Exception as error:
            self.recorder.guard("", error, lost=NO_FORWARD)
        finally:
            costs.turn_to(TRAINER)

    def _returned(self, module: nn.Module, output: Any) -> None:
        if module is not self.root or not self.in_forward:
            return
        costs = self.recorder.recording.costs
        costs.turn_to(OWN)
        try:
            # Called with None while an exception passes: the forward failed and may be tried again.
            if output is None and sys.exc_info()[0] is not None:
                self._fail()
                return
            if "" in self.taps and not take_again(self.own, output, False, None):
                self.own.take_outputs(output)
            self.settle("")
            self._end()
            self._mark(output)
            if self.locals.is_split:
                self.recorder.sites.placed(self.locals.resolve(tensor for _, tensor in tensors_in(output)))
                self.locals.forget()
            self.passes.after_forward(self)
        except Exception as error:
            self.in_forward = False
            self.recorder.guard("", error, lost=NO_FORWARD)
        finally:
            costs.turn_to(TRAINER)

    def _begin(self) -> None:
        self.passes.before_forward(self)
        self.in_forward, self.forward = True, object()
        self._seen, self._nodes, self._pending = {}, {}, []
        self.order.begin()
        self.locals.begin(self.recorder.sites.place)
        self.graphs.begin(self.recorder.ended_steps)
        if self.aliases is not None:
            self.aliases.forget()
        self.is_settled = (
            self._is_known and not self.compiled and self.aliases is None and not self.locals.is_split
            and not self.recomputes and not self.recorder.sites.has_onlookers
        )  # fmt: skip

    def _end(self) -> None:
        self.in_forward, self._seen, self._nodes = False, {}, {}
        self.graphs.forget()
        if not self._is_known:
            self._is_known = True
            self._tell_blind_parts()
            for one in self.taps.values():
                one.rest()
            self._note_flows()

    def _note_flows(self) -> None:
        """A whole forward has passed: note which modules without parameters give out what a gradient goes through."""
        blocks = tuple(f"{block}." for block in self.structure.blocks)
        found = {
            name
            for name, tap in self.taps.items()
            if tap.has_gradient and not f"{name}.".startswith(blocks) and next(tap.module.parameters(), None) is None
        }
        if not found <= self.flows:
            self.flows |= found
            self.recorder.sites.placed(True)

    def _fail(self) -> None:
        self.in_forward, self._seen, self._nodes, self._pending = False, {}, {}, []
        self.locals.forget()
        self.graphs.forget()
        self.passes.forward_failed(self)

    def _mark(self, output: Any) -> None:
        """A bare hook on the output tells that a backward runs, and whose: also where its gradient is not measured here."""
        for _, tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                hang(tensor, BackwardMark(self, self.micro_step))
                return

    # -- tensors -----------------------------------------------------------------------------------------------------

    def note_take(self, entry: TensorEntry) -> None:
        """A site takes a tensor as an entry; in the first forward of a plan nothing is taken without this."""
        if entry.generation == self.generation and not self._is_known:
            self.repeated.add(entry.id)
        entry.generation = self.generation

    def known(self, tensor: torch.Tensor, *, in_graph: bool = False) -> Sighting | None:
        """Return as what this very tensor, unchanged since, has passed a site of this forward."""
        found = self._seen.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1] == tensor._version:
            return found[2]
        sighting = self.graphs.find(tensor, in_graph=in_graph) if self.compiled else None
        return self.aliases.find(tensor) if sighting is None and self.aliases is not None else sighting

    def remember(self, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Let later sites of this forward find the tensor."""
        if not self._is_known:
            self._read_functions(tensor, sighting.entry)
        self._seen[id(tensor)] = (weakref.ref(tensor), tensor._version, sighting)
        self.locals.remember(tensor, sighting)
        if self.compiled:
            self.graphs.remember(tensor, sighting, in_graph=False)
        if self.aliases is not None:
            self.aliases.remember(tensor, sighting)

    def _read_functions(self, tensor: torch.Tensor, entry: TensorEntry) -> None:
        """Note, once a site, which functions that are not defined everywhere made the tensor of what was seen before it."""
        node = tensor.grad_fn
        if node is None:
            return
        if entry.functions is None and node not in self._nodes:
            self.recorder.sites.note_functions(entry, partial_functions(node, self._nodes))
        self._nodes.setdefault(node, entry.name)

    def source(self, tensor: torch.Tensor) -> Sighting | None:
        """Return as what the logical tensor has passed that this one holds in another way: a DTensor, gathered, local."""
        if not self.locals.is_split:
            return None
        found = self.locals.source(tensor)
        sighting = self.known(found) if isinstance(found, torch.Tensor) else found
        # Of a sum that was not formed yet only the summands were measured: what is formed of it is measured by itself.
        return None if sighting is None or "partial" in sighting.entry.placements.values() else sighting

    def postpone(self, module: str, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Keep an output that a collective still writes until somebody has read it."""
        if sighting.row >= 0 or self.recorder.sites.has_onlookers:
            self._pending.append((module, tensor, sighting))

    def settle(self, module: str, one: torch.Tensor | None = None) -> None:
        """Measure what was postponed and is read by now: inside `module`, which has ended, or `one` about to be read."""
        if not self._pending:
            return
        left = []
        for inner, tensor, sighting in self._pending:
            if tensor is one or (one is None and (not module or inner.startswith(module + "."))):
                self.recorder.sites.fill(sighting.row, sighting.entry, arrived(tensor), self.micro_step)
            else:
                left.append((inner, tensor, sighting))
        self._pending = left

    def origin(self, tensor: torch.Tensor) -> torch.Tensor | tuple[Any, int] | None:
        """Return the node, or the leaf, that made the logical tensor, where that is not what made this tensor of it."""
        if tensor.grad_fn is None:
            return None
        if not self.locals.is_split:
            return None if self.aliases is None else self.aliases.origin(tensor)
        origin = self.locals.origin(tensor)
        return None if origin[0] is tensor.grad_fn else origin

    def note_without_graph(self, entry: TensorEntry, tensor: torch.Tensor, kind: Kind) -> None:
        """A forward that reentrant checkpointing will run again: what is made in it has no gradient, what it is given has.

        Megatron adds residuals with gradients on: where an input comes from cannot be told before the backward.
        """
        self.recomputes, self.is_settled = True, False
        if kind is Kind.ACTIVATION or tensor.grad_fn is not None or not tensor.requires_grad:
            self.without_graph.add(entry.id)
            if tensor.requires_grad and entry.grad is not None:
                self._asked_twice[entry.grad.id, self.micro_step] = False

    def note_with_graph(self, entry: TensorEntry, grad: TensorEntry) -> None:
        """A forward that keeps its graph: what it gives out is not made again, and its gradient comes once."""
        self.without_graph.discard(entry.id)
        self._asked_twice.pop((grad.id, self.micro_step), None)

    def is_answered(self, entry: TensorEntry, micro_step: int) -> bool:
        """Whether another hook has measured this gradient; from now on it is."""
        key = (entry.id, micro_step)
        if key not in self._asked_twice:
            return False
        was, self._asked_twice[key] = self._asked_twice[key], True
        return was

    def hook_gradient(
        self, tensor: torch.Tensor, entry: TensorEntry, origin: torch.Tensor | tuple[Any, int] | None = None
    ) -> GradientTap:
        """Take the gradient of `tensor` when its backward comes, once; or that of the logical tensor at its origin."""
        hook = GradientTap(self, entry, self.micro_step)
        costs = self.recorder.recording.costs
        former = costs.turn_to(costs.kind_of(entry)) if costs.is_on else 0
        if isinstance(origin, torch.Tensor):
            tensor, origin = origin, None
        if origin is not None:
            node, number = origin
            node.register_prehook(lambda gradients: None if gradients[number] is None else hook(gradients[number]))
        elif tensor.grad_fn is not None:
            hang(tensor, hook)
        else:
            # A leaf outlives the step: a pipeline's receive buffer would collect one hook a step.
            hook.handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            self.passes.keep_until_step_ends(hook.handle)
        if costs.is_on:
            costs.turn_to(former)
        return hook

    def take_over(self, former: Sighting, entry: TensorEntry) -> int:
        """Make a border's what has passed before under another name; return its row, -1: it has none yet."""
        row = self.recorder.sites.rename(former, entry, self.micro_step)
        former.row = -1  # What a collective still writes is read at the border.
        self.give_up(former)
        return row

    def give_up(self, former: Sighting) -> None:
        """Do not measure the gradient of what has passed: a border will."""
        if former.hook is not None:
            former.hook.is_done = True
        self.graphs.drop(former.serial)


for _hook in (Chunk._root_pre, Chunk._root_post):
    run_as_it_is(_hook.__code__)
