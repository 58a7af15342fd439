"""The hooks of a chunk's root, which see its training forwards begin and end, eager or in a compiled graph."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.compiled.graphs import (
    compiler_is_back,
    compiler_steps_aside,
    run_as_it_is,
    trace_begin,
    trace_end,
    trace_tensors,
)
from sentinel.collect.compiled.ops import IS_FIRST, IS_INPUT, NO_TICKET, Ticket, enlist, new_serial
from sentinel.collect.hooks.backwards import in_backward
from sentinel.collect.hooks.gradient_taps import BackwardMark, hang
from sentinel.collect.hooks.nesting import tensors_in
from sentinel.collect.hooks.pickle_stub import stub_methods
from sentinel.collect.parallel.pipelining import in_inference
from sentinel.collect.schedule.costs import OWN, TRAINER
from sentinel.native import take_again

if TYPE_CHECKING:
    from sentinel.collect.hooks.chunk import Chunk

NO_FORWARD = "rows of this forward of the model, and of its backward, may be missing"


class RootHooks:
    """Decides which calls of a chunk are training forwards. The `ops.OpListener` of the chunk, too."""

    def __init__(self, chunk: Chunk) -> None:
        self.site = enlist(self)
        self._chunk = chunk
        self._has_trained = False
        """The chunk was in training mode once."""
        self._handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> RootHooks:
        return self  # A copied model (an EMA, say) carries hooks that see it is not theirs, and do nothing.

    def __reduce__(self) -> Any:
        return stub_methods(type(self))

    def install(self) -> None:
        """Watch the chunk's forward."""
        root = self._chunk.root
        self._handles = [
            root.register_forward_pre_hook(self._before, with_kwargs=True),
            root.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- eager forwards ----------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            if module is self._chunk.root:
                own = self._chunk.taps.own
                trace_begin(self.site)
                trace_tensors(own.graph.site, module, (args, kwargs), own.is_border_in, IS_INPUT | IS_FIRST)
            return
        former = compiler_steps_aside()
        try:
            self._called(module, args, kwargs, is_compiled=former is not None)
        finally:
            compiler_is_back(former)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if module is self._chunk.root:
                own = self._chunk.taps.own
                trace_tensors(own.graph.site, module, (output,), own.is_border_out, IS_FIRST)
                trace_end(self.site, output)
            return
        former = compiler_steps_aside()
        try:
            self._returned(module, output)
        finally:
            compiler_is_back(former)

    def _called(self, module: nn.Module, args: Any, kwargs: Any, *, is_compiled: bool) -> None:
        chunk, recorder = self._chunk, self._chunk.recorder
        if module is not chunk.root or not recorder.is_alive:
            return
        costs = recorder.recording.costs
        costs.turn_to(OWN)
        try:
            chunk.find_compiled(is_whole=is_compiled)
            chunk.in_forward = False
            if recorder.is_paused or not self._is_training():
                return
            if recorder.is_capturing():
                chunk.passes.captured_forward()
                return
            chunk.begin_forward()
            chunk.taps.move_last()
            own = chunk.taps.own
            if chunk.taps.has_own and (kwargs or len(args) != 1 or not take_again(own, args[0], True, None)):
                own.take_inputs(args, kwargs)
        except Exception as error:
            recorder.guard("", error, lost=NO_FORWARD)
        finally:
            costs.turn_to(TRAINER)

    def _returned(self, module: nn.Module, output: Any) -> None:
        chunk, recorder = self._chunk, self._chunk.recorder
        if module is not chunk.root or not chunk.in_forward:
            return
        costs = recorder.recording.costs
        costs.turn_to(OWN)
        try:
            # Called with None while an exception passes: the forward failed and may be tried again.
            if output is None and sys.exc_info()[0] is not None:
                chunk.fail_forward()
                return
            own = chunk.taps.own
            if chunk.taps.has_own and not take_again(own, output, False, None):
                own.take_outputs(output)
            chunk.pending.settle("", chunk.micro_step)
            chunk.end_forward()
            self._mark(output)
            chunk.place_locals(output)
            chunk.passes.after_forward(chunk)
        except Exception as error:
            chunk.in_forward = False
            recorder.guard("", error, lost=NO_FORWARD)
        finally:
            costs.turn_to(TRAINER)

    def _is_training(self) -> bool:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_inference() or in_backward():
            return False
        return self._is_trained()

    def _is_trained(self) -> bool:
        if in_backward():
            return False
        if self._chunk.root.training:
            self._has_trained = True
            return True
        # A model that was never put into training mode is trained in evaluation mode; others are evaluated in it.
        return not self._has_trained

    def _mark(self, output: Any) -> None:
        """Put a hook on the output that reports its backward and micro_step, also where its gradient is not measured."""
        for _, tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                hang(tensor, BackwardMark(self._chunk, self._chunk.micro_step))
                return

    # -- a forward that is inside a graph from its beginning to its end -------------------------------------------------

    def forward_begins(self) -> None:
        """Called by the op in the graph where the chunk's forward begins."""
        chunk = self._chunk
        if chunk.in_forward:  # The last one never ended: it failed.
            chunk.fail_forward()
        if chunk.recorder.is_alive and not chunk.recorder.is_paused and self._is_trained() and not in_inference():
            chunk.begin_forward()

    def forward_ends(self) -> Ticket:
        """Called by the op where it ends; return the ticket that the backward brings back."""
        chunk = self._chunk
        if not chunk.in_forward:
            return NO_TICKET
        chunk.end_forward()
        chunk.passes.after_forward(chunk)
        return Ticket(int(self.site), -1, chunk.micro_step, chunk.recorder.ended_steps, new_serial())

    def gradient_passes(self, gradient: torch.Tensor, ticket: Ticket) -> None:
        """Called when the gradient of the chunk's output arrives: its backward runs."""
        chunk = self._chunk
        if ticket.step == chunk.recorder.ended_steps and chunk.seen.graphs.is_first_answer(ticket):
            BackwardMark(chunk, ticket.micro_step)(gradient)

    def tensor_passes(self, tensor: torch.Tensor, former: Ticket, path: str, how: int) -> Ticket:
        """Never: the chunk's own tensors pass at its own tap."""
        return former

    def guard_op(self, error: Exception) -> None:
        """Report an exception to the recorder's guard."""
        self._chunk.recorder.guard("", error, lost=NO_FORWARD)


for _hook in (RootHooks._before, RootHooks._after):
    run_as_it_is(_hook.__code__)
