"""One model chunk of this rank: where it stands, its running forward, and the parts that look at its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from sentinel.collect.compiled.ops import on_cuda_graph, on_root_traced
from sentinel.collect.compiled.parts import CompiledParts
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
    """Holds its parts and says in which order they take part in a forward; which calls are forwards, `hooks` decides."""

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
        """Stands for the training forward that runs, or ran last."""
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
        objects, still being written or shown to anybody: tensors may be taken as they were before (`take_again`, in C)."""
        self.order = SiteNumbering()
        self.survey = Survey(recorder.sites)
        self.compiled = CompiledParts(structure.modules, recorder.sites.blind)
        self.seen = SeenTensors(self.survey, self.compiled)
        self.pending = PendingOutputs(recorder.sites)
        self.recomputed = Recomputation()
        self.hooks = RootHooks(self)
        self.taps = ChunkTaps(self, self.compiled)
        self._undo: list[Callable[[], None]] = []

    # -- hooks -------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch the chunk's forward; the taps are installed one by one by `plan`."""
        self.hooks.install()
        for calls, call in (
            (on_root_traced, weakly(self._traced_whole)),
            (on_cuda_graph, weakly(self.compiled.traced_for_cuda)),
        ):
            calls.append(call)
            self._undo.append(partial(calls.remove, call))
        self.find_compiled()

    def remove(self) -> None:
        """Take every hook off again."""
        self.hooks.remove()
        while self._undo:
            self._undo.pop()()
        self.taps.remove()

    def plan(self, wanted: Callable[[str], frozenset[Kind]], black_box: bool) -> None:
        """Install, change or remove taps: `wanted(module name)` are the kinds to take there, borders come on top."""
        if self.seen.aliases is None:
            self.seen.aliases = aliases_of(self.structure.modules.values())
        self.taps.plan(wanted, black_box)
        self.survey.begin_anew()
        self.compiled.look_again()
        self.unsettle()

    def find_compiled(self, *, is_whole: bool = False) -> None:
        """Put hooks on every module of the parts that are compiled, before a graph is traced through them: they stay.

        is_whole: the chunk itself is being compiled, however that came to pass.
        """
        fresh = self.compiled.find(is_whole=is_whole)
        if fresh:
            self.unsettle()
            self.taps.stand(fresh)

    def _traced_whole(self) -> None:
        """A graph is being traced that holds a chunk's whole forward, perhaps this one's."""
        self.find_compiled(is_whole=True)

    # -- a training forward --------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A training forward begins."""
        self.passes.before_forward(self)
        self.in_forward, self.forward = True, object()
        self.order.begin()
        self.pending.forget()
        self.seen.begin(self.recorder.sites.place, self.recorder.ended_steps)
        self.is_settled = (
            self.survey.is_complete
            and self.seen.is_by_id
            and not self.recomputed.is_seen
            and not self.recorder.sites.has_onlookers
        )

    def end_forward(self) -> None:
        """It has ended well: its tensors are not looked for any more."""
        self.in_forward = False
        self.seen.end()
        if self.survey.complete():
            self.compiled.tell_blind(self.taps.by_name)
            self.taps.rest()
            found = self.taps.flows()
            if not found <= self.flows:
                self.flows |= found
                self.recorder.sites.placed(True)

    def fail_forward(self) -> None:
        """It raised: what it showed is forgotten."""
        self.in_forward = False
        self.pending.forget()
        self.seen.end()
        self.seen.locals.forget()
        self.passes.forward_failed(self)

    def place_locals(self, output: Any) -> None:
        """Find out from its outputs how the plain tensors of a forward are placed that does not run any more."""
        if self.seen.locals.is_split:
            self.recorder.sites.placed(self.seen.locals.resolve(tensor for _, tensor in tensors_in(output)))
            self.seen.locals.forget()

    @contextlib.contextmanager
    def reopened(self) -> Iterator[None]:
        """What is called in here belongs to the forward that has just ended: a head that runs inside of the loss, say."""
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
        """Something of the running forward is not as usual: its tensors are looked at one by one from now on."""
        self.is_settled = False

    # -- its micro-steps -----------------------------------------------------------------------------------------------

    def begin_micro_step(self, *, shares: bool) -> None:
        """Number the forward that begins; shares: it belongs to the micro-step of the last, while that had no backward."""
        is_shared = shares and self.num_forwards and not self.had_backward
        self.micro_step = max(0, self.num_forwards - 1) if is_shared else self.num_forwards

    def end_micro_step(self) -> None:
        """The forward ended well: it counts."""
        self.num_forwards = self.micro_step + 1
        self.had_backward = False

    def end_step(self) -> None:
        """The step is over: the next forward is its first micro-step."""
        self.num_forwards, self.had_backward = 0, False

    # -- what has passed -----------------------------------------------------------------------------------------------

    def postpone(self, module: str, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Keep an output that a collective still writes until somebody has read it."""
        if self.pending.add(module, tensor, sighting):
            self.unsettle()

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
        self.seen.graphs.drop(former.serial)
