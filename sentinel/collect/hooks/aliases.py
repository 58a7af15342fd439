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
    """Finds as what it was seen that lies in the same living memory, unchanged since, and has the same gradient."""

    def __init__(self, functions: frozenset[str]) -> None:
        """functions: names of the graph's nodes that hand a tensor on as it is, and its gradient too."""
        self._functions = functions
        self._seen: dict[_Key, tuple[StorageWeakRef, int, bool, Sighting]] = {}

    def forget(self) -> None:
        """A forward begins, or is over."""
        self._seen = {}

    def remember(self, tensor: torch.Tensor, sighting: Sighting) -> None:
        """Let later sites of this forward find the tensor."""
        if tensor.layout is torch.strided and not hasattr(tensor, "_local_tensor"):
            # An address is used again: the memory must not have been given back since.
            memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._seen[_key(tensor)] = (memory, tensor._version, tensor.requires_grad, sighting)

    def origin(self, tensor: torch.Tensor) -> torch.Tensor | tuple[Any, int] | None:
        """Return what made a tensor before it was handed on: (node, which output), or the leaf; None: it was not handed on.

        There its gradient is the sum of what all its readers send back; at the tensor itself it is one reader's.
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
        """Return as what it has passed a site; None: it was not, or a gradient may differ."""
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
    """Return what finds the tensors that FSDP2 hands on; None for modules that it does not shard."""
    return Aliases(FSDP_MARKS) if any(hasattr(module, "_get_fsdp_state") for module in modules) else None
