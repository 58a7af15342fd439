"""PackedDigest: a digest of a machine as it travels, in a twentieth of the bytes of the rows that it stands for.

Most of a digest are the digits of floating-point numbers, which nothing makes shorter; what repeats is left out before zstd
sees it. Rows that a rank carries are copies of those of the rank before as a rule, and what they measured of a tensor that
one rank has is what the machine came to. The bytes of each place in a row follow each other: signs and exponents are alike,
digits are not.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from msgspec import Meta

from sentinel.errors import MALFORMED, WireError
from sentinel.ingest.node_digest import MAX_RANKS, VERSION, DigestedRank, NodeDigest
from sentinel.record import BAD_ROW_DTYPE, ROW_DTYPE, STATS_DTYPE, STATS_OFFSET

MAX_DIGEST_BYTES = 64 * 2**20
"""Most bytes of one digest, a bound on memory: some 500,000 tensors."""
OVERHEAD_BYTES, OVERHEAD_BYTES_RANK = 1024, 256
"""Bytes that a digest takes beside its values, and each rank in it: measured, of the objects of Python."""
LEVEL = 3
"""Of zstd. Too low: signs and exponents take more; too high: nodes work longer, and nothing gets shorter."""
_NO_TWIN = -1
_PLANES = {"stats": STATS_DTYPE.itemsize, "first_ranks": 4, "site_pos": 4, "bad": BAD_ROW_DTYPE.itemsize}
"""Field of a digest -> bytes of each entry."""


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

    @property
    def num_bytes_unpacked(self) -> int:
        """Bytes of memory that it takes unpacked, about; more than any may have where that is not known."""
        try:
            num_bytes = zstandard.frame_content_size(self.body)
        except zstandard.ZstdError:
            num_bytes = -1
        return (num_bytes if num_bytes >= 0 else MAX_DIGEST_BYTES) + OVERHEAD_BYTES + OVERHEAD_BYTES_RANK * len(self.of)

    def unpack(self) -> NodeDigest:
        """Return the digest. WireError: there is none in it, or another."""
        try:
            num_bytes = zstandard.frame_content_size(self.body)
            if not 0 <= num_bytes <= MAX_DIGEST_BYTES:
                raise ValueError(f"expected a length of at most {MAX_DIGEST_BYTES} bytes, got {num_bytes}")
            body = zstandard.ZstdDecompressor().decompress(self.body, allow_extra_data=False)
            found = _BODY_DECODER.decode(body).whole()
        except _MALFORMED as error:
            raise WireError(f"digest of step {self.step}: expected what ranks of a machine come to, got {error}") from error
        ranks = [one.rank for one in found.ranks]
        if ranks != sorted(set(ranks)) or not ranks or ranks[0] < 0:
            raise WireError(f"digest of step {self.step}: expected ranks in rising order, got {ranks[:8]}")
        if (found.version, found.step, found.of) != (self.version, self.step, self.of):
            raise WireError(
                f"digest of step {self.step}: expected what its head says, got step {found.step} of other frames"
            )
        return found


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """A digest without what of it repeats."""

    digest: NodeDigest
    """Without the rows that ranks carry, and with its statistics, places and bad rows in planes."""
    twins: bytes
    """[rows of the first rank that carries any] <i4: which of the statistics a row has as they are; below 0: none."""
    rows: Annotated[tuple[bytes | None, ...], Meta(max_length=MAX_RANKS)]
    """Of each rank, in planes: the rows that it carries; bit by bit, exclusive or with those of the rank before where these
    are as many, and with the twins of the first. None: they are those of the rank before."""

    @classmethod
    def of(cls, found: NodeDigest) -> _Body:
        """Return what a digest comes to."""
        twins, rows, before = np.empty(0, "<i4"), list[bytes | None](), b""
        for one in found.ranks:
            if one.carried == before:
                rows.append(None)
                continue
            carried = _against(_as_rows(one.carried), before)
            if all(earlier is None for earlier in rows):
                twins = _twins(one.carried, found.stats)
                carried = _without_twins(carried, twins, found.stats)
            rows.append(_in_planes(carried))
            before = one.carried
        bare = [msgspec.structs.replace(one, carried=b"") for one in found.ranks]
        planes = {name: _in_planes(_as_table(getattr(found, name), size)) for name, size in _PLANES.items()}
        return cls(msgspec.structs.replace(found, ranks=tuple(bare), **planes), twins.tobytes(), tuple(rows))

    def whole(self) -> NodeDigest:
        """Return the digest. ValueError: its parts do not belong together."""
        if len(self.rows) != len(self.digest.ranks):
            raise ValueError(f"expected rows of {len(self.digest.ranks)} ranks, got {len(self.rows)}")
        whole = {name: _of_planes(getattr(self.digest, name), size).tobytes() for name, size in _PLANES.items()}
        stats = whole["stats"]
        ranks, before, has_begun = list[DigestedRank](), b"", False
        for one, planes in zip(self.digest.ranks, self.rows, strict=True):
            if planes is not None:
                rows = _of_planes(planes, ROW_DTYPE.itemsize)
                if not has_begun:
                    rows, has_begun = _without_twins(rows, np.frombuffer(self.twins, "<i4"), stats), True
                before = _against(rows, before).tobytes()
            ranks.append(msgspec.structs.replace(one, carried=before))
        return msgspec.structs.replace(self.digest, ranks=tuple(ranks), **whole)


_MALFORMED: tuple[type[Exception], ...] = (*MALFORMED, ValueError, zstandard.ZstdError)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PackedDigest)
_BODY_DECODER = msgspec.msgpack.Decoder(_Body)


def encode_digest(found: NodeDigest) -> bytes:
    """Return the bytes of a digest."""
    body = zstandard.ZstdCompressor(level=LEVEL).compress(_ENCODER.encode(_Body.of(found)))
    return _ENCODER.encode(PackedDigest(found.version, found.step, found.of, body))


def decode_digest(data: bytes) -> PackedDigest:
    """Return the digest that these bytes are, not looked into yet. WireError: they are none, or of a newer version."""
    try:
        found = _DECODER.decode(data)
    except _MALFORMED as error:
        raise WireError(f"digest of {len(data)} bytes: expected a step of a machine, got {error}") from error
    if found.version != VERSION:
        raise WireError(
            f"digest of version {found.version}: expected {VERSION}; install the same sentinel on nodes and join"
        )
    return found


def _as_table(data: bytes, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(-1, size)


def _as_rows(data: bytes) -> npt.NDArray[np.uint8]:
    return _as_table(data, ROW_DTYPE.itemsize)


def _in_planes(rows: npt.NDArray[np.uint8]) -> bytes:
    """Return first the first bytes of all rows, then the second."""
    return rows.T.tobytes()


def _of_planes(data: bytes, size: int) -> npt.NDArray[np.uint8]:
    """Return the rows of planes, each of so many bytes, not in the order of memory. ValueError: they are not whole."""
    return np.frombuffer(data, np.uint8).reshape(size, -1).T


def _against(rows: npt.NDArray[np.uint8], before: bytes) -> npt.NDArray[np.uint8]:
    """Return what rows come to with as many of the rank before; those of another number stay as they are."""
    return rows ^ _as_rows(before) if before and rows.size == len(before) else rows


def _twins(carried: bytes, stats: bytes) -> npt.NDArray[np.int32]:
    """Return which of the statistics each row has, as they are; `_NO_TWIN`: none."""
    size, every = STATS_DTYPE.itemsize, ROW_DTYPE.itemsize
    number_of = {stats[at : at + size]: number for number, at in enumerate(range(0, len(stats), size))}
    measured = (carried[at + STATS_OFFSET : at + every] for at in range(0, len(carried), every))
    return np.array([number_of.get(one, _NO_TWIN) for one in measured], "<i4")


def _without_twins(rows: npt.NDArray[np.uint8], twins: npt.NDArray[np.int32], stats: bytes) -> npt.NDArray[np.uint8]:
    """Return what rows come to with their twins, there and back. ValueError: there are no such."""
    if len(twins) != len(rows) or (twins >= len(stats) // STATS_DTYPE.itemsize).any():
        raise ValueError(f"expected the statistics of {len(rows)} rows among {len(stats)} bytes, got others")
    found, has_twin = rows.copy(), twins >= 0
    found[has_twin, STATS_OFFSET:] ^= _as_table(stats, STATS_DTYPE.itemsize)[twins[has_twin]]
    return found
