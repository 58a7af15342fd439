"""Outputs that a collective still writes: measured once the model has read them, and so waited for them."""

from __future__ import annotations

import torch

from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.hooks.sites import Sites
from sentinel.collect.parallel.placements import arrived


class PendingOutputs:
    """The pending outputs of the running forward, each with a row reserved when it was made, in the order of calls."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._outputs: list[tuple[str, torch.Tensor, Sighting]] = []
        """(module, tensor, as what it passes)"""

    def add(self, module: str, tensor: torch.Tensor, sighting: Sighting) -> bool:
        """Keep an output until the model has read it; return False where nothing measures it."""
        if sighting.row < 0 and not self._sites.has_observers:
            return False
        self._outputs.append((module, tensor, sighting))
        return True

    def settle(self, module: str, micro_step: int, one: torch.Tensor | None = None) -> None:
        """Measure the outputs made inside `module`, which has returned, or `one` alone, which the model reads now."""
        if not self._outputs:
            return
        left = []
        for inner, tensor, sighting in self._outputs:
            if tensor is one or (one is None and (not module or inner.startswith(module + "."))):
                self._sites.fill(sighting.row, sighting.entry, arrived(tensor), micro_step)
            else:
                left.append((inner, tensor, sighting))
        self._outputs = left

    def forget(self) -> None:
        """Drop them: called when a forward begins or raised."""
        self._outputs = []
