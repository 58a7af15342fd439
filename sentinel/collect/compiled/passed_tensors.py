"""GraphMemory: the sightings of tensors that pass between a chunk's compiled graphs and the eager code around them."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sentinel.collect.compiled.ops import Ticket
from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.rows.tensor_table import TensorEntry

_Key: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class GraphMemory:
    """Sightings by the memory of their tensors: a graph returns its outputs under other objects than its ops saw.

    Only tensors that enter or leave a graph are kept: inside it one memory holds one tensor after the other.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], TensorEntry] = {}
        """(site, id) -> entry of what passed in a compiled graph: tickets name them."""
        self._sightings: dict[int, Sighting] = {}
        """Serial of a ticket of the running forward -> what passed."""
        self._held: dict[_Key, tuple[StorageWeakRef, int, bool, Sighting]] = {}
        """(memory, version, whether a graph's op saw it, what passed)"""
        self._answered: set[int] = set()
        """Serials of the tickets whose gradients came in this step, or are not to be measured."""
        self._step = -1

    def begin(self, step: int) -> None:
        """Begin a forward. step: number of steps that have ended in this process."""
        self._held, self._sightings = {}, {}
        if step != self._step:
            self._step, self._answered = step, set()

    def forget(self) -> None:
        """End a forward: drop its tensors."""
        self._held, self._sightings = {}, {}

    def note(self, ticket: Ticket, sighting: Sighting) -> None:
        """Keep the sighting that a ticket was returned for."""
        self._entries[ticket.site, ticket.entry] = sighting.entry
        self._sightings[ticket.serial] = sighting

    def entry_of(self, ticket: Ticket) -> TensorEntry | None:
        """Return the entry of a ticket; None: it has none, or is another chunk's."""
        return self._entries.get((ticket.site, ticket.entry))

    def sighting_of(self, ticket: Ticket) -> Sighting | None:
        """Return the sighting that a ticket of the running forward was returned for.

        None: none, or it is another chunk's.
        """
        return self._sightings.get(ticket.serial)

    def remember(self, tensor: torch.Tensor, sighting: Sighting, *, in_graph: bool) -> None:
        """Remember the sighting of a tensor that enters or leaves a graph, while its memory is neither freed nor written."""
        if tensor.layout is torch.strided and not hasattr(tensor, "_local_tensor"):
            memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._held[_key(tensor)] = (memory, tensor._version, in_graph, sighting)

    def find(self, tensor: torch.Tensor, *, in_graph: bool) -> Sighting | None:
        """Return the sighting of a tensor before it entered a graph, or just before it left one; None: there is none."""
        if not self._held or tensor.layout is not torch.strided or hasattr(tensor, "_local_tensor"):
            return None
        # What others have made of a graph's output lies in the same memory and is another tensor, as it is without graphs.
        if not in_graph and tensor.grad_fn is not None and not tensor.grad_fn.name().startswith("CompiledFunction"):
            return None
        memory, version, was_in_graph, sighting = self._held.get(_key(tensor), (None, 0, False, None))
        if memory is None or memory.expired() or version != tensor._version:  # type: ignore[no-untyped-call]
            return None
        return sighting if in_graph or was_in_graph else None

    def drop(self, serial: int) -> None:
        """Do not measure the gradient of this ticket."""
        self._answered.add(serial)

    def is_first_answer(self, ticket: Ticket) -> bool:
        """Return whether the gradient of a ticket comes for the first time: zero-bubble schedules and retained graphs walk
        twice."""
        if ticket.serial in self._answered:
            return False
        self._answered.add(ticket.serial)
        return True


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype
