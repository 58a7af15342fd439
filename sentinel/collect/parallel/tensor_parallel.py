"""The plain tensors of a model under torch's tensor parallelism: which logical tensor each is, and how it is placed.

Between its DTensors, which know their placements, such a model computes on plain local tensors. Only the user knows how
those are placed, yet the placement is declared at both ends: what comes out of `to_local` is placed as the DTensor was, and
what goes into `from_local` is declared to be placed so. Both leave a node in the autograd graph (`placement_graph.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.parallel.placement_graph import Key, PlacementGraph, name_of, word_of
from sentinel.collect.parallel.placements import is_dtensor
from sentinel.collect.parallel.styles import declared_by_style
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.place import Place
from sentinel.record import Flag

PASSING = frozenset(
    ("_FromTorchTensor", "_ToTorchTensor", "Redistribute", "RegisterPostBackwardFunction", "RegisterPreBackwardFunction")
)
"""Nodes that hand on the same logical tensor, held in another way."""


class LocalTensors:
    """Placements of the plain tensors of one chunk, read from its forwards. Does nothing without a tensor-parallel group."""

    def __init__(self) -> None:
        self.place = Place()
        self.is_reported = False
        """A site became known at once in the running forward."""
        self._answers: dict[int, tuple[str, str]] = {}
        """Id of an entry -> placement over tp of its tensor, and of the gradient of that."""
        self._asked: dict[int, tuple[TensorEntry, Any, int, bool]] = {}
        """Id of an entry -> entry, node that made its tensor (or the leaf itself), which output of the node, and whether it
        is computed for each head of an attention."""
        self._seen: dict[Key, tuple[Any, Sighting]] = {}

    @property
    def is_split(self) -> bool:
        """Whether there is a tensor-parallel group of more than one rank."""
        return self.place.tp_size > 1

    def begin(self, place: Place) -> None:
        """Begin a forward. place: of this rank; a new one drops all placements."""
        if place != self.place:
            self.place = place
            self._answers.clear()
        self.forget()

    def forget(self) -> None:
        """Drop references to the autograd graph."""
        self._asked, self._seen = {}, {}

    def remember(self, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Remember a tensor, so that later sites find the same logical tensor held in another way."""
        if self.is_split and tensor.grad_fn is not None:
            for node, number in ((tensor.grad_fn, tensor.output_nr), self.origin(tensor)):
                self._seen[id(node), number] = (node, sighting)

    def origin(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """Return (autograd node, number of its output) that made the logical tensor: this tensor's own, or an earlier one.

        The gradient there is the sum over all readers of the logical tensor.
        """
        node: Any = tensor.grad_fn
        number = tensor.output_nr
        while node is not None and name_of(node) in PASSING and number < len(node.next_functions):
            behind, at = node.next_functions[number]
            if behind is None or hasattr(behind, "variable"):
                break
            node, number = behind, at
        return node, number

    def source(self, tensor: torch.Tensor) -> Sighting | torch.Tensor | None:
        """Return the sighting, or else the leaf, of the same logical tensor held in another way; None: there is none."""
        if not self.is_split:
            return None
        node: Any = tensor.grad_fn
        number = tensor.output_nr
        if node is None:
            return getattr(getattr(tensor, "_local_tensor", None), "_base", None)
        while node is not None:
            found = self._seen.get((id(node), number))
            if found is not None:
                return found[1]
            leaf: torch.Tensor | None = getattr(node, "variable", None)
            if leaf is not None:
                return None if isinstance(leaf, nn.Parameter) else leaf
            if name_of(node) not in PASSING or len(node.next_functions) <= number:
                return None
            node, number = node.next_functions[number]
        return None

    def ask(
        self, entry: TensorEntry, tensor: torch.Tensor, module: nn.Module, is_output: bool, of_heads: bool = False
    ) -> None:
        """Find the placement of a plain tensor: at once if it is known, else in `resolve`, when the forward has ended.

        is_output: the module made it. of_heads: it was computed for each head of an attention separately.
        """
        if not self.is_split or not any(_is_open(one) for one in (entry, entry.grad)):
            return
        answer = self._answers.get(entry.id)
        if answer is None and not tensor.requires_grad:
            word = word_of(declared_by_style(module, is_output), self.place)
            answer = self._answers[entry.id] = (word, "replicate" if word == "partial" else word)
        if answer is not None:
            self.is_reported |= _note_placements(entry, answer)
        else:
            node, number = self.origin(tensor) if is_dtensor(tensor) else (tensor.grad_fn, tensor.output_nr)
            self._asked[entry.id] = (entry, tensor if node is None else node, number, of_heads)

    def resolve(self, outputs: Iterable[torch.Tensor]) -> bool:
        """Set the placements asked for in the forward that ended with `outputs`; return whether any became known."""
        asked, self._asked = self._asked, {}
        is_changed, self.is_reported = self.is_reported, False
        if not asked:
            return is_changed
        # Each is tried once: a model that surprises us costs one exception, not one a step.
        self._answers.update(dict.fromkeys(asked, ("unknown", "unknown")))
        graph = PlacementGraph(self.place, outputs, [(node, number) for _, node, number, _ in asked.values()])
        for entry, node, number, of_heads in asked.values():
            answer = graph.words(node, number)
            if of_heads and answer[0] == "unknown" and not isinstance(node, torch.Tensor) and graph.is_cut_by_heads(node):
                answer = ("shard", answer[1])
            self._answers[entry.id] = answer
            is_changed |= _note_placements(entry, answer)
        return is_changed


def _note_placements(entry: TensorEntry, answer: tuple[str, str]) -> bool:
    """Note the placements over tp; True when one of them was not known before."""
    is_changed = False
    for one, word in ((entry, answer[0]), (entry.grad, answer[1])):
        if one is not None and _is_open(one) and word != "unknown":
            one.placements = {**one.placements, "tp": word}
            if "unknown" not in one.placements.values():
                one.flags &= ~int(Flag.PER_RANK)
            is_changed = True
    return is_changed


def _is_open(entry: TensorEntry | None) -> bool:
    return entry is not None and entry.placements.get("tp") == "unknown"
