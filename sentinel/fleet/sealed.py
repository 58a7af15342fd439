"""What travels between nodes and the join: chunks of spools over the stream, beats and answers beside it.

A message is the crc32 of its body, 4 bytes, little-endian, and the body in msgpack. Fields are only ever added, last.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from sentinel.errors import MALFORMED, WireError
from sentinel.native import crc32

VERSION = 1
MAX_MESSAGE_BYTES = 512 * 2**10
"""Most bytes of one message: half of what a server takes by default, for clients do not count headers."""
ROOM_BYTES = 4 * 2**10
"""What of a message is not the bytes of a spool, at most."""
MAX_COMMANDS = 512
"""Newest commands that a beat names."""
_CRC_BYTES = 4


class FilePlace(msgspec.Struct, frozen=True, array_like=True):
    """Behind so many bytes of a file of a spool."""

    file: str = ""
    """Its name; empty: before the first file."""
    offset: int = 0


class SpoolChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Bytes of one file of a spool."""

    version: int
    node: str
    run: str
    folder: str
    file: str
    offset: int
    """Where in the file the bytes lie."""
    after: FilePlace
    """The place behind which this file begins, or goes on: what comes before it must be there first."""
    size: int
    """Of a thinned file, which is whole or not there, all its bytes; 0: the file is a whole one, and may grow."""
    data: bytes


class SpoolHead(msgspec.Struct, frozen=True, array_like=True):
    """What a node says of one spool."""

    first: int
    """Lowest index of which anything is there."""
    head: FilePlace
    """Behind all that its process has written."""
    sent: FilePlace
    """Behind all that was published."""
    waiting_bytes: int = 0
    """Bytes behind what the join says it holds."""
    waiting_s: float = 0.0
    """Seconds for which some have waited."""
    acked: tuple[int, int] = (0, 0)
    """(file index, offset) of the spool's `ack`."""
    pulse_ns: int = 0
    """As `read_pulse`."""
    witness: bytes = b""
    """The witness file, while the join has another; empty: there is none, or the join has it."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """What a node says of one run, several times a second."""

    version: int
    node: str
    run: str
    echo: tuple[str, int]
    """(join, stamp) of the newest answer that the node had before it looked at its spools; ("", 0): none yet."""
    spools: dict[str, SpoolHead]
    commands: list[str]
    """Names of the newest commands in the node's control folder."""
    blocked: str = ""
    """Why nothing is published just now, in words; empty: it is."""
    is_leaving: bool = False
    """The node ends, and speaks no more."""
    number: tuple[str, int] = ("", 0)
    """(drawn by the shipper when it began, beats that it has sent): an answer names the beat that it answers."""
    refused: list[str] = []
    """What of the join was not believed lately, in words."""


class SpoolHeld(msgspec.Struct, frozen=True, array_like=True):
    """What the join says of one spool."""

    held: FilePlace
    """Behind all that it holds: the node goes on there."""
    acked: tuple[int, int] = (0, 0)
    """(file index, offset) behind what the daemon there has committed."""
    witness_bytes: int = 0
    refused: str = ""
    """Why nothing of this spool is taken from this node; empty: it is."""


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
    to: tuple[str, int] = ("", 0)
    """`number` of the beat that is answered."""


Sealed = TypeVar("Sealed", SpoolChunk, Beat, Answer)

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type[SpoolChunk | Beat | Answer], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (SpoolChunk, Beat, Answer)
}


def seal(message: SpoolChunk | Beat | Answer) -> bytes:
    """Return the bytes of a message."""
    body = _ENCODER.encode(message)
    return crc32(body).to_bytes(_CRC_BYTES, "little") + body


def unseal(data: bytes, kind: type[Sealed]) -> Sealed:
    """Return the message of a kind that these bytes are. WireError: they are none, or were changed on their way."""
    body = memoryview(data)[_CRC_BYTES:]
    if len(data) <= _CRC_BYTES or crc32(body) != int.from_bytes(data[:_CRC_BYTES], "little"):
        raise WireError(f"message of {len(data)} bytes: expected the crc32 of what follows in front, got another")
    try:
        found: Sealed = _DECODERS[kind].decode(body)
    except MALFORMED as error:
        raise WireError(f"message of {len(data)} bytes: expected a {kind.__name__.lower()}, got {error}") from error
    if found.version > VERSION:
        raise WireError(
            f"message of version {found.version}: expected {VERSION} at most; install the same sentinel on nodes and join"
        )
    return found
