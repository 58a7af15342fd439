"""LayoutShards: the distinct shards of a layout, numbered in the order in which ranks first name them, and who holds which.

A large run has millions: of what no data-parallel ranks hold copies each rank has shards of its own. So they are numbers in
arrays, and holders are looked up when somebody asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sentinel.ingest.copies import added_copies, is_cut_once, is_empty
from sentinel.ingest.placing import PlacedTable, PlacedWeights
from sentinel.ingest.row_tables import table_of
from sentinel.step_view import CopySet, Holder, LogicalTensor, Replicas, Shard

_SHIFT, _LOW = np.int64(32), np.int64(2**32 - 1)


class LayoutShards:
    """What `ShardNumbering` found; does not change."""

    def __init__(
        self,
        tables: dict[int, npt.NDArray[np.int32]],
        tensor_of: npt.NDArray[np.int32],
        shards: Sequence[Shard],
        shard_of: npt.NDArray[np.int32],
        weights: Mapping[int, _Weights],
        num_dtypes: int,
    ) -> None:
        """shards: all there are, whatever they are of; shard_of: [num_copies] the place of each in them. weights: by rank.

        num_dtypes: different ones of weights.
        """
        self.tables = tables
        """Rank -> [local ids] the number of the shard, -1 for ids that stand for nothing."""
        self.num_copies = len(tensor_of)
        """Distinct shards, copies taken as one."""
        self.tensor_of = tensor_of
        """[num_copies] the index of the logical tensor that each is of."""
        self._shards, self._shard_of = shards, shard_of
        self._weights, self._num_dtypes = weights, max(num_dtypes, 1)
        self._replicas_of: dict[int, list[Replicas]] = {}
        pairs = [self._pairs(rank) for rank in weights]
        self._pieces, num_holders = np.unique(np.concatenate([np.empty(0, np.int64), *pairs]), return_counts=True)
        """[pieces] of weights: number of the shard, times the number of data types, and that of its own; rising."""
        number = self._pieces // self._num_dtypes
        is_held = np.array([not is_empty(one) for one in shards], np.bool_)
        self._several = self._pieces[(num_holders > 1) & is_held[shard_of[number]]]
        """The pieces of which there are several, which must be bit-identical."""
        self.is_replicated = np.zeros(self.num_copies + 1, np.bool_)
        """[num_copies + 1] whether there are several of it."""
        self.is_replicated[self._several // self._num_dtypes] = True

    def shard(self, number: int) -> Shard:
        """Return the coordinates that tell a shard."""
        return self._shards[int(self._shard_of[number])]

    def salts(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return a number for the coordinates of each of some shards: the same in every layout."""
        return self._salts[self._shard_of[numbers]]

    @cached_property
    def _salts(self) -> npt.NDArray[np.uint64]:
        return np.array([_salt(repr(one)) for one in self._shards], np.uint64)

    @cached_property
    def replicated(self) -> frozenset[int]:
        """Indices of the logical tensors that have several copies of a shard, which must be bit-identical."""
        return frozenset(self.tensor_of[self._several // self._num_dtypes].tolist())

    def replicas_of(self, numbers: Iterable[int]) -> dict[int, list[Replicas]]:
        """Return number -> the copies of that shard; of each data type its own, for bit patterns of two never compare."""
        wanted = set(numbers)
        unknown = wanted - self._replicas_of.keys()
        if unknown:
            pieces = self._several[np.isin(self._several // self._num_dtypes, np.fromiter(unknown, np.int64))]
            self._replicas_of.update((number, []) for number in unknown)
            for piece, holders in self._holders(pieces).items():
                number = piece // self._num_dtypes
                found = Replicas(int(self.tensor_of[number]), self.shard(number), tuple(holders), number)
                self._replicas_of[number].append(found)
        return {number: self._replicas_of[number] for number in wanted}

    @cached_property
    def replicas(self) -> list[Replicas]:
        """Copies that must be bit-identical, where there are several: of all shards."""
        numbers = np.flatnonzero(self.is_replicated).tolist()
        found = self.replicas_of(numbers)
        return [one for number in numbers for one in found[number]]

    def added_copies(self, tensors: Sequence[LogicalTensor]) -> list[CopySet]:
        """Return the copies that only compare as sums of their pieces. tensors: the logical ones, by their index."""
        numbers, dtypes = np.divmod(self._pieces, self._num_dtypes)
        group, of_group, num_pieces = np.unique(
            self.tensor_of[numbers].astype(np.int64) * self._num_dtypes + dtypes, return_inverse=True, return_counts=True
        )
        pieces_of_groups, ends = self._pieces[np.argsort(of_group.reshape(-1), kind="stable")], np.cumsum(num_pieces)
        several, known = dict[int, npt.NDArray[np.int64]](), dict[tuple[tuple[int, ...], int], bool]()
        for at, end, num in zip(group.tolist(), ends.tolist(), num_pieces.tolist(), strict=True):
            own, num_elements = pieces_of_groups[end - num : end], tensors[at // self._num_dtypes].num_elements
            shards = tuple(self._shard_of[own // self._num_dtypes].tolist()) if num > 1 else ()
            if (shards, num_elements) not in known:
                known[shards, num_elements] = is_cut_once((self._shards[one] for one in shards), num_elements)
            if not known[shards, num_elements]:
                several[at] = own
        # All are looked for at once: there may be thousands of ranks.
        holders = self._holders(np.concatenate([np.empty(0, np.int64), *several.values()])) if several else {}
        found = []
        for at, own in sorted(several.items(), key=lambda one: int(one[1][0])):
            index = at // self._num_dtypes
            pieces = {self.shard(piece // self._num_dtypes): holders[piece] for piece in own.tolist()}
            copies = added_copies(index, tensors[index].num_elements, pieces)
            if copies is not None:
                found.append(copies)
        return found

    def _pairs(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the pieces that a rank's weights are, in the order of its table."""
        weights = self._weights[rank]
        return self.tables[rank][weights.ids].astype(np.int64) * self._num_dtypes + weights.dtypes

    def _holders(self, pieces: npt.NDArray[np.int64]) -> dict[int, list[Holder]]:
        """Return who holds each of some pieces."""
        found: dict[int, list[Holder]] = {piece: [] for piece in pieces.tolist()}
        for rank, weights in self._weights.items():
            pairs = self._pairs(rank)
            for at in np.flatnonzero(np.isin(pairs, pieces)).tolist():
                found[int(pairs[at])].append((rank, int(weights.ids[at])))
        return found


class ShardNumbering:
    """Takes rank by rank, rising."""

    def __init__(self, num_tensors: int) -> None:
        """num_tensors: of all ranks together."""
        self._named = np.empty(num_tensors, np.int64)
        """Logical tensor and shard of each rank's tensors, one rank after the other."""
        self._end = 0
        self._numbers: dict[Shard, int] = {}
        self._ids: dict[int, npt.NDArray[np.int64]] = {}
        self._weights: dict[int, PlacedWeights] = {}

    def take(self, rank: int, table: PlacedTable, at: npt.NDArray[np.int32], shards: Sequence[Shard]) -> None:
        """Take in a rank. at: [tensors] the logical tensor of each; shards: as of `PlacedTable.coordinates`."""
        numbers = np.array([self._numbers.setdefault(one, len(self._numbers)) for one in shards], np.int64)
        begin, self._end = self._end, self._end + len(at)
        self._named[begin : self._end] = (at.astype(np.int64) << _SHIFT) | numbers[table.cut_of]
        self._ids[rank] = table.ids
        self._weights[rank] = table.weights

    def numbered(self) -> LayoutShards:
        """Return all of them, numbered."""
        named, first, inverse = np.unique(self._named, return_index=True, return_inverse=True)
        order = np.argsort(first)
        numbers = np.empty(len(named), np.int32)
        numbers[order] = np.arange(len(named), dtype=np.int32)
        of_all = numbers[inverse.reshape(-1)]
        named, tables, at = named[order], dict[int, npt.NDArray[np.int32]](), 0
        for rank, ids in self._ids.items():
            tables[rank] = table_of(ids, of_all[at : at + len(ids)])
            at += len(ids)
        # Of ranks that are alike they are one.
        distinct = {id(one): one for one in self._weights.values()}
        dtypes = sorted({name for one in distinct.values() for name in one.dtypes})
        of_name = {name: number for number, name in enumerate(dtypes)}
        weights = {
            which: _Weights(one.ids, np.array([of_name[name] for name in one.dtypes], np.int64))
            for which, one in distinct.items()
        }
        return LayoutShards(
            tables, (named >> _SHIFT).astype(np.int32), list(self._numbers), (named & _LOW).astype(np.int32),
            {rank: weights[id(one)] for rank, one in self._weights.items()}, len(dtypes),
        )  # fmt: skip


class _Weights(NamedTuple):
    """What of a rank's tensors data-parallel ranks hold copies of."""

    ids: npt.NDArray[np.int64]
    dtypes: npt.NDArray[np.int64]
    """The number of each one's data type."""


def _salt(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
