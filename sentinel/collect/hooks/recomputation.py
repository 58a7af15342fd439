"""Reentrant checkpointing: a forward runs without a graph first, and again, with one, when its backward comes."""

from __future__ import annotations

import torch

from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind


class Recomputation:
    """Decides whether the gradient of a recomputed tensor is measured at its first forward or its recompute: never at
    both."""

    def __init__(self) -> None:
        self.is_seen = False
        """A forward without graph was seen inside a training forward."""
        self.without_graph: set[int] = set()
        """Ids of the entries whose tensors were seen in such a forward."""
        self.asked_twice: dict[tuple[int, int], bool] = {}
        """(id of a gradient's entry, micro_step) hooked in such a forward and again in its recompute -> was measured."""

    def note_without_graph(self, entry: TensorEntry, tensor: torch.Tensor, kind: Kind, micro_step: int) -> None:
        """Note a tensor of a forward without graph: outputs get no gradient there, inputs do.

        Megatron adds residuals with gradients on: where an input comes from is not known before the backward.
        """
        self.is_seen = True
        if kind is Kind.ACTIVATION or tensor.grad_fn is not None or not tensor.requires_grad:
            self.without_graph.add(entry.id)
            if tensor.requires_grad and entry.grad is not None:
                self.asked_twice[entry.grad.id, micro_step] = False

    def note_with_graph(self, entry: TensorEntry, grad: TensorEntry, micro_step: int) -> None:
        """Note a tensor of a forward with a graph: it is not recomputed, and its gradient comes once."""
        self.without_graph.discard(entry.id)
        self.asked_twice.pop((grad.id, micro_step), None)

    def is_answered(self, entry: TensorEntry, micro_step: int) -> bool:
        """Return whether another hook has measured this gradient of a micro_step, and mark it as measured."""
        key = (entry.id, micro_step)
        if key not in self.asked_twice:
            return False
        was, self.asked_twice[key] = self.asked_twice[key], True
        return was
