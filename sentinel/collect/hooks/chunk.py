"""One model chunk of this rank: its place, its running forward, and the parts that measure its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from sentinel.collect.compiled.compiled_parts import CompiledParts
from sentinel.collect.compiled.ops import on_cuda_graph, on_root_traced
from sentinel.collect.hooks.aliases import aliases_of
from sentinel.collect.hooks.chunk_taps import ChunkTaps
from sentinel.collect.hooks.gradient_taps import GradientTap, hang
from sentinel.collect.hooks.nesting import tensors_in
from sentinel.collect.hooks.pending_outputs import PendingOutputs
from sentinel.collect.hooks.recomputation import Recomputation
from sentinel.collect.hooks.recorder import PassListener, Recorder
from sentinel.collect.hooks.root_hooks import RootHooks
from sentinel.collect.hooks.seen_tensors import SeenTensors
from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.hooks.site_order import SiteNumbering
from sentinel.collect.hooks.structure import Structure
from sentinel.collect.hooks.survey import Survey
from sentinel.collect.hooks.weak import weakly
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind


class Chunk:
    """The parts that measure one chunk, called in order at each forward. `RootHooks` decides which calls are forwards."""

    def __init__(
        self, recorder: Recorder, passes: PassListener, root: nn.Module, structure: Structure, vpp_stage: int
    ) -> None:
        """passes: called at each training forward and backward."""
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
        self.flows: set[str] = set()
        """As ChunkInfo.flows."""
        self.in_forward = False
        self.forward = object()
        """Identifies the training forward that runs, or ran last."""
        self.micro_step = 0
        """Of the training forward that runs, or ran last."""
        self.num_forwards = 0
        """Micro-steps of the running step whose forward has ended."""
        self.had_backward = False
        """A backward has run since the last forward."""
        self.backward_micro_step = 0
        """Whose backward runs, or ran last."""
        self.is_settled = False
        """Every usual site was met, and nothing of the running forward is compiled, split, recomputed, handed on under new
        objects, still being written or shown to a probe: tensors may be taken as they were before (`take_again`, in C)."""
        self.order = SiteNumbering()
        self.survey = Survey(recorder.sites)
        self.compiled = CompiledParts(structure.modules, recorder.sites.report_blind)
        self.seen = SeenTensors(self.survey, self.compiled)
        self.pending = PendingOutputs(recorder.sites)
        self.recomputed = Recomputation()
        self.hooks = RootHooks(self)
        self.taps = ChunkTaps(self, self.compiled)
        self._undo: list[Callable[[], None]] = []

    # -- hooks -------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put hooks on the chunk's root. Those of its modules are put on by `plan`."""
        self.hooks.install()
        for calls, call in (
            (on_root_traced, weakly(self._traced_whole)),
            (on_cuda_graph, weakly(self.compiled.traced_for_cuda)),
        ):
            calls.append(call)
            self._undo.append(partial(calls.remove, call))
        self.find_compiled()

    def remove(self) -> None:
        """Take off every hook of the chunk and of its modules."""
        self.hooks.remove()
        while self._undo:
            self._undo.pop()()
        self.taps.remove()

    def plan(self, wanted: Callable[[str], frozenset[Kind]], black_box: bool) -> None:
        """Install, change or remove the taps of all modules.

        wanted: local name of a module -> kinds to measure there. black_box: whether borders are measured beside them.
        """
        if self.seen.aliases is None:
            self.seen.aliases = aliases_of(self.structure.modules.values())
        self.taps.plan(wanted, black_box)
        self.survey.begin_anew()
        self.compiled.look_again()
        self.unsettle()

    def find_compiled(self, *, is_whole: bool = False) -> None:
        """Put hooks on every module of the parts that are compiled, before a graph is traced through them: they stay.

        is_whole: the chunk itself is being compiled, also where torch.compile was applied to something around it.
        """
        fresh = self.compiled.find(is_whole=is_whole)
        if fresh:
            self.unsettle()
            self.taps.keep_hooks(fresh)

    def _traced_whole(self) -> None:
        """A graph is being traced that holds a chunk's whole forward, perhaps this one's."""
        self.find_compiled(is_whole=True)

    # -- a training forward --------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Called before a training forward: reset what is known of its tensors."""
        self.passes.before_forward(self)
        self.in_forward, self.forward = True, object()
        self.order.begin()
        self.pending.forget()
        self.seen.begin(self.recorder.sites.place, self.recorder.ended_steps)
        self.is_settled = (
            self.survey.is_complete
            and self.seen.is_by_id
            and not self.recomputed.is_seen
            and not self.recorder.sites.has_observers
        )

    def end_forward(self) -> None:
        """Called after a training forward that returned: drop its tensors, and note what a first whole forward has shown."""
        self.in_forward = False
        self.seen.end()
        if self.survey.complete():
            self.compiled.report_late_attach(self.taps.by_name)
            self.taps.after_whole_forward()
            found = self.taps.flows()
            if not found <= self.flows:
                self.flows |= found
                self.recorder.sites.placed(True)

    def fail_forward(self) -> None:
        """Called after a training forward that raised: drop its tensors and its pending outputs."""
        self.in_forward = False
        self.pending.forget()
        self.seen.end()
        self.seen.locals.forget()
        self.passes.forward_failed(self)

    def place_locals(self, output: Any) -> None:
        """Derive from the outputs of the forward that ended how its plain tensors are placed, under tensor parallelism."""
        if self.seen.locals.is_split:
            self.recorder.sites.placed(self.seen.locals.resolve(tensor for _, tensor in tensors_in(output)))
            self.seen.locals.forget()

    @contextlib.contextmanager
    def reopened(self) -> Iterator[None]:
        """Count calls of modules in this context to the forward that has just ended: a head that runs inside the loss,
        say."""
        self.in_forward = self.recorder.is_alive and self.root.training and torch.is_grad_enabled()
        try:
            yield
        finally:
            try:
                if self.in_forward:
                    self.pending.settle("", self.micro_step)
            except Exception as error:
                self.recorder.guard("loss_fn", error)
            self.in_forward = False

    def unsettle(self) -> None:
        """Take the slow path for the rest of the running forward: something in it differs from the forwards before."""
        self.is_settled = False

    # -- its micro-steps -----------------------------------------------------------------------------------------------

    def begin_micro_step(self, *, shares: bool) -> None:
        """Set the micro_step of the forward that begins.

        shares: it has the micro_step of the forward before, unless a backward has run in between.
        """
        is_shared = shares and self.num_forwards and not self.had_backward
        self.micro_step = max(0, self.num_forwards - 1) if is_shared else self.num_forwards

    def end_micro_step(self) -> None:
        """Count the forward that returned as a micro-step."""
        self.num_forwards = self.micro_step + 1
        self.had_backward = False

    def end_step(self) -> None:
        """Called when a step ends: the next forward has micro_step 0."""
        self.num_forwards, self.had_backward = 0, False

    # -- what has passed -----------------------------------------------------------------------------------------------

    def postpone(self, module: str, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Measure an output that a collective still writes later, once the model has read it."""
        if self.pending.add(module, tensor, sighting):
            self.unsettle()

    def hook_gradient(
        self, tensor: torch.Tensor, entry: TensorEntry, origin: torch.Tensor | tuple[Any, int] | None = None
    ) -> GradientTap:
        """Put a hook on `tensor` that measures its gradient once, in the backward of the running forward.

        origin: the leaf or (autograd node, number of its output) that made the logical tensor, where the whole gradient is;
        None: `tensor` itself.
        """
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
        """Give a row written under another name to a border's entry, and return the row; -1: there is none yet."""
        row = self.recorder.sites.rename(former, entry, self.micro_step)
        former.row = -1  # What a collective still writes is read at the border.
        self.skip_gradient(former)
        return row

    def skip_gradient(self, former: Sighting) -> None:
        """Do not measure the gradient of a tensor that passed: the border measures it."""
        if former.hook is not None:
            former.hook.is_done = True
        self.seen.graphs.drop(former.serial)
