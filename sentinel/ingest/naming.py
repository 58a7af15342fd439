"""Canonical names: the same tensor has the same name on every layout."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import msgspec

from sentinel.kinds import BACKWARD_KINDS, ROW_OF, Side, labels, measured_kind
from sentinel.messages import ChunkInfo, Descriptor, TensorInfo
from sentinel.place import canonical, chunk_name, layer_offsets

_BACKWARD = labels(BACKWARD_KINDS)


class CanonicalNames(msgspec.Struct, frozen=True):
    """Local names made canonical, for all descriptors of one run."""

    offsets: dict[int, dict[str, int]]
    """Depth -> {block container: number to add to local layer numbers}."""
    wholes: dict[int, str]
    """Depth -> the name of that chunk itself."""
    num_depths: int
    clashes: frozenset[str]
    """Canonical names that two depths claim for different tensors, which get their stage as a distinction."""
    model: str = ""
    """Which of the trainer's models these are the names of; empty: the only one, or what belongs to none."""
    models: dict[str, CanonicalNames] = {}
    """The names of each of several models, which have layers and depths of their own."""

    def of_model(self, model: str) -> CanonicalNames:
        """Return the names of one of the trainer's models."""
        return self.models.get(model, self)

    def of(
        self,
        name: str,
        depth: int,
        name_map: Mapping[str, str] | None = None,
        own_offsets: Mapping[str, int] | None = None,
        kind: str = "",
    ) -> str:
        """Return the canonical name of a local one. own_offsets: those that its rank says itself (`ChunkInfo.offsets`).

        kind: of the tensor. What the first chunk takes in and what the last one gives out are the whole model's, with all
        that probes make of it; so are the losses of routers.
        """
        whole = self.wholes.get(depth, chunk_name(depth, self.num_depths, self.model))
        kind = measured_kind(kind, name)
        side = ROW_OF[kind].side if kind in ROW_OF else Side.NONE
        is_first, is_last = depth == 0, depth == self.num_depths - 1
        if kind == "router" or (side is Side.INPUT and is_first) or (side is Side.OUTPUT and is_last):
            whole = chunk_name(0, 1, self.model)
        offsets = self.offsets.get(depth, {})
        full = canonical(name, {**offsets, **own_offsets} if own_offsets else offsets, whole, name_map)
        if full.partition(":")[0] in self.clashes:
            return f"{whole}.{full}"
        is_whole = name == "" or name.startswith(":")
        return f"{self.model}.{full}" if self.model and not is_whole else full


def make_names(descriptors: Mapping[int, Descriptor]) -> CanonicalNames:
    """Return the names for the ranks' descriptors (rank -> descriptor).

    Local layer numbers become global ones by the depths before them, unless a rank's config says its own offset. Where two
    depths still claim one name for a parameter, or for a module that holds some or passes a gradient on, both are qualified
    by their stage: nothing is merged by accident. Each of several models has names, layer numbers and depths of its own.
    """
    models = sorted({chunk.model for descriptor in descriptors.values() for chunk in descriptor.chunks} - {""})
    return msgspec.structs.replace(
        _names_of(descriptors, ""), models={model: _names_of(descriptors, model) for model in models}
    )


def _names_of(descriptors: Mapping[int, Descriptor], model: str) -> CanonicalNames:
    blocks: dict[int, list[str]] = {}
    given: dict[int, int] = {}
    chunks: dict[int, tuple[Descriptor, ChunkInfo]] = {}
    for _, descriptor in sorted(descriptors.items()):
        for chunk in descriptor.chunks:
            if chunk.model == model and chunk.depth not in chunks:
                chunks[chunk.depth] = (descriptor, chunk)
                blocks[chunk.depth] = list(chunk.blocks)
                if descriptor.layer_offset is not None:
                    given[chunk.depth] = descriptor.layer_offset
    offsets = layer_offsets(blocks)
    for depth, offset in given.items():
        containers = {name.rpartition(".")[0] for name in blocks[depth]}
        offsets[depth] = dict.fromkeys(containers, offset)
    for depth, (_, chunk) in chunks.items():
        offsets[depth] = {**offsets[depth], **chunk.offsets}
    num_depths = len(chunks)
    wholes = {depth: chunk_name(depth, num_depths, model) for depth in chunks}
    owner: dict[str, int] = {}
    clashes: set[str] = set()
    parents: set[str] = set()
    for depth, (descriptor, chunk) in sorted(chunks.items()):
        params = {t.name for t in descriptor.tensors if t.kind == "param" and t.chunk == chunk.vpp_stage}
        # A parameter that the map names by itself is meant to be that one: a pipeline's copy of a tied embedding.
        params -= descriptor.name_map.keys()
        names = {module for module in chunk.modules if module}
        if chunk.flows is not None:
            names &= _holders(params).union(chunk.flows)
        inner = names if chunk.flows is not None else names | params
        renumbered = functools.partial(
            canonical, offsets=offsets.get(depth, {}), whole=wholes[depth], name_map=descriptor.name_map
        )
        parents |= {renumbered(name).rpartition(".")[0] for name in inner}
        names |= params
        containers = {prefix for name in chunk.blocks if (prefix := name.rpartition(".")[0])}
        for name in names - containers:
            full = renumbered(name)
            if owner.setdefault(full, depth) != depth:
                clashes.add(full)
    # A module that is cut in two by a pipeline (`decoder` holding layers on both stages) is one module: only what holds
    # parameters of its own, or is a leaf, can clash.
    return CanonicalNames(offsets, wholes, num_depths, frozenset(name for name in clashes if name not in parents), model)


def _holders(params: Iterable[str]) -> set[str]:
    """Return the names of the modules that hold these parameters, and of those that hold such modules."""
    found: set[str] = set()
    for name in params:
        while (name := name.rpartition(".")[0]) and name not in found:
            found.add(name)
    return found


def segment_of(tensor: TensorInfo, chunk: ChunkInfo) -> str:
    """Return the local name of the black box segment in which a tensor was made; empty when it is not this chunk's.

    An activation at border i was made by the segment that ends there, a gradient by the one that begins there.
    """
    is_gradient = tensor.kind in _BACKWARD
    if tensor.border:
        at = tensor.border_index if is_gradient else tensor.border_index - 1
        return chunk.segments[at] if 0 <= at < len(chunk.segments) else ""
    name = tensor.name.partition(":")[0]
    if tensor.kind in ("param", "wgrad", "wgrad_unreduced"):
        name = tensor.name
    for block in chunk.blocks:
        if name == block or name.startswith(block + "."):
            return block
    if not chunk.blocks or not chunk.segments:
        return chunk.segments[0] if chunk.segments else ""
    position = {module: at for at, module in enumerate(chunk.modules)}
    module = name
    while module and module not in position:
        module = module.rpartition(".")[0]
    first = min((position[block] for block in chunk.blocks if block in position), default=0)
    return chunk.segments[0] if position.get(module, 0) < first else chunk.segments[-1]
