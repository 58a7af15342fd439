"""What travels between nodes and the join: chunks of spools over the stream, beats and answers beside it.

A message is the crc32 of its body, 4 bytes, little-endian, and the body in msgpack. Fields are only ever added, last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from sentinel.errors import MALFORMED, WireError
from sentinel.ingest.step_parts import AwayFrame
from sentinel.native import crc32
from sentinel.wire.frame import HEADER_BYTES

VERSION = 3
"""The newest that is understood here: several in one message. Chunks without rows, digests and rows bear `THIN_VERSION`."""
THIN_VERSION = 2
MAX_MESSAGE_BYTES = 512 * 2**10
"""Most bytes of one message: half of what a server takes by default, for clients do not count headers."""
ROOM_BYTES = 4 * 2**10
"""What of a message is not the bytes of a spool, at most."""
TOGETHER_BYTES = 64 * 2**10
"""Most bytes of a message that has several in it: what is longer goes by itself."""
ROOM_EACH_BYTES = 1024
"""The same of each of several, about: names and places."""
MAX_CHUNK_BYTES = 16 * 2**20
"""Most bytes of a file that one chunk stands for, the rows that are not in it among them."""
PLAIN_VERSION = 1
"""Of messages that have nothing newer in them."""
MAX_COMMANDS = 512
"""Newest commands that a beat names."""
MAX_EPOCH = 2**31 - 1
"""Highest epoch that a worker speaks under: numbers of digests are made of it."""
_CRC_BYTES = 4
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
SpoolName: TypeAlias = Annotated[str, Meta(max_length=64)]
"""Of a spool's folder, or of a file in it."""


class FilePlace(msgspec.Struct, frozen=True, array_like=True):
    """Behind so many bytes of a file of a spool."""

    file: SpoolName = ""
    """Its name; empty: before the first file."""
    offset: Count = 0


class SpoolChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Bytes of one file of a spool."""

    version: int
    node: str
    run: str
    folder: SpoolName
    file: SpoolName
    offset: Count
    """Where in the file the bytes lie."""
    after: FilePlace
    """The place behind which this file begins, or goes on: what comes before it must be there first."""
    size: Count
    """Of a thinned file, which is whole or not there, all its bytes; 0: the file is a whole one, and may grow."""
    data: bytes
    away: tuple[tuple[int, int], ...] = ()
    """(offset in the chunk, bytes) of payloads of rows that are not in `data`, rising: digests stand for them."""
    turn: Count = 0
    """Times that the node went back to what the join holds of this spool: within one, chunks were sent in their order."""
    epoch: Epoch = 0
    """Of the lease of the worker that passes it on; 0: the node itself says it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that it stands for."""
        return len(self.data) + (sum(size for _, size in self.away) if self.away else 0)

    def pieces(self) -> list[tuple[int, bytes]]:
        """Return (offset in the file, bytes) of all that is in it, rising: between them rows are away."""
        if not self.away:
            return [(self.offset, self.data)]
        found, at, begin = [], 0, 0
        for offset, size in self.away:
            found.append((self.offset + at, self.data[begin : begin + offset - at]))
            begin, at = begin + offset - at, offset + size
        found.append((self.offset + at, self.data[begin:]))
        return [one for one in found if one[1]]

    def __post_init__(self) -> None:
        if not self.away:
            return
        at = 0
        for offset, size in self.away:
            if offset < at + HEADER_BYTES or size <= 0 or self.size:
                raise ValueError(f"expected rows behind their headers, got {size} bytes at {offset}")
            at = offset + size
        if not at <= self.num_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"expected at most {MAX_CHUNK_BYTES} bytes, rows within them, got {self.num_bytes}")


class DigestPiece(msgspec.Struct, frozen=True, array_like=True, tag="digest"):
    """A part of what a machine came to in a step (`fleet.packed_digest`): of several the whole is put together."""

    version: int
    node: str
    run: str
    number: Count
    """Of the digest, by the process that made it: no two of one process have the same."""
    part: Count
    num_parts: Count
    data: bytes
    epoch: Epoch = 0
    """Of the lease of the worker that passes it on; 0: the node itself says it."""


class RowsPiece(msgspec.Struct, frozen=True, array_like=True, tag="rows"):
    """A part of a frame of rows that the join asked for, or that it is to have before the node ends."""

    version: int
    node: str
    run: str
    folder: SpoolName
    file_index: Count
    offset: Count
    """Of the frame in its file."""
    num_bytes: Count
    """Of the whole frame, or of HEADER_BYTES and the rows that are wanted of it; 0: it is there no more."""
    at: Count
    """Of the data in the frame, or in those rows."""
    data: bytes
    epoch: Epoch = 0
    """Of the lease of the worker that passes it on; 0: the node itself says it."""
    tensors: bytes = b""
    """`AwayFrame.tensors`: of which alone rows are wanted; empty: it is the whole frame."""


class SpoolHead(msgspec.Struct, frozen=True, array_like=True):
    """What a node says of one spool."""

    first: Count
    """Lowest index of which anything is there."""
    head: FilePlace
    """Behind all that its process has written, but for heartbeats at its end that are not published yet."""
    sent: FilePlace
    """Behind all that was published."""
    waiting_bytes: Count = 0
    """Bytes behind what the join says it holds."""
    waiting_s: float = 0.0
    """Seconds for which some have waited."""
    acked: tuple[Count, Count] = (0, 0)
    """(file index, offset) of the spool's `ack`."""
    pulse_ns: Count = 0
    """As `read_pulse`."""
    witness: bytes = b""
    """The witness file, while the join has another; empty: there is none, or the join has it."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """What a node says of one run, several times a second."""

    version: int
    node: str
    run: str
    echo: tuple[str, Count]
    """(join, stamp) of the newest answer that the node had before it looked at its spools; ("", 0): none yet."""
    spools: dict[SpoolName, SpoolHead]
    commands: list[str]
    """Names of the newest commands in the node's control folder."""
    blocked: str = ""
    """Why nothing is published just now, in words; empty: it is."""
    is_leaving: bool = False
    """The node ends, and speaks no more."""
    number: tuple[str, Count] = ("", 0)
    """(drawn by the shipper when it began, beats that it has sent): an answer names the beat that it answers."""
    refused: list[str] = []
    """What of the join was not believed lately, in words."""
    is_ending: bool = False
    """The node ends as soon as the join has everything."""
    epoch: Epoch = 0
    """Of the lease of the worker that passes it on; 0: the node itself says it."""
    worker: str = ""
    """Which worker passes it on; empty: the node itself says it."""
    num_quiet: Count = 0
    """Spools that it leaves out, for of these nothing but heartbeats came: what was said of them before is true enough."""
    found_alone: list[str] = []
    """What the node found by itself since no join answers, in words."""


class SpoolHeld(msgspec.Struct, frozen=True, array_like=True):
    """What the join says of one spool."""

    held: FilePlace
    """Behind all that it holds: the node goes on there."""
    acked: tuple[int, int] = (0, 0)
    """(file index, offset) behind what the daemon there has committed."""
    witness_bytes: int = 0
    refused: str = ""
    """Why nothing of this spool is taken from this node; empty: it is."""
    num_away: int = 0
    """Frames behind `acked` whose rows are not here."""
    gap: int = -1
    """`turn` of the newest chunk that is here while bytes before it are not: these were lost. -1: there is none."""
    is_waiting: bool = False
    """Whether chunks of it wait for nodes that are behind, and so are not in `held`."""
    is_passed_on: bool = True
    """Whether the join has all that whoever answers holds, where the node ends: it may not be so where a worker answers."""


class AbsentNodes(msgspec.Struct, frozen=True, array_like=True):
    """The nodes of a run of which the join hears nothing, and those for which it waits: for people. A few by name."""

    silent: tuple[tuple[str, float], ...] = ()
    """(node that did not end in order, seconds for which it has said nothing), who fell silent last first."""
    num_silent: int = 0
    """All of these, those without a name here among them."""
    waited_for: tuple[str, ...] = ()
    """Nodes that have not said what they hold since others sent what waits."""
    num_waited_for: int = 0
    """As `num_silent`."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What the join says to a node of one run."""

    version: int
    join: str
    """Name of the join's process: another one has another."""
    stamp: int
    """When it was sent, by the join's monotonic clock, ns."""
    node: str
    run: str
    spools: dict[str, SpoolHeld]
    commands: dict[str, bytes] = {}
    """Name -> bytes of commands that the node does not have."""
    is_drained: bool = False
    """Nothing waits in the stream: what was published and is not held is lost."""
    wanted: tuple[AwayFrame, ...] = ()
    """Frames of rows that are waited for."""
    num_steps: tuple[int, int] = (0, 0)
    """Steps that were judged of digests, and steps whose rows were asked for, since the join began."""
    to: tuple[str, int] = ("", 0)
    """`number` of the beat that is answered."""
    epoch: Epoch = 0
    """The highest under which a worker spoke of this node lately."""
    pace_s: float = 0.0
    """Seconds for which whoever has nothing but heartbeats waits before they go, and before it speaks again."""
    absent: AbsentNodes = AbsentNodes()
    """Of this run."""


class WorkerReport(msgspec.Struct, frozen=True, array_like=True, tag="worker"):
    """What a worker says of itself, for people."""

    worker: str
    partitions: dict[int, int]
    """Those that it has -> their epochs."""
    num_nodes: dict[int, int]
    """Partition -> nodes of it that have spoken; none where it is missing."""
    waiting_bytes: dict[int, int]
    """Partition -> bytes of their spools that the join has not got, as they said last."""
    num_workers: int = 0
    """Workers among which it shares the partitions, itself included."""
    num_refused: int = 0
    """Messages of nodes that it did not take, since it began."""
    blocked: str = ""
    """Why nothing goes on to the join just now, in words; empty: it does."""
    version: int = PLAIN_VERSION


Published: TypeAlias = SpoolChunk | DigestPiece | RowsPiece
"""What a node publishes on the stream."""


class Several(msgspec.Struct, frozen=True, array_like=True, tag="several"):
    """What a node publishes of one run at once: its ranks write a little each, at the same time."""

    version: int
    node: str
    run: str
    parts: tuple[Published, ...]

    def __post_init__(self) -> None:
        if any((one.node, one.run) != (self.node, self.run) for one in self.parts):
            raise ValueError("expected what one node has of one run")


Sealed = TypeVar("Sealed", SpoolChunk, Beat, Answer, WorkerReport)

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (SpoolChunk, Beat, Answer, WorkerReport, Published | Several)
}


def in_messages(published: Iterable[Published]) -> Iterator[tuple[Published, ...]]:
    """Yield what follows each other of one node and run, what is small of it together, for one message each."""
    together: list[Published] = []
    num_bytes = 0
    for one in published:
        size = len(one.data) + ROOM_EACH_BYTES + (16 * len(one.away) if isinstance(one, SpoolChunk) else 0)
        if together and ((one.node, one.run) != (together[0].node, together[0].run) or num_bytes + size > TOGETHER_BYTES):
            yield tuple(together)
            together, num_bytes = [], 0
        together.append(one)
        num_bytes += size
    if together:
        yield tuple(together)


def seal_published(parts: Sequence[Published]) -> bytes:
    """Return the bytes of a message that publishes these, all of one node and run."""
    first = parts[0]
    return seal(first) if len(parts) == 1 else _sealed(Several(VERSION, first.node, first.run, tuple(parts)))


def seal(message: Published | Beat | Answer | WorkerReport) -> bytes:
    """Return the bytes of a message."""
    return _sealed(message)


def _sealed(message: msgspec.Struct) -> bytes:
    body = _ENCODER.encode(message)
    return crc32(body).to_bytes(_CRC_BYTES, "little") + body


def unseal(data: bytes, kind: type[Sealed]) -> Sealed:
    """Return the message of a kind that these bytes are. WireError: they are none, or were changed on their way."""
    found: Sealed = _unsealed(data, kind, kind.__name__.lower())
    return found


def unseal_published(data: bytes) -> tuple[Published, ...]:
    """Return what a node published, all of one run; at least one. WireError as of `unseal`."""
    found: Published | Several = _unsealed(data, Published | Several, "chunk, digest or rows")
    if not isinstance(found, Several):
        return (found,)
    if not found.parts:
        raise WireError(f"message of {len(data)} bytes: expected a chunk, digest or rows in it, got none")
    return found.parts


def _unsealed(data: bytes, kind: Any, expected: str) -> Any:
    body = memoryview(data)[_CRC_BYTES:]
    if len(data) <= _CRC_BYTES or crc32(body) != int.from_bytes(data[:_CRC_BYTES], "little"):
        raise WireError(f"message of {len(data)} bytes: expected the crc32 of what follows in front, got another")
    try:
        found = _DECODERS[kind].decode(body)
    except MALFORMED as error:
        raise WireError(f"message of {len(data)} bytes: expected a {expected}, got {error}") from error
    if found.version > VERSION:
        raise WireError(
            f"message of version {found.version}: expected {VERSION} at most; install the same sentinel on nodes and join"
        )
    return found
