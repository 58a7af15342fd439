"""Where each rank's tensor belongs: which logical tensor it is part of, and which shard; remembered between layouts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.ingest.naming import CanonicalNames, segment_of
from sentinel.ingest.row_tables import coupled_modules
from sentinel.kinds import COPIED_KINDS, labels
from sentinel.messages import ChunkInfo, Descriptor, TensorInfo
from sentinel.place import AXES, Place
from sentinel.step_view import LogicalTensor, Shard

MERGED_AXES = ("dp", "tp", "cp", "ep")
WEIGHT_KINDS = labels(COPIED_KINDS)
"""Data-parallel ranks hold copies of these; of all else each holds its own part of the batch."""
KEPT_APART = ("unknown", "partial")
"""Placements over which rows are not merged: each rank keeps its own series, with its coordinate in the key."""
NAMING_KINDS = ("param", "wgrad")
"""Kinds that the names and couplings of other tensors depend on."""

Coordinates: TypeAlias = tuple[tuple[str, int], ...]
"""(axis, coordinate) of each axis along which rows are not merged."""


class Placed:
    """A tensor of a table, and where it belongs on each rank that has the table."""

    __slots__ = ("chunk", "cut", "is_coupled", "logical", "name", "tensor")

    def __init__(self, tensor: TensorInfo, chunk: ChunkInfo, name: str, *, is_coupled: bool) -> None:
        self.tensor = tensor
        self.chunk = chunk
        self.name = name
        """Canonical."""
        self.cut = (tensor.kind in WEIGHT_KINDS, tuple(tensor.placements.items()), tensor.part)
        """What of it says how it is cut: tensors are many, their placements are few."""
        self.is_coupled = is_coupled
        """Whether it belongs to a module that communicates."""
        self.logical: dict[Coordinates, LogicalTensor] = {}
        """Coordinates kept apart -> as it was in the layout made last, where a rank with this table was the first to name
        it."""


class PlacedWeights(NamedTuple):
    """What of a table data-parallel ranks hold copies of."""

    ids: npt.NDArray[np.int64]
    dtypes: tuple[str, ...]


def alike(descriptor: Descriptor) -> Hashable:
    """Return what ranks have in common whose tensors have the same names, and are cut along the same axes.

    Tables that are equal are one object as a rule (`wire.shared_tables`); where they are not, the ranks are not found alike,
    which costs time and no more.
    """
    place = descriptor.place
    sizes = (*(place.size(axis) for axis in AXES), place.pp_rank)
    return id(descriptor.tensors), id(descriptor.chunks), tuple(descriptor.name_map.items()), sizes


class PlacedTable:
    """Where the tensors of one table belong, on all ranks that are `alike`."""

    def __init__(
        self,
        names: CanonicalNames,
        descriptor: Descriptor,
        known: dict[object, dict[tuple[str, str], str]],
        like: PlacedTable | None = None,
    ) -> None:
        """known: canonical names found so far, of all tables: they have much the same. like: the one that the rank had
        before, of which what did not change is taken."""
        self._names = names
        self._descriptor = descriptor
        self._chunks = {chunk.vpp_stage: chunk for chunk in descriptor.chunks}
        self._coupled = coupled_modules(descriptor)
        self._known = {
            stage: known.setdefault(
                (one.model, one.depth, tuple(descriptor.name_map.items()), tuple(one.offsets.items())), {}
            )
            for stage, one in self._chunks.items()
        }
        before = iter(() if like is None else like.parts)
        self.parts: list[Placed] = [
            former if (former := next(before, None)) is not None and former.tensor is tensor else self._place(tensor)
            for tensor in descriptor.tensors
        ]
        """[tensors]"""
        self.ids = np.array([tensor.id for tensor in descriptor.tensors], np.int64)
        """[tensors]"""
        cuts: dict[tuple[bool, tuple[tuple[str, str], ...], str], int] = {}
        self.cut_of = np.array([cuts.setdefault(part.cut, len(cuts)) for part in self.parts], np.intp)
        """[tensors] the number of the way in which each is cut, as of `coordinates`."""
        of_cut = dict(zip(self.cut_of.tolist(), descriptor.tensors, strict=True))
        self._axes = [_axes(of_cut[number], descriptor.place) for number in range(len(cuts))]
        weights = [tensor for tensor in descriptor.tensors if tensor.kind in WEIGHT_KINDS]
        self.weights = PlacedWeights(np.array([one.id for one in weights], np.int64), tuple(one.dtype for one in weights))

    def coordinates(self, place: Place) -> tuple[tuple[Coordinates, ...], tuple[Shard, ...]]:
        """Return a rank's coordinates that are kept apart, and those that tell its shard, for each way in which tensors are
        cut.

        Ranks that differ in neither hold replicas; those that are equal in the first hold the same logical tensor.
        """
        apart = tuple([tuple([(axis, place.coordinate(axis)) for axis in one.apart]) for one in self._axes])
        shards: list[Shard] = []
        for one in self._axes:
            shard: Shard = tuple([(axis, place.coordinate(axis)) for axis in one.sharded])
            shards.append((*shard, ("part", one.part)) if one.part else shard)
        return apart, tuple(shards)

    def logical(self, one: Placed, apart: Coordinates, at: int, ranks: tuple[int, ...]) -> LogicalTensor:
        """Return the logical tensor that it is the first to name: the `at`th, held by `ranks`."""
        known = one.logical.get(apart)
        if known is None:
            known = self._made(one, apart, at, ranks)
        elif known.index != at or known.ranks != ranks:
            known = msgspec.structs.replace(known, index=at, ranks=ranks)
        one.logical = {**one.logical, apart: known}
        return known

    def _place(self, tensor: TensorInfo) -> Placed:
        chunk = self._chunks.get(tensor.chunk) or ChunkInfo(vpp_stage=tensor.chunk, depth=0)
        # The chunk itself has the name of what its tensor is to the whole model.
        kind = tensor.kind if not tensor.name or tensor.name.startswith(":") else ""
        # A line of code that exchanges data belongs to no model.
        is_code = bool(chunk.model) and tensor.kind == "comm"
        name = tensor.name if is_code else self._full(chunk, tensor.name, kind)
        return Placed(tensor, chunk, name, is_coupled=(tensor.chunk, tensor.name.partition(":")[0]) in self._coupled)

    def _made(self, one: Placed, apart: Coordinates, at: int, ranks: tuple[int, ...]) -> LogicalTensor:
        tensor, chunk, name, kind = one.tensor, one.chunk, one.name, one.tensor.kind
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


class _Axes(msgspec.Struct, frozen=True):
    """Along which axes a tensor is cut."""

    apart: tuple[str, ...]
    """Along which rows are not merged."""
    sharded: tuple[str, ...]
    """Along which each rank has a shard of its own."""
    part: str
    """As `TensorInfo.part`: tells the shard in place of `sharded`."""


def _axes(tensor: TensorInfo, place: Place) -> _Axes:
    is_data = tensor.kind not in WEIGHT_KINDS
    apart: list[str] = []
    sharded: list[str] = []
    # Stages hold different tensors; only what has the same name on all of them (a line of code, a loss over all layers) says
    # whether it is apart, or a part.
    for axis in (*MERGED_AXES, *(("pp",) if "pp" in tensor.placements else ())):
        if place.size(axis) <= 1:
            continue
        usual = ("shard" if is_data else "replicate") if axis == "dp" else "unknown"
        word = tensor.placements.get(axis, usual)
        if word in KEPT_APART:
            apart.append(axis)
        elif word == "shard" and not tensor.part:
            sharded.append(axis)
    return _Axes(tuple(apart), tuple(sharded), tensor.part)


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
