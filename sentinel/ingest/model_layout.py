"""Which logical tensor each rank's tensor is, for one set of descriptors: built once, used for every step they hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Set
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.copies import added_copies, is_empty
from sentinel.ingest.naming import CanonicalNames, make_names
from sentinel.ingest.node_merge import NodeMerges
from sentinel.ingest.node_share import NodeShare
from sentinel.ingest.own_rows import OwnRowIndex
from sentinel.ingest.placing import WEIGHT_KINDS, Placed, Placing, is_named_alike
from sentinel.ingest.row_tables import look_up, table_of
from sentinel.ingest.whole_tensor_values import WholeTensorValues
from sentinel.messages import Descriptor
from sentinel.native.library import DigestRows
from sentinel.place import Place
from sentinel.step_view import CopySet, Holder, LogicalTensor, Replicas, Shard

MAX_LAYOUTS, MANY_TENSORS = 8, 100_000
"""Layouts that are remembered, and tensors from which on only two layouts are; a bound on memory."""
MAX_SHARES = 4
"""Sets of ranks of which a layout remembers what they hold."""
MAX_NODE_SHARES = 4096
"""Machines whose part of a layout it remembers; a bound on memory. One that is asked for again is made again."""
MAX_REMEMBERED = 200_000
"""Tensors of all ranks up to which a layout remembers where each belongs, for the layout after it."""


class ModelLayout:
    """Which logical tensor each rank's tensor is, for one set of descriptors; built once, used every step."""

    def __init__(self, descriptors: Mapping[int, Descriptor], like: ModelLayout | None = None) -> None:
        """like: an earlier one; what did not change since is taken from it. The layout is the same with and without."""
        self.descriptors = dict(sorted(descriptors.items()))
        self.places: dict[int, Place] = {rank: d.place for rank, d in self.descriptors.items()}
        if like is not None and not is_named_alike(like.descriptors, self.descriptors):
            like = None
        self.names: CanonicalNames = make_names(self.descriptors) if like is None else like.names
        self._placed: dict[int, list[Placed]] = {}
        self.tensors: list[LogicalTensor] = []
        self._to_logical: dict[int, npt.NDArray[np.int32]] = {}
        self._to_copy: dict[int, npt.NDArray[np.int32]] = {}
        self.replicas: list[Replicas] = []
        """Copies that must be bit-identical, where there are several."""
        self.num_copies = 0
        """Distinct shards, copies taken as one."""
        self._tables: dict[int, tuple[int, int, int]] = {}
        self._shares: dict[frozenset[int], npt.NDArray[np.float64]] = {}
        self._node_shares: dict[tuple[int, ...], NodeShare] = {}
        self._build({} if like is None else like._placed)

    def __getstate__(self) -> dict[str, object]:
        # Addresses, and what holds them, mean nothing in another process.
        kept = {name: value for name, value in self.__dict__.items() if name != "digest_rows"}
        return {**kept, "_placed": {}, "_tables": {}, "_node_shares": {}}

    def _build(self, remembered: Mapping[int, list[Placed]]) -> None:
        keys: dict[tuple[str, str, tuple[tuple[str, int], ...]], int] = {}
        first: list[tuple[Placing, Placed]] = []
        ranks: list[list[int]] = []
        copies: dict[tuple[int, Shard], tuple[list[Holder], int]] = {}
        dtypes: dict[int, dict[str, list[Holder]]] = {}
        known_names: dict[object, dict[tuple[str, str], str]] = {}
        is_remembering = sum(len(one.tensors) for one in self.descriptors.values()) <= MAX_REMEMBERED
        for rank, descriptor in self.descriptors.items():
            placing = Placing(self.names, descriptor, known_names)
            before = iter(remembered.get(rank, ()))
            parts = [
                known if (known := next(before, None)) is not None and known.tensor is tensor else placing.place(tensor)
                for tensor in descriptor.tensors
            ]
            if is_remembering:
                self._placed[rank] = parts
            at_logical, at_copy = [], []
            for part in parts:
                at = keys.setdefault(part.key, len(first))
                if at == len(first):
                    first.append((placing, part))
                    ranks.append([])
                ranks[at].append(rank)
                at_logical.append(at)
                holders, number = copies.setdefault((at, part.sharded), ([], len(copies)))
                tensor = part.tensor
                holders.append((rank, tensor.id))
                at_copy.append(number)
                if tensor.kind in WEIGHT_KINDS:
                    dtypes.setdefault(number, {}).setdefault(tensor.dtype, []).append((rank, tensor.id))
            ids = np.array([part.tensor.id for part in parts], np.int64)
            self._to_logical[rank] = table_of(ids, at_logical)
            self._to_copy[rank] = table_of(ids, at_copy)
        self.num_copies = len(copies)
        self.shards = [shard for _, shard in copies]
        """[num_copies] the coordinates that tell each shard."""
        self.tensors = [
            placing.logical(part, at, tuple(held))
            for at, ((placing, part), held) in enumerate(zip(first, ranks, strict=True))
        ]
        self.is_left_out = np.array([one.is_partial for one in self.tensors], np.bool_)
        """[num_tensors] whether it has no statistics of its own."""
        # Bit patterns of two types never compare.
        self.replicas = [
            Replicas(at, shard, tuple(holders), number)
            for (at, shard), (_, number) in copies.items()
            for _, holders in sorted(dtypes.get(number, {}).items())
            if len(holders) > 1 and not is_empty(shard)
        ]
        self.is_replicated = np.zeros(self.num_copies + 1, np.bool_)
        """[num_copies + 1] whether there are several of it."""
        self.is_replicated[[one.number for one in self.replicas]] = True
        self._pieces: dict[tuple[int, str], dict[Shard, list[Holder]]] = {}
        for (at, shard), (_, number) in copies.items():
            for dtype, holders in dtypes.get(number, {}).items():
                self._pieces.setdefault((at, dtype), {})[shard] = holders

    @cached_property
    def added_copies(self) -> list[CopySet]:
        """Copies that only compare as sums of their pieces."""
        found = [
            added_copies(at, self.tensors[at].num_elements, pieces)
            for (at, _), pieces in self._pieces.items()
            if len(pieces) > 1
        ]
        return [one for one in found if one is not None]

    @cached_property
    def kinds(self) -> npt.NDArray[np.str_]:
        """[num_tensors] label of the kind of each logical tensor."""
        return np.array([one.kind for one in self.tensors], np.str_)

    @cached_property
    def num_weights_compared(self) -> tuple[int, int]:
        """(weights of which several copies are held and compared, all weights)."""
        weights = {tensor.index for tensor in self.tensors if tensor.kind == "param"}
        compared = {one.index for one in self.replicas} | {one.index for one in self.added_copies}
        return len(weights & compared), len(weights)

    @cached_property
    def formed(self) -> WholeTensorValues:
        """The values that are formed last, of sums over all shards."""
        return WholeTensorValues(self)

    @cached_property
    def digest_rows(self) -> DigestRows | None:
        """What merges the rows of a step in C; None without the library."""
        return native.prepare_digest and native.prepare_digest(self.is_left_out, self.is_replicated)

    @cached_property
    def _replicas_by_number(self) -> dict[int, list[Replicas]]:
        found: dict[int, list[Replicas]] = {}
        for one in self.replicas:
            found.setdefault(one.number, []).append(one)
        return found

    def replicas_of(self, number: int) -> list[Replicas]:
        """Return the copies of the shard of this number; of each type of numbers its own."""
        return self._replicas_by_number.get(number, [])

    def held_by(self, ranks: Set[int]) -> npt.NDArray[np.bool_]:
        """Return which logical tensors have all shards on these ranks: [num_tensors]."""
        found = np.ones(len(self.tensors), np.bool_)
        silent = [rank for rank in self._to_copy if rank not in ranks]
        if silent:
            held = np.zeros(self.num_copies + 1, np.bool_)
            for rank in self._to_copy.keys() & ranks:
                held[self._to_copy[rank]] = True
            held[-1] = True
            for rank in silent:
                found[self._to_logical[rank][~held[self._to_copy[rank]]]] = False
        return found

    def held_share(self, ranks: frozenset[int]) -> npt.NDArray[np.float64]:
        """Return the share of each logical tensor's distinct shards that one of these ranks holds: [num_tensors]."""
        known = self._shares.get(ranks)
        if known is None:
            tensor_of, held = np.full(self.num_copies + 1, -1, np.int32), np.zeros(self.num_copies + 1, np.bool_)
            for rank, copies in self._to_copy.items():
                tensor_of[copies] = self._to_logical[rank]
                if rank in ranks:
                    held[copies] = True
            tensor_of, held = tensor_of[:-1], held[:-1]
            num_shards = np.bincount(tensor_of[tensor_of >= 0], minlength=len(self.tensors))
            num_held = np.bincount(tensor_of[(tensor_of >= 0) & held], minlength=len(self.tensors))
            known = num_held / np.maximum(num_shards, 1)
            if len(self._shares) >= MAX_SHARES:
                self._shares.clear()
            self._shares[ranks] = known
        return known

    def own_rows(self, watched: npt.NDArray[np.bool_], is_in_all: npt.NDArray[np.bool_]) -> OwnRowIndex:
        """Return what finds the ranks' own rows of some tensors: [tensors] which, and which of them are taken as one."""
        return OwnRowIndex(self, watched, is_in_all)

    def table_of(self, rank: int) -> npt.NDArray[np.int32]:
        """Return a rank's table of logical tensors: [local ids] index, -1 for ids that stand for nothing."""
        return self._to_logical[rank]

    def copy_table_of(self, rank: int) -> npt.NDArray[np.int32]:
        """Return a rank's table of shards: [local ids] the number of the shard, -1 for ids that stand for nothing."""
        return self._to_copy[rank]

    def share_of(self, ranks: tuple[int, ...]) -> NodeShare:
        """Return what some ranks hold. ranks: rising."""
        found = self._node_shares.get(ranks)
        if found is None:
            if len(self._node_shares) >= MAX_NODE_SHARES:
                self._node_shares.clear()
            found = self._node_shares[ranks] = NodeShare(self, ranks)
        return found

    @cached_property
    def node_merges(self) -> NodeMerges:
        """How the sums of machines become those of the tensors."""
        return NodeMerges(len(self.tensors), self.num_copies)

    def tables_of(self, rank: int) -> tuple[int, int, int]:
        """Return where a rank's tables of logical tensors and of copies lie in memory, and how long they are."""
        found = self._tables.get(rank)
        if found is None:
            logical = self._to_logical.get(rank)
            found = (0, 0, 0) if logical is None else (logical.ctypes.data, self._to_copy[rank].ctypes.data, len(logical))
            self._tables[rank] = found
        return found

    def logical_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the logical index of each local id; -1 for ids that the descriptor does not know."""
        return look_up(self._to_logical.get(rank), tensor_ids)

    def copies_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the number of the shard that each local id is a copy of; -1 for ids that the descriptor does not know."""
        return look_up(self._to_copy.get(rank), tensor_ids)


class LayoutCache:
    """The layouts that were needed last: a model whose tensors take turns goes back and forth between a few."""

    def __init__(self) -> None:
        self._known: dict[Hashable, ModelLayout] = {}

    def of(self, key: Hashable, make: Callable[[], Mapping[int, Descriptor]]) -> ModelLayout:
        """Return the layout of a key, built of the descriptors that `make` returns where it is not known."""
        layout = self._known.pop(key, None)
        if layout is None:
            layout = ModelLayout(make(), next(reversed(self._known.values()), None))
            most = MAX_LAYOUTS if len(layout.tensors) <= MANY_TENSORS else 2
            while len(self._known) >= most:
                del self._known[next(iter(self._known))]
        self._known[key] = layout
        return layout
