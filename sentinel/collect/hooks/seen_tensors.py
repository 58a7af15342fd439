"""What the tensors of the running forward were measured as at earlier sites, so that each is measured once."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sentinel.collect.compiled.compiled_parts import CompiledParts
from sentinel.collect.compiled.passed_tensors import GraphMemory
from sentinel.collect.hooks.aliases import Aliases
from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.hooks.survey import Survey
from sentinel.collect.parallel.tensor_parallel import LocalTensors
from sentinel.place import Place


class SeenTensors:
    """Finds the sighting of a tensor: by object, by memory behind a compiled graph, or by the logical tensor of a shard."""

    def __init__(self, survey: Survey, compiled: CompiledParts) -> None:
        self.by_id: dict[int, tuple[weakref.ref[torch.Tensor], int, Sighting]] = {}
        """id of a tensor -> (the tensor, its version, as what it has passed)."""
        self.locals = LocalTensors()
        self.graphs = GraphMemory()
        self.aliases: Aliases | None = None
        """Of a trainer that hands tensors on under new objects: FSDP2's, or an adapter's."""
        self._survey = survey
        self._compiled = compiled

    @property
    def is_by_id(self) -> bool:
        """Whether a tensor is found by its identity alone: nothing is compiled, split or handed on under new objects."""
        return not self._compiled.names and self.aliases is None and not self.locals.is_split

    def begin(self, place: Place, ended_steps: int) -> None:
        """Begin a forward. place: of this rank. ended_steps: steps that have ended in this process."""
        self.by_id = {}
        self._survey.forget()
        self.locals.begin(place)
        self.graphs.begin(ended_steps)
        if self.aliases is not None:
            self.aliases.forget()

    def end(self) -> None:
        """End a forward: drop its tensors; `locals` keeps how they are placed."""
        self.by_id = {}
        self._survey.forget()
        self.graphs.forget()

    def known(self, tensor: torch.Tensor, *, in_graph: bool = False) -> Sighting | None:
        """Return the sighting of this very tensor in this forward; None: there is none, or it was written since."""
        found = self.by_id.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1] == tensor._version:
            return found[2]
        sighting = self.graphs.find(tensor, in_graph=in_graph) if self._compiled.names else None
        return self.aliases.find(tensor) if sighting is None and self.aliases is not None else sighting

    def remember(self, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Remember what a tensor was measured as, so that later sites of this forward find it."""
        if not self._survey.is_complete:
            self._survey.note_functions(tensor, sighting.entry)
        self.by_id[id(tensor)] = (weakref.ref(tensor), tensor._version, sighting)
        self.locals.remember(tensor, sighting)
        if self._compiled.names:
            self.graphs.remember(tensor, sighting, in_graph=False)
        if self.aliases is not None:
            self.aliases.remember(tensor, sighting)

    def source(self, tensor: torch.Tensor) -> Sighting | None:
        """Return the sighting of the same logical tensor held in another way (DTensor, gathered, local); None: none."""
        if not self.locals.is_split:
            return None
        found = self.locals.source(tensor)
        sighting = self.known(found) if isinstance(found, torch.Tensor) else found
        # Of a sum that was not formed yet only the summands were measured: what is formed of it is measured by itself.
        return None if sighting is None or "partial" in sighting.entry.placements.values() else sighting

    def origin(self, tensor: torch.Tensor) -> torch.Tensor | tuple[Any, int] | None:
        """Return the leaf, or (autograd node, number of its output), that made the logical tensor.

        None: it is what made this tensor.
        """
        if tensor.grad_fn is None:
            return None
        if not self.locals.is_split:
            return None if self.aliases is None else self.aliases.origin(tensor)
        origin = self.locals.origin(tensor)
        return None if origin[0] is tensor.grad_fn else origin
