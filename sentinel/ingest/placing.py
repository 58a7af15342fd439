"""Where each rank's tensor belongs: which logical tensor it is part of, and which shard; remembered between layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from sentinel.ingest.naming import CanonicalNames, segment_of
from sentinel.ingest.row_tables import coupled_modules
from sentinel.kinds import COPIED_KINDS, labels
from sentinel.messages import ChunkInfo, Descriptor, TensorInfo
from sentinel.place import Place
from sentinel.step_view import LogicalTensor, Shard

MERGED_AXES = ("dp", "tp", "cp", "ep")
WEIGHT_KINDS = labels(COPIED_KINDS)
"""Data-parallel ranks hold copies of these; of all else each holds its own part of the batch."""
KEPT_APART = ("unknown", "partial")
"""Placements over which rows are not merged: each rank keeps its own series, with its coordinate in the key."""
NAMING_KINDS = ("param", "wgrad")
"""Kinds that the names and couplings of other tensors depend on."""

_Coordinates: TypeAlias = tuple[tuple[str, int], ...]


class Placed:
    """One rank's tensor, and where it belongs."""

    __slots__ = ("chunk", "is_coupled", "key", "logical", "sharded", "tensor")

    def __init__(self, tensor: TensorInfo, chunk: ChunkInfo, key: tuple[str, str, _Coordinates], sharded: Shard) -> None:
        self.tensor = tensor
        self.chunk = chunk
        self.key = key
        """(canonical name, kind, coordinates kept apart): ranks that have it hold the same logical tensor."""
        self.sharded = sharded
        """The coordinates that determine the shard: ranks that are equal in them hold replicas."""
        self.is_coupled = False
        """Whether it belongs to a module that communicates."""
        self.logical: LogicalTensor | None = None
        """As it was in the layout made last, where this rank was the first to name it."""


class Placing:
    """Places the tensors of one rank."""

    def __init__(
        self, names: CanonicalNames, descriptor: Descriptor, known: dict[object, dict[tuple[str, str], str]]
    ) -> None:
        """known: canonical names found so far, of all ranks: they have much the same."""
        self._names = names
        self._descriptor = descriptor
        self._chunks = {chunk.vpp_stage: chunk for chunk in descriptor.chunks}
        self._coupled = coupled_modules(descriptor)
        self._where: dict[tuple[bool, tuple[tuple[str, str], ...], str], tuple[_Coordinates, Shard]] = {}
        self._known = {
            stage: known.setdefault(
                (one.model, one.depth, tuple(descriptor.name_map.items()), tuple(one.offsets.items())), {}
            )
            for stage, one in self._chunks.items()
        }

    def place(self, tensor: TensorInfo) -> Placed:
        """Return where one tensor of the descriptor belongs."""
        chunk = self._chunks.get(tensor.chunk) or ChunkInfo(vpp_stage=tensor.chunk, depth=0)
        # Tensors are many, their placements and names are few.
        placed = (tensor.kind in WEIGHT_KINDS, tuple(tensor.placements.items()), tensor.part)
        if placed not in self._where:
            self._where[placed] = coordinates(tensor, self._descriptor.place)
        apart, sharded = self._where[placed]
        # The chunk itself has the name of what its tensor is to the whole model.
        kind = tensor.kind if not tensor.name or tensor.name.startswith(":") else ""
        # A line of code that exchanges data belongs to no model.
        is_code = bool(chunk.model) and tensor.kind == "comm"
        name = tensor.name if is_code else self._full(chunk, tensor.name, kind)
        found = Placed(tensor, chunk, (name, tensor.kind, apart), sharded)
        found.is_coupled = (tensor.chunk, tensor.name.partition(":")[0]) in self._coupled
        return found

    def logical(self, one: Placed, at: int, ranks: tuple[int, ...]) -> LogicalTensor:
        """Return the logical tensor that it is the first to name: the `at`th, held by `ranks`."""
        known = one.logical
        if known is not None:
            if known.index != at or known.ranks != ranks:
                known = msgspec.structs.replace(known, index=at, ranks=ranks)
        else:
            known = self._made(one, at, ranks)
        one.logical = known
        return known

    def _made(self, one: Placed, at: int, ranks: tuple[int, ...]) -> LogicalTensor:
        tensor, chunk, (name, kind, apart) = one.tensor, one.chunk, one.key
        segment = segment_of(tensor, chunk)
        if segment in ("stem", "head"):
            names = self._names.of_model(chunk.model)
            is_whole = names.num_depths <= 1 and not names.model
            segment = segment if is_whole else f"{names.wholes[chunk.depth]}.{segment}"
        elif segment or (not chunk.blocks and chunk.segments):
            segment = self._full(chunk, segment)
        where = "".join(f"@{axis}{coordinate}" for axis, coordinate in apart)
        return LogicalTensor(
            index=at,
            name=name,
            kind=kind,
            key=f"{name}/{kind}{where}",
            depth=chunk.depth,
            site_pos=tensor.site_pos,
            pp_stage=self._descriptor.place.pp_rank,
            vpp_stage=chunk.vpp_stage,
            ranks=ranks,
            place=dict(apart),
            consumers=tuple(self._full(chunk, name, kind) for name in tensor.consumers),
            also=tuple(self._full(chunk, name, kind) for name in tensor.also),
            segment=segment,
            border=tensor.border,
            border_index=tensor.border_index,
            communicates=one.is_coupled,
            is_partial=tensor.is_part or "partial" in tensor.placements.values(),
            num_elements=math.prod(tensor.shape),
            dtype=tensor.dtype,
            functions=self._functions(chunk, tensor),
            is_part=tensor.is_part,
        )

    def _functions(self, chunk: ChunkInfo, tensor: TensorInfo) -> tuple[str, ...] | None:
        if not tensor.functions:
            return tensor.functions
        split = [one.partition(":") for one in tensor.functions]
        return tuple(f"{name}:{self._full(chunk, of)}" if of else name for name, _, of in split)

    def _full(self, chunk: ChunkInfo, local: str, kind: str = "") -> str:
        known = self._known.setdefault(chunk.vpp_stage, {})
        name = known.get((local, kind))
        if name is None:
            names = self._names.of_model(chunk.model)
            name = names.of(local, chunk.depth, self._descriptor.name_map, chunk.offsets, kind)
            known[local, kind] = name
        return name


def coordinates(tensor: TensorInfo, place: Place) -> tuple[_Coordinates, Shard]:
    """(coordinates kept apart, what tells the shard): ranks that differ in neither hold replicas."""
    is_data = tensor.kind not in WEIGHT_KINDS
    apart: list[tuple[str, int]] = []
    sharded: list[tuple[str, int | str]] = []
    # Stages hold different tensors; only what has the same name on all of them (a line of code, a loss over all layers) says
    # whether it is apart, or a part.
    for axis in (*MERGED_AXES, *(("pp",) if "pp" in tensor.placements else ())):
        if place.size(axis) <= 1:
            continue
        usual = ("shard" if is_data else "replicate") if axis == "dp" else "unknown"
        word = tensor.placements.get(axis, usual)
        if word in KEPT_APART:
            apart.append((axis, place.coordinate(axis)))
        elif word == "shard" and not tensor.part:
            sharded.append((axis, place.coordinate(axis)))
    if tensor.part:
        sharded.append(("part", tensor.part))
    return tuple(apart), tuple(sharded)


def is_named_alike(before: Mapping[int, Descriptor], now: Mapping[int, Descriptor]) -> bool:
    """Return whether what did not change between two sets of descriptors has its names and places still.

    So it is while the same ranks stand where they stood, with the same chunks and weights.
    """
    return before.keys() == now.keys() and all(_has_same_weights(before[rank], one) for rank, one in now.items())


def _has_same_weights(before: Descriptor, now: Descriptor) -> bool:
    if before is now:
        return True
    if (before.place, before.layer_offset, before.name_map) != (now.place, now.layer_offset, now.name_map):
        return False
    kept = len(before.tensors)
    if before.chunks != now.chunks or len(now.tensors) < kept:
        return False
    return all(
        old is new or _of_weight(old) == _of_weight(new) for old, new in zip(before.tensors, now.tensors, strict=False)
    ) and not any(one.kind in NAMING_KINDS for one in now.tensors[kept:])


def _of_weight(tensor: TensorInfo) -> tuple[object, ...]:
    """Return what names and couplings depend on; of what is no weight nothing."""
    if tensor.kind not in NAMING_KINDS:
        return ()
    return tensor.kind, tensor.name, tensor.chunk, tensor.placements.get("tp"), tensor.placements.get("cp")
