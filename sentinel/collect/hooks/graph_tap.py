"""The tensors of one module inside a compiled graph, measured by the ops that its hooks left in the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
from sentinel.collect.hooks.backwards import in_backward
from sentinel.collect.hooks.gradient_taps import GradientTap
from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind

if TYPE_CHECKING:
    from sentinel.collect.hooks.module_tap import ModuleTap

NO_OUTPUTS = "rows of its outputs, and of their gradients, are missing from this step"


class GraphTap:
    """The `ops.OpListener` of one module: its ops call it when a compiled graph runs."""

    def __init__(self, tap: ModuleTap) -> None:
        self.site = enlist(self)
        self._tap = tap
        self._taken_over: set[tuple[bool, str]] = set()
        """(is input, path) of the borders that went on, in a compiled graph, where another site had met their tensor."""
        self._answers: dict[tuple[bool, str], tuple[TensorEntry, bool]] = {}
        """(is input, path) -> what passed there in the last compiled forward, and whether its gradient is wanted."""

    def tensor_passes(self, tensor: torch.Tensor, former: Ticket, path: str, how: int) -> Ticket:
        """Measure a tensor that a compiled graph hands over, and return the ticket for its backward. As `ops.OpListener`."""
        tap, names, chunk = self._tap, self._tap.names, self._tap.chunk
        sites, seen = chunk.recorder.sites, chunk.seen
        tap.has_passed = True
        if not chunk.recorder.is_alive or (tap.may_skip and not sites.is_due):
            return former
        is_input, was_first = bool(how & IS_INPUT), bool(how & IS_FIRST)
        if in_backward() and (former.entry < 0 or (is_input, path) in self._taken_over):
            # A checkpointed part runs again: its backward gets this ticket instead of the first one.
            entry, is_wanted = self._answers.get((is_input, path), (None, False))
            return former if entry is None else self._ticket(Sighting(entry), chunk.backward_micro_step, is_wanted)
        takes = tap.takes_in if is_input else tap.takes_out
        if not is_input:
            tap.has_gradient |= bool(how & (HAS_GRADIENT | IS_WITHOUT_GRAPH))
        if not chunk.in_forward or in_backward() or not takes or not (was_first or tap.takes_all):
            return former
        in_graph = bool(how & IN_GRAPH)
        known = seen.graphs.sighting_of(former)
        is_here = known is not None  # Seen in this very graph, which has one ticket for the tensor: the last.
        if known is None and (how & ENTERS_GRAPH or not in_graph):
            known = seen.known(tensor, in_graph=in_graph)
        is_border = known is not None and was_first and names.goes_on(known, path, is_input)
        if known is not None and not is_border:
            is_wanted = names.name_again(known.entry, path, is_input, was_first, tensor) and bool(how & HAS_GRADIENT)
            if is_here:
                return self._ticket(known, chunk.micro_step, True) if is_wanted else former
            self._answers[is_input, path] = known.entry, is_wanted
            return self._ticket(known, chunk.micro_step, is_wanted)
        entry = names.own(path, tensor, is_input, was_first)
        chunk.order.place(entry)
        chunk.survey.note_take(entry)
        sighting = Sighting(entry, is_border=was_first and is_input in names.borders)
        if not in_graph:
            seen.remember(tensor, sighting)
        elif how & LEAVES_GRAPH:
            seen.graphs.remember(tensor, sighting, in_graph=True)
        kind, grad_kind = (Kind.ACTIVATION_IN, Kind.DGRAD_IN) if is_input else (Kind.ACTIVATION, Kind.DGRAD)
        if known is not None:
            sighting.row = chunk.take_over(known, entry)
            self._taken_over.add((is_input, path))
        if kind in takes and sighting.row < 0:
            measure = sites.observe if known is None or not sites.is_due else sites.catch_up
            sighting.row = measure(entry, tensor, chunk.micro_step)
        is_wanted = False
        if grad_kind in takes and not how & IS_PARAMETER:
            grad = names.own_gradient(entry, tensor, grad_kind, path)
            is_wanted = bool(how & (HAS_GRADIENT | IS_WITHOUT_GRAPH)) and sites.is_looked_at(grad)
        if known is not None:
            sites.name_alike(known.entry, entry)
        elif former.entry >= 0:  # Another model's tensor too: the graph has one ticket for it.
            return former
        self._answers[is_input, path] = entry, is_wanted
        return self._ticket(sighting, chunk.micro_step, is_wanted)

    def gradient_passes(self, gradient: torch.Tensor, ticket: Ticket) -> None:
        """Measure the gradient of the tensor that a ticket was returned for."""
        entry = self._tap.chunk.seen.graphs.entry_of(ticket)
        if entry is not None and entry.grad is not None and self._tap.chunk.seen.graphs.is_first_answer(ticket):
            tap = GradientTap(self._tap.chunk, entry.grad, ticket.micro_step)
            tap.step = ticket.step
            tap(gradient)

    def forward_begins(self) -> None:
        """Never: a module is no chunk."""

    def forward_ends(self) -> Ticket:
        """Never: a module is no chunk."""
        return NO_TICKET

    def guard_op(self, error: Exception) -> None:
        """Report an exception to the recorder's guard."""
        self._tap.chunk.recorder.guard(self._tap.name, error, lost=NO_OUTPUTS)

    def _ticket(self, sighting: Sighting, micro_step: int, is_wanted: bool) -> Ticket:
        serial = new_serial() if is_wanted else -new_serial()
        ticket = Ticket(int(self.site), sighting.entry.id, micro_step, self._tap.chunk.recorder.ended_steps, serial)
        sighting.serial = max(sighting.serial, serial)
        self._tap.chunk.seen.graphs.note(ticket, sighting)
        return ticket
