"""NodeShare: what the ranks of one machine hold of a layout, numbered by themselves: there and here alike.

A machine that knows its own ranks alone numbers their tensors and shards as one that knows the whole model does, where both
take the same ones for parts of one: `key` says whether they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.digest import Digest, digest
from sentinel.ingest.placing import WEIGHT_KINDS
from sentinel.ingest.row_tables import look_up
from sentinel.messages import Descriptor
from sentinel.native.library import DigestRows
from sentinel.record import STATS_DTYPE
from sentinel.step_view import NAN_CHECKSUM, RankStep

if TYPE_CHECKING:
    from sentinel.ingest.model_layout import ModelLayout

_MIX = np.uint64(0x9E3779B97F4A7C15)


class NodeSums(NamedTuple):
    """What the rows of one machine's ranks come to in a step, before they are merged with those of others."""

    stats: npt.NDArray[np.void]
    """[num_tensors of the share] STATS_DTYPE: of copies, the rows of the machine's lowest rank that is there."""
    present: npt.NDArray[np.bool_]
    """[num_tensors of the share] whether there is a row that counts."""
    has_rows: npt.NDArray[np.bool_]
    """[num_copies of the share] whether there is any row of the shard: of what the sums are made."""
    is_bad: npt.NDArray[np.bool_]
    """[num_tensors of the share] whether any row holds a non-finite value."""


class NodeShare:
    """The tensors and shards that some ranks of a layout hold; made once, used every step."""

    def __init__(self, layout: ModelLayout, ranks: Iterable[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        logical = [layout.table_of(rank) for rank in self.ranks]
        copies = [layout.copy_table_of(rank) for rank in self.ranks]
        self.tensor_of, to_tensor = _numbered(logical)
        """[num_tensors] the index of each in the layout."""
        self.copy_of, to_copy = _numbered(copies)
        """[num_copies] the number of each shard in the layout."""
        self.num_copies = len(self.copy_of)
        self.is_left_out = layout.is_left_out[self.tensor_of]
        self.tensor_of_copy = np.zeros(self.num_copies, np.int32)
        """[num_copies] the tensor, by its number here, that each shard is of."""
        for tensors, numbers in zip(to_tensor, to_copy, strict=True):
            held = numbers >= 0
            self.tensor_of_copy[numbers[held]] = tensors[held]
        is_weight = np.array([layout.tensors[at].kind in WEIGHT_KINDS for at in self.tensor_of.tolist()], np.bool_)
        self.is_replicated = np.append(is_weight[self.tensor_of_copy], False)
        """[num_copies + 1] whether its copies, here or elsewhere, must be bit-identical."""
        self._salts = layout.shards.salts(self.copy_of)
        self._tables = dict(zip(self.ranks, zip(to_tensor, to_copy, strict=True), strict=True))
        self._addresses = {
            rank: (tensors.ctypes.data, numbers.ctypes.data, len(tensors))
            for rank, (tensors, numbers) in self._tables.items()
        }
        hashed = hashlib.blake2b(digest_size=16)
        for rank, tables in self._tables.items():
            hashed.update(rank.to_bytes(4, "little"))
            for table in tables:
                hashed.update(len(table).to_bytes(4, "little") + table.tobytes())
        hashed.update(self.is_left_out.tobytes() + self.is_replicated.tobytes() + self._salts.tobytes())
        self.key = hashed.digest()
        """Says what was taken for what: two shares of one key have the same numbers."""

    @cached_property
    def digest_rows(self) -> DigestRows | None:
        """What merges the rows of a step in C; None without the library."""
        return native.prepare_digest and native.prepare_digest(self.is_left_out, self.is_replicated)

    @cached_property
    def compared(self) -> npt.NDArray[np.int64]:
        """The tensors whose copies must be bit-identical, by their numbers here, rising."""
        return np.unique(self.tensor_of_copy[self.is_replicated[:-1]]).astype(np.int64)

    def tables_of(self, rank: int) -> tuple[int, int, int]:
        """Return where a rank's tables of tensors and of copies lie in memory, and how long they are."""
        return self._addresses[rank]

    def logical_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the number here of the tensor of each local id; -1 for ids that the descriptor does not know."""
        return look_up(self._tables[rank][0], tensor_ids)

    def copies_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the number here of the shard of each local id; -1 for ids that the descriptor does not know."""
        return look_up(self._tables[rank][1], tensor_ids)

    def sums(self, parts: Sequence[RankStep], found: Digest | None = None) -> NodeSums:
        """Return what the rows of its ranks come to. parts: of these ranks, rising. found: their digest, if it is known."""
        found = found or digest(parts, self)
        return NodeSums(found.stats, found.present, found.has_rows, found.is_bad)

    def marks(self, parts: Sequence[RankStep]) -> npt.NDArray[np.uint64]:
        """Return a number for the checksums of each tensor's copied shards, [num_tensors]: machines that hold the same bits
        of the same shards have the same, and those that hold a NaN of one; 0 of what is not compared.
        """
        checksums = np.zeros(self.num_copies + 1, np.uint64)
        for part in reversed(parts):
            known = np.where(part.rows["num_nan"] > 0, np.uint64(NAN_CHECKSUM), part.rows["checksum"])
            checksums[self.copies_of(part.rank, part.rows["tensor"])] = known
        words = (checksums[:-1] + self._salts) * _MIX
        words = (words ^ (words >> np.uint64(29))) * _MIX
        words[~self.is_replicated[:-1]] = 0
        found = np.zeros(len(self.tensor_of), np.uint64)
        np.add.at(found, self.tensor_of_copy, words ^ (words >> np.uint64(32)))
        return found

    def odd_tensors(self, parts: Sequence[RankStep], found: Digest) -> npt.NDArray[np.bool_]:
        """Return whether copies that these ranks hold of a tensor are not the same, [num_tensors]; those that all hold a NaN
        are. found: the digest of the parts.
        """
        is_odd = np.zeros(self.num_copies + 1, np.bool_)
        is_odd[found.odd_copies] = True
        has_other = np.zeros(self.num_copies + 1, np.bool_)
        for part in parts if len(found.odd_copies) else ():
            copies = self.copies_of(part.rank, part.rows["tensor"])
            has_other[copies[is_odd[copies] & (part.rows["num_nan"] == 0)]] = True
        tensors = np.zeros(len(self.tensor_of), np.bool_)
        tensors[self.tensor_of_copy[np.flatnonzero((is_odd & has_other)[:-1])]] = True
        return tensors


def machine_of(descriptor: Descriptor) -> str:
    """Return the machine that a rank runs on, as it says itself; empty: it does not."""
    said = descriptor.environment
    return said.get("node") or said.get("host", "")


def by_machine(parts: Iterable[RankStep]) -> list[list[RankStep]]:
    """Return the parts of each machine's ranks, in the order of their lowest ranks. parts: ranks rising."""
    found: dict[str, list[RankStep]] = {}
    for part in parts:
        found.setdefault(machine_of(part.descriptor), []).append(part)
    return list(found.values())


def no_sums(num_tensors: int) -> npt.NDArray[np.void]:
    """Return the statistics of nothing: [num_tensors] STATS_DTYPE."""
    found = np.zeros(num_tensors, STATS_DTYPE)
    found["min"], found["max"] = np.inf, -np.inf
    return found


def _numbered(tables: Sequence[npt.NDArray[np.int32]]) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int32]]]:
    """Return the distinct values of tables in order of first appearance, and the tables with their places; -1 stays."""
    every = np.concatenate([np.empty(0, np.int32), *tables])
    known = every >= 0
    values, first, inverse = np.unique(every[known], return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(values), np.int32)
    place[order] = np.arange(len(values), dtype=np.int32)
    numbered = np.full(len(every), -1, np.int32)
    numbered[known] = place[inverse.reshape(-1)]
    ends = np.cumsum([len(table) for table in tables])
    return values[order].astype(np.int64), [np.ascontiguousarray(one) for one in np.split(numbered, ends[:-1])]
