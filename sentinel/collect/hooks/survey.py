"""What the first whole forward after a change of the taps shows of a chunk's sites, and later ones rely on."""

from __future__ import annotations

from typing import Any

import torch

from sentinel.collect.hooks.partial_functions import partial_functions
from sentinel.collect.hooks.sites import Sites
from sentinel.collect.rows.tensor_table import TensorEntry


class Survey:
    """Knows which sites a forward passes more than once, and which functions made their tensors."""

    def __init__(self, sites: Sites) -> None:
        self.generation = 0
        """Changes with every change of the taps."""
        self.is_complete = False
        """A whole forward has passed since the taps were changed: every usual site was met."""
        self.repeated: set[int] = set()
        """Ids of the entries that stand for several tensors of one forward: of modules that are called more than once."""
        self._sites = sites
        self._nodes: dict[Any, str] = {}
        """grad_fn of the tensors of the running forward -> their sites; while sites are being met for the first time."""

    def begin_anew(self) -> None:
        """Called when the taps were changed: the next whole forward is a first one."""
        self.generation += 1
        self.is_complete = False

    def complete(self) -> bool:
        """Called after a whole forward; return whether it is the first since the taps were changed."""
        was, self.is_complete = self.is_complete, True
        return not was

    def note_take(self, entry: TensorEntry) -> None:
        """Count that a site measures a tensor as an entry, to find modules that are called more than once in a forward."""
        if entry.generation == self.generation and not self.is_complete:
            self.repeated.add(entry.id)
        entry.generation = self.generation

    def note_functions(self, tensor: torch.Tensor, entry: TensorEntry) -> None:
        """Note, once a site, the partial functions between its tensor and the sites before it."""
        node = tensor.grad_fn
        if node is None:
            return
        if entry.functions is None and node not in self._nodes:
            self._sites.note_functions(entry, partial_functions(node, self._nodes))
        self._nodes.setdefault(node, entry.name)

    def forget(self) -> None:
        """Drop references to the autograd graph: called when a forward begins, and when it ends."""
        self._nodes = {}
