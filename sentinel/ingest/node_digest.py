"""NodeDigest: what the ranks of one machine come to in a step, made there and used here in place of their rows.

It stands for the rows of a step in which they are not looked at one by one: where a value is not finite, or copies on the
machine differ, there is none, and where a judge looks at single rows of a kind that is not carried, it asks for all of them.
Whoever uses it comes to the same bits as whoever has the rows.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.errors import MALFORMED, WireError
from sentinel.ingest.digest import digest
from sentinel.ingest.node_share import NodeShare, NodeSums
from sentinel.messages import Descriptor
from sentinel.moments import LONE_SHARE, tails
from sentinel.record import ROW_DTYPE, STATS_DTYPE, Kind
from sentinel.step_view import RankStep

VERSION = 3
MAX_JUDGED = 4096
"""Digests of so many steps before the one that was asked for last are kept: a restart of training goes back to a checkpoint,
and its steps come while those of the former attempt are judged."""
MAX_JUDGED_BYTES, LEAST_JUDGED = 64 * 2**20, 2
"""Most bytes of the digests of these, but for so many steps: a step is judged again behind a snapshot, if at all."""
MAX_BYTES = 256 * 2**20
"""Most bytes of digests of one run that are kept; of what is dropped the rows are asked for."""
LEAST_STEPS = 8
"""Digests of so many steps are kept, whatever they take: of 2,000 nodes those of one step come to 200 MB."""
MOST_OF_NODE = 64
"""Most digests of one step that one node has: of so many machines may it have ranks."""
OVERHEAD_BYTES, OVERHEAD_BYTES_RANK = 1024, 256
"""Bytes that a digest takes beside its values, and each rank in it: measured, of the objects of Python."""
MAX_DIGEST_BYTES = 64 * 2**20
"""Most bytes of one digest, a bound on memory: some 500,000 tensors."""
MAX_DESCRIPTORS = 1024
"""Descriptors of which it is remembered what is carried; a bound on memory."""


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


class NodeDigest(msgspec.Struct, frozen=True, array_like=True):
    """One machine's ranks in one step."""

    version: int
    step: int
    is_native: bool
    """Merged by the C library: numpy comes to other bits."""
    share: bytes
    """`NodeShare.key`: what was taken for what."""
    ranks: tuple[DigestedRank, ...]
    """Ranks rising."""
    stats: bytes
    """[num_tensors] STATS_DTYPE, without what has no row."""
    present: bytes
    """[num_tensors] bits: whether there is a row that counts."""
    has_rows: bytes
    """[num_copies] bits."""
    marks: bytes
    """`NodeShare.marks` of the tensors whose copies are compared."""
    has_lone_weight: bool
    """Of some weight one element is nearly all."""
    kinds: tuple[str, ...] = ()
    """Kinds of which all rows are carried."""

    @property
    def of(self) -> tuple[tuple[bytes, int, int], ...]:
        """Which frames it is made of: (process, number of the last frame, number of rows) of each rank."""
        return tuple((one.incarnation, one.last_seq, one.num_rows) for one in self.ranks)

    def sums(self, share: NodeShare) -> tuple[NodeSums, npt.NDArray[np.uint64]] | None:
        """Return the sums and the marks; None: they were made otherwise than here, and say nothing."""
        num_tensors, num_copies = len(share.tensor_of), share.num_copies
        if self.share != share.key or self.is_native != (native.prepare_digest is not None):
            return None
        present, has_rows = _bits(self.present, num_tensors), _bits(self.has_rows, num_copies)
        marked = _marked(share)
        num_held = 0 if present is None else int(np.count_nonzero(present))
        if (
            present is None
            or has_rows is None
            or len(self.stats) != num_held * STATS_DTYPE.itemsize
            or len(self.marks) != 8 * len(marked)
        ):
            return None
        stats = np.zeros(num_tensors, STATS_DTYPE)
        stats["min"], stats["max"] = np.inf, -np.inf
        stats[present] = np.frombuffer(self.stats, STATS_DTYPE)
        marks = np.zeros(num_tensors, np.uint64)
        marks[marked] = np.frombuffer(self.marks, np.uint64)
        return NodeSums(stats, present, has_rows), marks


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
        """Return the digest of a machine's ranks; None: only the rows tell. parts: of the share's ranks, rising.

        ranks: which frames those are.
        """
        found = digest(parts, share)
        if len(found.bad_rows) or len(found.odd_copies):
            return None
        sums = share.sums(parts, found)
        carried = [part.rows[self._carries(part)].tobytes() for part in parts]
        weights = (part.rows[part.rows["kind"] == Kind.PARAM] for part in parts)
        return NodeDigest(
            version=VERSION, step=step, is_native=native.prepare_digest is not None, share=share.key,
            ranks=tuple(msgspec.structs.replace(one, carried=rows) for one, rows in zip(ranks, carried, strict=True)),
            stats=sums.stats[sums.present].tobytes(), present=np.packbits(sums.present).tobytes(),
            has_rows=np.packbits(sums.has_rows).tobytes(), marks=share.marks(parts)[_marked(share)].tobytes(),
            has_lone_weight=any(bool((tails(rows) >= LONE_SHARE).any()) for rows in weights),
            kinds=tuple(sorted(self.kinds)),
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


class PackedDigest(msgspec.Struct, frozen=True, array_like=True):
    """A digest as it travels, and as it is kept until its step is judged: what it is of, and the rest packed."""

    version: int
    step: int
    of: tuple[tuple[bytes, int, int], ...]
    """`NodeDigest.of`."""
    body: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes, about."""
        return len(self.body) + OVERHEAD_BYTES + OVERHEAD_BYTES_RANK * len(self.of)

    def unpack(self) -> NodeDigest:
        """Return the digest. WireError: there is none in it, or another."""
        unpacked = zlib.decompressobj()
        try:
            body = unpacked.decompress(self.body, MAX_DIGEST_BYTES)
            if not unpacked.eof or unpacked.unused_data:
                raise ValueError(f"expected its end within {MAX_DIGEST_BYTES} bytes, got none or more behind it")
            found = _DECODER.decode(body)
        except _MALFORMED as error:
            raise WireError(f"digest of step {self.step}: expected what ranks of a machine come to, got {error}") from error
        ranks = [one.rank for one in found.ranks]
        if ranks != sorted(set(ranks)) or not ranks or ranks[0] < 0:
            raise WireError(f"digest of step {self.step}: expected ranks in rising order, got {ranks[:8]}")
        if (found.version, found.step, found.of) != (self.version, self.step, self.of):
            raise WireError(
                f"digest of step {self.step}: expected what its head says, got step {found.step} of other frames"
            )
        try:
            found = _in_planes(found, is_reading=True)
        except ValueError as error:
            raise WireError(f"digest of step {self.step}: expected whole rows and statistics, got {error}") from error
        return _against_each_other(found, is_reading=True)


_MALFORMED: tuple[type[Exception], ...] = (*MALFORMED, ValueError, zlib.error)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(NodeDigest)
_PACKED_DECODER = msgspec.msgpack.Decoder(PackedDigest)


def encode_digest(found: NodeDigest) -> bytes:
    """Return the bytes of a digest: small numbers and alike ones, of which zlib at its quickest makes a half to a tenth.

    Rows that are carried stand as their difference from those of the rank before, of which they are copies as a rule: a
    rank's rows are longer than what zlib remembers. The bytes of each place in a row follow each other: signs and exponents
    are alike, digits are not.
    """
    packed = _in_planes(_against_each_other(found, is_reading=False), is_reading=False)
    body = zlib.compress(_ENCODER.encode(packed), 1)
    return _ENCODER.encode(PackedDigest(found.version, found.step, found.of, body))


def decode_digest(data: bytes) -> PackedDigest:
    """Return the digest that these bytes are, not looked into yet. WireError: they are none, or of a newer version."""
    try:
        found = _PACKED_DECODER.decode(data)
    except _MALFORMED as error:
        raise WireError(f"digest of {len(data)} bytes: expected a step of a machine, got {error}") from error
    if found.version != VERSION:
        raise WireError(
            f"digest of version {found.version}: expected {VERSION}; install the same sentinel on nodes and join"
        )
    return found


def _against_each_other(found: NodeDigest, *, is_reading: bool) -> NodeDigest:
    """Return a digest whose carried rows are, bit by bit, exclusive or with those of the rank before, if these are as many;
    or are so no more."""
    ranks, before = [], b""
    for one in found.ranks:
        data = one.carried
        if data and len(data) == len(before):
            data = (np.frombuffer(data, np.uint8) ^ np.frombuffer(before, np.uint8)).tobytes()
        before = data if is_reading else one.carried
        ranks.append(msgspec.structs.replace(one, carried=data))
    return msgspec.structs.replace(found, ranks=tuple(ranks))


def _in_planes(found: NodeDigest, *, is_reading: bool) -> NodeDigest:
    """Return a digest in whose rows and statistics the first bytes of all come first, then the second; or are so no more.
    ValueError: not all of them are whole.
    """

    def turned(data: bytes, size: int) -> bytes:
        return np.frombuffer(data, np.uint8).reshape((size, -1) if is_reading else (-1, size)).T.tobytes()

    ranks = [msgspec.structs.replace(one, carried=turned(one.carried, ROW_DTYPE.itemsize)) for one in found.ranks]
    return msgspec.structs.replace(found, ranks=tuple(ranks), stats=turned(found.stats, STATS_DTYPE.itemsize))


class DigestBook:
    """The digests of a run, by node and by the frames that they are made of. For any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """max_bytes: most that are kept. Where there are more the steps before the one that was asked for last go first, for
        they are judged; then the newest, which are judged last."""
        self._of_step: dict[int, dict[str, dict[tuple[tuple[bytes, int, int], ...], PackedDigest]]] = {}
        self._bytes_of_step: dict[int, int] = {}
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._asked_step = -1
        self._lock = threading.Lock()

    def add(self, node: str, found: PackedDigest) -> None:
        """Take in a digest that a node made."""
        with self._lock:
            of_node = self._of_step.setdefault(found.step, {}).setdefault(node, {})
            former = of_node.pop(found.of, None)
            if former is None and len(of_node) >= MOST_OF_NODE:
                former = of_node.pop(next(iter(of_node)))
            more = found.num_bytes - (0 if former is None else former.num_bytes)
            self._num_bytes += more
            self._bytes_of_step[found.step] = self._bytes_of_step.get(found.step, 0) + more
            of_node[found.of] = found
            oldest = min(self._of_step)
            while oldest < self._asked_step - MAX_JUDGED or (
                self._num_bytes > self._max_bytes and len(self._of_step) > LEAST_STEPS
            ):
                self._drop(oldest if oldest < self._asked_step else max(self._of_step))
                oldest = min(self._of_step, default=self._asked_step)

    def find(self, node: str, step: int, of: tuple[tuple[bytes, int, int], ...]) -> NodeDigest | None:
        """Return a node's digest of a step that is made of these frames; None: there is none. WireError: it is none."""
        with self._lock:
            if step != self._asked_step:
                self._asked_step = step
                self._drop_judged()
            found = self._of_step.get(step, {}).get(node, {}).get(of)
        return None if found is None else found.unpack()

    def _drop_judged(self) -> None:
        num_bytes = sum(size for step, size in self._bytes_of_step.items() if step < self._asked_step)
        if num_bytes <= MAX_JUDGED_BYTES:
            return
        for step in sorted(one for one in self._of_step if one < self._asked_step)[:-LEAST_JUDGED]:
            num_bytes -= self._bytes_of_step[step]
            self._drop(step)
            if num_bytes <= MAX_JUDGED_BYTES:
                return

    def _drop(self, step: int) -> None:
        del self._of_step[step]
        self._num_bytes -= self._bytes_of_step.pop(step)


def _marked(share: NodeShare) -> npt.NDArray[np.int64]:
    """Return the tensors whose copies are compared, by their numbers in the share."""
    return np.unique(share.tensor_of_copy[share.is_replicated[:-1]]).astype(np.int64)


def _bits(data: bytes, num: int) -> npt.NDArray[np.bool_] | None:
    """Return so many bits; None: there are not as many."""
    if len(data) != (num + 7) // 8:
        return None
    return np.unpackbits(np.frombuffer(data, np.uint8), count=num).astype(np.bool_)
