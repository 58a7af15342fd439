"""Which logical tensor each rank's tensor is, for one set of descriptors: built once, used for every step they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Set
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.logical_numbering import LogicalNumbering
from sentinel.ingest.naming import CanonicalNames, make_names
from sentinel.ingest.node_merge import NodeMerges
from sentinel.ingest.node_share import NodeShare
from sentinel.ingest.own_rows import OwnRowIndex
from sentinel.ingest.placing import PlacedTable, alike, is_named_alike
from sentinel.ingest.row_tables import look_up
from sentinel.ingest.shards import LayoutShards, ShardNumbering
from sentinel.ingest.whole_tensor_values import WholeTensorValues
from sentinel.messages import Descriptor
from sentinel.native.library import DigestRows
from sentinel.place import Place
from sentinel.step_view import CopySet, LogicalTensor

MAX_LAYOUTS, MANY_TENSORS = 8, 100_000
"""Layouts that are remembered, and tensors from which on only two layouts are; a bound on memory."""
MAX_SHARES = 4
"""Sets of ranks of which a layout remembers what they hold."""
MAX_NODE_SHARES = 4096
"""Machines whose part of a layout it remembers; a bound on memory. One that is asked for again is made again."""
MAX_REMEMBERED = 200_000
"""Tensors of all different tables up to which a layout remembers where each belongs, for the layout after it."""


class ModelLayout:
    """Which logical tensor each rank's tensor is, for one set of descriptors; built once, used every step."""

    def __init__(self, descriptors: Mapping[int, Descriptor], like: ModelLayout | None = None) -> None:
        """like: an earlier one; what did not change since is taken from it. The layout is the same with and without."""
        self.descriptors = dict(sorted(descriptors.items()))
        self.places: dict[int, Place] = {rank: d.place for rank, d in self.descriptors.items()}
        if like is not None and not is_named_alike(like.descriptors, self.descriptors):
            like = None
        self.names: CanonicalNames = make_names(self.descriptors) if like is None else like.names
        self._placed: dict[int, PlacedTable] = {}
        """By rank; empty where they are too many to be remembered."""
        self._to_logical: dict[int, npt.NDArray[np.int32]] = {}
        self._tables: dict[int, tuple[int, int, int]] = {}
        self._shares: dict[frozenset[int], npt.NDArray[np.float64]] = {}
        self._node_shares: dict[tuple[int, ...], NodeShare] = {}
        self.tensors, self.shards = self._built({} if like is None else like._placed)
        self.num_copies, self.is_replicated = self.shards.num_copies, self.shards.is_replicated
        self.is_left_out = np.array([one.is_partial for one in self.tensors], np.bool_)
        """[num_tensors] whether it has no statistics of its own."""

    def __getstate__(self) -> dict[str, object]:
        # Addresses, and what holds them, mean nothing in another process.
        kept = {name: value for name, value in self.__dict__.items() if name != "digest_rows"}
        return {**kept, "_placed": {}, "_tables": {}, "_node_shares": {}}

    def _built(self, remembered: Mapping[int, PlacedTable]) -> tuple[list[LogicalTensor], LayoutShards]:
        alikes = {rank: alike(descriptor) for rank, descriptor in self.descriptors.items()}
        num_left = Counter(alikes.values())
        num_placed = {alikes[rank]: len(descriptor.tensors) for rank, descriptor in self.descriptors.items()}
        is_remembering = sum(num_placed.values()) <= MAX_REMEMBERED
        placed: dict[Hashable, PlacedTable] = {}
        names: dict[object, dict[tuple[str, str], str]] = {}
        logical = LogicalNumbering()
        shards = ShardNumbering(sum(len(one.tensors) for one in self.descriptors.values()))
        for rank, descriptor in self.descriptors.items():
            which = alikes[rank]
            if which not in placed:
                placed[which] = PlacedTable(self.names, descriptor, names, remembered.get(rank))
            table = placed[which]
            if is_remembering:
                self._placed[rank] = table
            apart, sharded = table.coordinates(descriptor.place)
            at, self._to_logical[rank] = logical.take(rank, which, table, apart)
            shards.take(rank, table, at, sharded)
            num_left[which] -= 1
            if not num_left[which]:
                # Where each rank has a table of its own they are not to be there at the same time.
                del placed[which]
        return logical.tensors(), shards.numbered()

    @cached_property
    def replicated(self) -> frozenset[int]:
        """Indices of the logical tensors of which several ranks hold copies that must be bit-identical."""
        return self.shards.replicated

    @cached_property
    def added_copies(self) -> list[CopySet]:
        """Copies that only compare as sums of their pieces."""
        return self.shards.added_copies(self.tensors)

    @cached_property
    def kinds(self) -> npt.NDArray[np.str_]:
        """[num_tensors] label of the kind of each logical tensor."""
        return np.array([one.kind for one in self.tensors], np.str_)

    @cached_property
    def num_weights_compared(self) -> tuple[int, int]:
        """(weights of which several copies are held and compared, all weights)."""
        weights = {tensor.index for tensor in self.tensors if tensor.kind == "param"}
        compared = self.replicated | {one.index for one in self.added_copies}
        return len(weights & compared), len(weights)

    @cached_property
    def formed(self) -> WholeTensorValues:
        """The values that are formed last, of sums over all shards."""
        return WholeTensorValues(self)

    @cached_property
    def digest_rows(self) -> DigestRows | None:
        """What merges the rows of a step in C; None without the library."""
        return native.prepare_digest and native.prepare_digest(self.is_left_out, self.is_replicated)

    def held_by(self, ranks: Set[int]) -> npt.NDArray[np.bool_]:
        """Return which logical tensors have all shards on these ranks: [num_tensors]."""
        found = np.ones(len(self.tensors), np.bool_)
        copies = self.shards.tables
        silent = [rank for rank in copies if rank not in ranks]
        if silent:
            held = np.zeros(self.num_copies + 1, np.bool_)
            for rank in copies.keys() & ranks:
                held[copies[rank]] = True
            held[-1] = True
            for rank in silent:
                found[self._to_logical[rank][~held[copies[rank]]]] = False
        return found

    def held_share(self, ranks: frozenset[int]) -> npt.NDArray[np.float64]:
        """Return the share of each logical tensor's distinct shards that one of these ranks holds: [num_tensors]."""
        known = self._shares.get(ranks)
        if known is None:
            held = np.zeros(self.num_copies + 1, np.bool_)
            for rank in self.shards.tables.keys() & ranks:
                held[self.shards.tables[rank]] = True
            tensor_of = self.shards.tensor_of
            num_shards = np.bincount(tensor_of, minlength=len(self.tensors))
            num_held = np.bincount(tensor_of[held[:-1]], minlength=len(self.tensors))
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
        return self.shards.tables[rank]

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
            found = (
                (0, 0, 0) if logical is None else (logical.ctypes.data, self.shards.tables[rank].ctypes.data, len(logical))
            )
            self._tables[rank] = found
        return found

    def logical_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the logical index of each local id; -1 for ids that the descriptor does not know."""
        return look_up(self._to_logical.get(rank), tensor_ids)

    def copies_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the number of the shard that each local id is a copy of; -1 for ids that the descriptor does not know."""
        return look_up(self.shards.tables.get(rank), tensor_ids)


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
