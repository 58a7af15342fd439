"""One tensor has one name: a border that meets what another site has measured makes it its own.

The black box measures the borders of stem, blocks and head at every step, under their own names. Where modules are measured
too, the module that made a border's tensor sees it first: its row then becomes the border's, so that a border's series goes
on when activation monitoring is switched on or off. The other names of the tensor stay with it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from sentinel.collect.gradient_taps import GradientTap
from sentinel.collect.placements import local_of
from sentinel.collect.tensors import Entry
from sentinel.record import Kind

if TYPE_CHECKING:
    from sentinel.collect.taps import Chunk


class Passed(NamedTuple):
    """What passed a site last in the running forward."""

    row: int
    """-1: it is not measured."""
    tensor: weakref.ref[torch.Tensor] | int
    """Or, of a compiled graph, where it lies: it leaves the graph as another object."""
    hook: GradientTap | None = None
    """Waits for its gradient."""
    serial: int = 0
    """Of the ticket on which a compiled graph hands its gradient over; 0: none does."""


NOTHING = Passed(-1, 0)


def passed(chunk: Chunk, entry: Entry, tensor: torch.Tensor | None) -> Passed:
    """Return what passed the site of an entry last, if that was this tensor; None: a ticket says that it was."""
    found = chunk.passed.get(entry.id, NOTHING)
    if tensor is None:
        return found
    seen = found.tensor if isinstance(found.tensor, int) else found.tensor()
    if seen is not tensor and isinstance(seen, torch.Tensor):
        seen = local_of(seen).data_ptr()  # A trainer's own hooks may have handed it on as another object.
    return found if seen is tensor or seen == local_of(tensor).data_ptr() else NOTHING


def take_over(chunk: Chunk, former: Entry, entry: Entry, tensor: torch.Tensor, row: int) -> None:
    """Make what was measured as `former` a border's: its row, and its place in the order. -1: it was not measured."""
    sites = chunk.recorder.sites
    entry.generation, entry.site_pos = chunk.generation, former.site_pos
    if entry.functions is None and former.functions is not None:
        sites.note_functions(entry, former.functions)
    if not sites.rename(row, former, entry, chunk.micro_step):
        sites.catch_up(entry, local_of(tensor), chunk.micro_step)


def name_alike(chunk: Chunk, former: Entry, entry: Entry) -> None:
    """Give a border, and its gradient, all names that its tensor has."""
    sites = chunk.recorder.sites
    if former.kind == Kind.ACTIVATION:
        sites.add_producer(entry, former.name)
    elif former.name != entry.name:
        sites.add_consumer(entry, former.name.partition(":")[0])
    for name in former.also:
        sites.add_producer(entry, name)
    for name in former.consumers:
        if name != entry.name or entry.kind == Kind.ACTIVATION:
            sites.add_consumer(entry, name)
