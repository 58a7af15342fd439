"""The plain tensors of a model under torch's tensor parallelism: which logical tensor each is, and how it is placed.

Between its DTensors, which say it themselves, such a model computes on plain local tensors. Nobody but the user knows how
those are placed, yet torch is told at both ends: what comes out of `to_local` is placed as the DTensor was, and what goes
into `from_local` is declared to be placed so. Both leave a node in the autograd graph (`placement_graph.py`).
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
    """What one chunk's forwards showed of their plain tensors. Does nothing without a tensor-parallel group."""

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
        """Whether there is a tensor-parallel group at all."""
        return self.place.tp_size > 1

    def begin(self, place: Place) -> None:
        """A forward begins, on a rank that stands there."""
        if place != self.place:
            self.place = place
            self._answers.clear()
        self.forget()

    def forget(self) -> None:
        """Let go of the graph."""
        self._asked, self._seen = {}, {}

    def remember(self, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Let later sites find the logical tensor, however it is held there."""
        if self.is_split and tensor.grad_fn is not None:
            for node, number in ((tensor.grad_fn, tensor.output_nr), self.origin(tensor)):
                self._seen[id(node), number] = (node, sighting)

    def origin(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """Return the node, and which of its outputs, that made the logical tensor: this one's own, or one behind it.

        Others may read the tensor there: only there its gradient is whole.
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
        """Return what has passed, or else the leaf, of which this is the same logical tensor, held in another way."""
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
        """Find out how a site's tensor is placed that does not say so: at once, or when the forward has ended.

        of_heads: it was computed for each head of an attention by itself.
        """
        if not self.is_split or not any(_is_open(one) for one in (entry, entry.grad)):
            return
        answer = self._answers.get(entry.id)
        if answer is None and not tensor.requires_grad:
            word = word_of(declared_by_style(module, is_output), self.place)
            answer = self._answers[entry.id] = (word, "replicate" if word == "partial" else word)
        if answer is not None:
            self.is_reported |= _tell(entry, answer)
        else:
            node, number = self.origin(tensor) if is_dtensor(tensor) else (tensor.grad_fn, tensor.output_nr)
            self._asked[entry.id] = (entry, tensor if node is None else node, number, of_heads)

    def resolve(self, outputs: Iterable[torch.Tensor]) -> bool:
        """Answer what was asked in the forward that has ended with `outputs`; True when a site became known in it."""
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
            is_changed |= _tell(entry, answer)
        return is_changed


def _tell(entry: TensorEntry, answer: tuple[str, str]) -> bool:
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
