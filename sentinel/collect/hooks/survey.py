"""What the first whole forward after a change of the taps shows of a chunk's sites; later ones need not ask again."""

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
        """The taps were changed."""
        self.generation += 1
        self.is_complete = False

    def complete(self) -> bool:
        """A whole forward has passed; True where it is the first since the taps were changed."""
        was, self.is_complete = self.is_complete, True
        return not was

    def note_take(self, entry: TensorEntry) -> None:
        """A site takes a tensor as an entry; in the first forward of a plan nothing is taken without this."""
        if entry.generation == self.generation and not self.is_complete:
            self.repeated.add(entry.id)
        entry.generation = self.generation

    def note_functions(self, tensor: torch.Tensor, entry: TensorEntry) -> None:
        """Note, once a site, which functions that are not defined everywhere made the tensor of what was seen before it."""
        node = tensor.grad_fn
        if node is None:
            return
        if entry.functions is None and node not in self._nodes:
            self._sites.note_functions(entry, partial_functions(node, self._nodes))
        self._nodes.setdefault(node, entry.name)

    def forget(self) -> None:
        """Let go of the graph: a forward begins, or is over."""
        self._nodes = {}
