"""One tensor under several objects: a trainer's own hooks hand it on through a function that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from sentinel.collect.hooks.sightings import Sighting

FSDP_MARKS = frozenset({"RegisterPostBackwardFunctionBackward", "RegisterPreBackwardFunctionBackward"})
"""Nodes through which FSDP2 hands the inputs and outputs of the modules that it shards."""

_Key: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class Aliases:
    """Finds the sighting of a tensor under a new object: the same memory, not freed, not written since, the same
    gradient."""

    def __init__(self, functions: frozenset[str]) -> None:
        """functions: names of autograd nodes that return their input unchanged, and pass its gradient back unchanged."""
        self._functions = functions
        self._seen: dict[_Key, tuple[StorageWeakRef, int, bool, Sighting]] = {}

    def forget(self) -> None:
        """Drop what was remembered: called when a forward begins, and when it ends."""
        self._seen = {}

    def remember(self, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Remember what a tensor was measured as, so that later sites of the same forward find it."""
        if tensor.layout is torch.strided and not hasattr(tensor, "_local_tensor"):
            # An address is used again: the memory must not have been given back since.
            memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._seen[_key(tensor)] = (memory, tensor._version, tensor.requires_grad, sighting)

    def origin(self, tensor: torch.Tensor) -> torch.Tensor | tuple[Any, int] | None:
        """Return what made a tensor before such a node: (autograd node, number of its output), or the leaf; None: no such
        node.

        The gradient there is the sum over all readers of the tensor; at the tensor itself it is that of one reader.
        """
        node: Any = tensor.grad_fn
        number = tensor.output_nr
        while node is not None and node.name() in self._functions and number < len(node.next_functions):
            node, number = node.next_functions[number]
        if node is None or node is tensor.grad_fn:
            return None
        leaf: torch.Tensor | None = getattr(node, "variable", None)
        return (node, number) if leaf is None else leaf

    def find(self, tensor: torch.Tensor) -> Sighting | None:
        """Return what the tensor was measured as before in this forward.

        None: it was not, or its gradient may be another.
        """
        if tensor.layout is not torch.strided or hasattr(tensor, "_local_tensor"):
            return None
        if tensor.grad_fn is not None and tensor.grad_fn.name() not in self._functions:
            return None
        found = self._seen.get(_key(tensor))
        if found is None or found[0].expired():  # type: ignore[no-untyped-call]
            return None
        _, version, requires_grad, sighting = found
        return sighting if version == tensor._version and requires_grad == tensor.requires_grad else None


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype


def aliases_of(modules: Iterable[nn.Module]) -> Aliases | None:
    """Return the aliases of FSDP2, whose nodes hand tensors on; None: it shards none of these modules."""
    return Aliases(FSDP_MARKS) if any(hasattr(module, "_get_fsdp_state") for module in modules) else None
