"""NodeDigest: what the ranks of one machine come to in a step, made there and used here in place of their rows.

It stands for the rows of a step in which they are not looked at one by one. What is looked at of rows that hold a non-finite
value is in it: in that very step nobody may wait for those of all machines. It names the tensors whose copies on the machine
differ: of these, as of others of a kind that is not carried, a judge who looks at single rows asks for the rows. Who uses it
comes to the same bits as who has the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from sentinel import native
from sentinel.errors import WireError
from sentinel.ingest.digest import Digest, digest
from sentinel.ingest.node_share import NodeShare, NodeSums, no_sums
from sentinel.messages import Descriptor
from sentinel.moments import lone_rows
from sentinel.record import BAD_ROW_DTYPE, ROW_DTYPE, STATS_DTYPE
from sentinel.step_view import RankStep

VERSION = 6
MAX_DESCRIPTORS = 1024
"""Descriptors of which it is remembered what is carried; a bound on memory."""
MAX_CARRIED_BYTES = 40 * 2**20
"""Most bytes of the rows that a digest carries; of a step with more all rows are asked for. Of 8 ranks 93,000 rows each, all
of them not finite."""
MAX_RANKS, MAX_KINDS = 4096, 256
"""Most ranks of a machine, and kinds, in a digest: bounds on memory for whoever reads one."""
MAX_ROW_ID = 2**24
"""Ids of tensors beyond it are no rank's: those that a descriptor may have are fewer."""


class DigestedRank(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a digest: which of its frames are in it, and the rows that are carried as they are."""

    rank: int
    incarnation: bytes
    layout_id: int
    last_seq: int
    """Number of the last frame in it."""
    num_rows: int
    carried: bytes = b""
    """Rows of ROW_DTYPE, in their order."""
    row_ids: bytes = b""
    """[ids] bits: of which tensors there is a row."""
    num_bad: Annotated[int, Meta(ge=0)] = 0
    """Rows that hold a non-finite value."""


class DigestedSums(NamedTuple):
    """What a digest says of the tensors of a machine's share."""

    sums: NodeSums
    marks: npt.NDArray[np.uint64]
    """[num_tensors] as `NodeShare.marks`."""
    is_odd: npt.NDArray[np.bool_]
    """[num_tensors] whether copies on the machine are not the same."""
    is_lone: npt.NDArray[np.bool_]
    """[num_tensors] whether it is a weight of which some row has one element that is nearly all."""


class NodeDigest(msgspec.Struct, frozen=True, array_like=True):
    """One machine's ranks in one step."""

    version: int
    step: int
    is_native: bool
    """Merged by the C library: numpy comes to other bits."""
    share: bytes
    """`NodeShare.key`: what was taken for what."""
    ranks: Annotated[tuple[DigestedRank, ...], Meta(max_length=MAX_RANKS)]
    """Ranks rising."""
    stats: bytes
    """[num_tensors] STATS_DTYPE, without what has no row."""
    present: bytes
    """[num_tensors] bits: whether there is a row that counts."""
    has_rows: bytes
    """[num_copies] bits."""
    marks: bytes
    """`NodeShare.marks` of the tensors whose copies are compared."""
    is_odd: bytes
    """[num_tensors] bits: as `DigestedSums.is_odd`."""
    is_lone: bytes
    """[num_tensors] bits: as `DigestedSums.is_lone`."""
    kinds: Annotated[tuple[str, ...], Meta(max_length=MAX_KINDS)] = ()
    """Kinds of which all rows are carried."""
    is_bad: bytes = b""
    """[num_tensors] bits: whether any row holds a non-finite value."""
    bad: bytes = b""
    """Of the rows that hold a non-finite value, of whatever tensor, BAD_ROW_DTYPE: rank by rank, in their order."""
    first_ranks: bytes = b""
    """[num_tensors] <i4: the lowest rank that has a row; -1: none."""
    site_pos: bytes = b""
    """[num_tensors] <u4: `ROW_DTYPE.site_pos` of that rank's first row; 0: there is none."""

    @property
    def of(self) -> tuple[tuple[bytes, int, int], ...]:
        """Which frames it is made of: (process, number of the last frame, number of rows) of each rank."""
        return tuple((one.incarnation, one.last_seq, one.num_rows) for one in self.ranks)

    def sums(self, share: NodeShare) -> DigestedSums | None:
        """Return what the rows come to; None: that was made otherwise than here, and says nothing."""
        num_tensors, num_copies = len(share.tensor_of), share.num_copies
        if self.share != share.key or self.is_native != (native.prepare_digest is not None):
            return None
        present, has_rows = _bits(self.present, num_tensors), _bits(self.has_rows, num_copies)
        is_bad, is_odd, is_lone = (_bits(one, num_tensors) for one in (self.is_bad, self.is_odd, self.is_lone))
        marked = share.compared
        num_held = 0 if present is None else int(np.count_nonzero(present))
        if (
            present is None
            or has_rows is None
            or is_bad is None
            or is_odd is None
            or is_lone is None
            or len(self.first_ranks) != 4 * num_tensors
            or len(self.site_pos) != 4 * num_tensors
            or len(self.stats) != num_held * STATS_DTYPE.itemsize
            or len(self.marks) != 8 * len(marked)
            or len(self.bad) != BAD_ROW_DTYPE.itemsize * sum(one.num_bad for one in self.ranks)
        ):
            return None
        stats = np.frombuffer(self.stats, STATS_DTYPE)
        if num_held < num_tensors:
            held, stats = stats, no_sums(num_tensors)
            stats[present] = held
        marks = np.zeros(num_tensors, np.uint64)
        marks[marked] = np.frombuffer(self.marks, np.uint64)
        return DigestedSums(NodeSums(stats, present, has_rows, is_bad), marks, is_odd, is_lone)

    @property
    def sites(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
        """The lowest rank that has a row, and where its site is: [num_tensors of the share] each, once `sums` were made."""
        return np.frombuffer(self.first_ranks, "<i4"), np.frombuffer(self.site_pos, "<u4")


class DigestMaker:
    """Makes the digests of a machine, all with the same kinds."""

    def __init__(self, kinds: Collection[str]) -> None:
        """kinds: of which all rows are carried, beside the sums that other values are formed of."""
        self.kinds = frozenset(kinds)
        self._wanted: dict[int, tuple[Descriptor, npt.NDArray[np.bool_]]] = {}
        """By identity of the descriptor, which is kept for as long: [ids] which of a rank's tensors are carried."""

    def make(
        self, step: int, share: NodeShare, parts: Sequence[RankStep], ranks: Sequence[DigestedRank]
    ) -> NodeDigest | None:
        """Return the digest of a machine's ranks; None: it would be too large. parts: of the share's ranks, rising.

        ranks: which frames those are.
        """
        found = digest(parts, share)
        sums = share.sums(parts, found)
        ends = np.cumsum([len(part.rows) for part in parts])
        bad = [rows - begin for rows, begin in zip(np.split(found.bad_rows, _cuts(found, ends)), [0, *ends], strict=False)]
        is_carried = [self._carries(part) for part in parts]
        num_bytes = sum(map(np.count_nonzero, is_carried)) * ROW_DTYPE.itemsize
        if num_bytes + len(found.bad_rows) * BAD_ROW_DTYPE.itemsize > MAX_CARRIED_BYTES:
            return None
        carried = [part.rows[which].tobytes() for part, which in zip(parts, is_carried, strict=True)]
        first_ranks, site_pos = _sites(share, parts)
        is_odd = share.odd_tensors(parts, found)
        return NodeDigest(
            version=VERSION, step=step, is_native=native.prepare_digest is not None, share=share.key,
            ranks=tuple(
                msgspec.structs.replace(one, carried=rows, row_ids=_row_ids(part), num_bad=len(at))
                for one, rows, part, at in zip(ranks, carried, parts, bad, strict=True)
            ),
            stats=sums.stats[sums.present].tobytes(), present=np.packbits(sums.present).tobytes(),
            has_rows=np.packbits(sums.has_rows).tobytes(), marks=share.marks(parts)[share.compared].tobytes(),
            is_odd=np.packbits(is_odd).tobytes(), is_lone=np.packbits(_is_lone(share, parts)).tobytes(),
            kinds=tuple(sorted(self.kinds)), is_bad=np.packbits(found.is_bad).tobytes(),
            bad=b"".join([_of_bad(part.rows[at]) for part, at in zip(parts, bad, strict=True)]),
            first_ranks=first_ranks.tobytes(), site_pos=site_pos.tobytes(),
        )  # fmt: skip

    def _carries(self, part: RankStep) -> npt.NDArray[np.bool_]:
        """Return which rows of a rank are carried: [rows]."""
        descriptor = part.descriptor
        known = self._wanted.get(id(descriptor))
        if known is None:
            summands = {one for tensor in descriptor.tensors for one in tensor.parts}
            wanted = np.zeros(max((tensor.id for tensor in descriptor.tensors), default=-1) + 1, np.bool_)
            for tensor in descriptor.tensors:
                wanted[tensor.id] = tensor.kind in self.kinds or tensor.is_part or tensor.id in summands
            if len(self._wanted) >= MAX_DESCRIPTORS:
                self._wanted.clear()
            known = self._wanted[id(descriptor)] = (descriptor, wanted)
        ids, found = part.rows["tensor"], np.zeros(len(part.rows), np.bool_)
        is_known = ids < len(known[1])
        found[is_known] = known[1][ids[is_known]]
        return found


def carried_rows(one: DigestedRank) -> npt.NDArray[np.void]:
    """Return the rows that are carried as they are: [rows] ROW_DTYPE. WireError: they are none."""
    try:
        return np.frombuffer(one.carried, ROW_DTYPE)
    except ValueError as error:
        raise WireError(f"digest of rank {one.rank}: expected rows of {ROW_DTYPE.itemsize} bytes, got {error}") from error


def row_ids(one: DigestedRank, num_ids: int) -> npt.NDArray[np.uint32]:
    """Return the ids of the tensors of which a rank has a row, rising. num_ids: that there are."""
    bits = np.unpackbits(np.frombuffer(one.row_ids[: (num_ids + 7) // 8], np.uint8))[:num_ids]
    return np.flatnonzero(bits).astype(np.uint32)


def _of_bad(rows: npt.NDArray[np.void]) -> bytes:
    """Return what is looked at of rows that hold a non-finite value."""
    found = np.empty(len(rows), BAD_ROW_DTYPE)
    for name in BAD_ROW_DTYPE.names or ():
        found[name] = rows[name]
    return found.tobytes()


def _row_ids(part: RankStep) -> bytes:
    """Return `DigestedRank.row_ids` of a rank's rows."""
    ids = part.rows["tensor"]
    known = ids[ids < MAX_ROW_ID]
    has_row = np.zeros(int(known.max()) + 1 if len(known) else 0, np.bool_)
    has_row[known] = True
    return np.packbits(has_row).tobytes()


def _is_lone(share: NodeShare, parts: Sequence[RankStep]) -> npt.NDArray[np.bool_]:
    """Return of each tensor of a share whether it is a weight of which some row has one element that is nearly all."""
    found = np.zeros(len(share.tensor_of), np.bool_)
    for part in parts:
        logical = share.logical_of(part.rank, part.rows["tensor"][lone_rows(part.rows)])
        found[logical[logical >= 0]] = True
    return found


def _sites(share: NodeShare, parts: Sequence[RankStep]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    """Return of each tensor of a share the lowest rank that has a row, -1: none, and the place of that row's site."""
    first_ranks, site_pos = np.full(len(share.tensor_of), -1, "<i4"), np.zeros(len(share.tensor_of), "<u4")
    for part in reversed(parts):
        logical = share.logical_of(part.rank, part.rows["tensor"])
        known = logical >= 0
        # Written backwards: the first row of the lowest rank is the last to be written.
        logical = logical[known][::-1]
        first_ranks[logical], site_pos[logical] = part.rank, part.rows["site_pos"][known][::-1]
    return first_ranks, site_pos


def _cuts(found: Digest, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where the bad rows of one rank end. ends: [ranks] where its rows do."""
    return np.searchsorted(found.bad_rows, ends[:-1])


def _bits(data: bytes, num: int) -> npt.NDArray[np.bool_] | None:
    """Return so many bits; None: there are not as many."""
    if len(data) != (num + 7) // 8:
        return None
    if not data.strip(b"\0"):
        return _none(num)
    return np.unpackbits(np.frombuffer(data, np.uint8), count=num).view(np.bool_)


@functools.lru_cache(maxsize=64)
def _none(num: int) -> npt.NDArray[np.bool_]:
    """Return that none of so many is, read only."""
    found = np.zeros(num, np.bool_)
    found.flags.writeable = False
    return found
