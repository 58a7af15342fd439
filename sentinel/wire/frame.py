"""The frame: a fixed little-endian header, a payload, and the checks that tell a whole one from a torn or flipped one.

Layout, 96 bytes of header. The first 24 bytes (the prefix) never change between protocol versions, so that a reader can
skip, and name, a frame of a version it does not know.

    0  magic  b"SNTL"         24  life             16 bytes     64  seq              u64
    4  protocol       u16     40  run_id           u64          72  placement_epoch  u32
    6  type           u8      48  attempt          u32          76  layout_id        u32
    7  header words   u8      52  rank             u32          80  wall_ns          i64
    8  frame bytes    u32     56  step             i64          88  mono_ns          i64
    12 prefix check   u32     (crc32 of bytes 0..12: a flipped length is seen before anybody waits for that many bytes)
    16 crc32          u32     (of the whole frame with this field zero)
    20 row_count      u32
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
import zlib
from collections.abc import Mapping
from typing import TypeAlias

import msgspec
import numpy as np

from sentinel.errors import SentinelError, WireError
from sentinel.messages import Ack, Bye, Descriptor, EndStep, Health, Heartbeat, LayoutChange, Vectors
from sentinel.native import crc32
from sentinel.record import ROW_DTYPE
from sentinel.wire.shared_tables import decode_descriptor
from sentinel.wire.shown_names import shown

PROTOCOL = 2
"""The newest that is understood here. A frame bears the oldest version that has its type: 1, or 2 for a change of layout.
An older reader names such a change, skips it, and goes on with the tensors it knows; the next file describes all of them."""
OLDEST_PROTOCOL = 1
MAGIC = b"SNTL"
NO_ATTEMPT = 0xFFFFFFFF
"""The attempt of an incarnation that could not learn it; the daemon places it."""
NO_STEP = -1
MAX_FRAME_BYTES = 256 * 2**20
"""Most bytes of a frame; a bound on memory, 256 MiB: no writer makes a longer one, a larger length is a flipped bit."""

LARGE_BYTES = 4096
"""Bytes from which the library computes a payload's crc32. Too small: its call costs more than zlib's; too large: payloads
between are computed at zlib's slower rate."""

_PREFIX = struct.Struct("<4sHBBIIII")
_BODY = struct.Struct("<16sQIIqQIIqq")
_CHECKED = struct.Struct("<4sHBBI")
PREFIX_BYTES = _PREFIX.size
HEADER_BYTES = _PREFIX.size + _BODY.size
_CRC_OFFSET = 16
_BEGUN_CRC = zlib.crc32(b"\0\0\0\0", 0x2144DF1C)
"""crc32 of bytes 0..20 of any whole prefix, its crc32 field zero: bytes and the crc32 of them have one crc32, whatever they
are."""

Buffer: TypeAlias = bytes | bytearray | memoryview


class FrameType(enum.IntEnum):
    """What the payload is."""

    DESCRIPTOR = 1
    ROWS = 2
    END_STEP = 3
    HEALTH = 4
    ACK = 5
    HEARTBEAT = 6
    VECTOR = 7
    BYE = 8
    CHANGE = 9
    ROWS_AWAY = 10
    """Rows that a copy of a spool has not got: as long as those, and only the header is checked. See `without_rows`."""


DESCRIPTIONS = frozenset({int(FrameType.DESCRIPTOR), int(FrameType.CHANGE)})
"""Types of the frames that say what rows point into."""

Message: TypeAlias = Descriptor | LayoutChange | EndStep | Health | Ack | Heartbeat | Vectors | Bye

_MESSAGE_TYPES: dict[int, type[Message]] = {
    FrameType.DESCRIPTOR: Descriptor,
    FrameType.END_STEP: EndStep,
    FrameType.HEALTH: Health,
    FrameType.ACK: Ack,
    FrameType.HEARTBEAT: Heartbeat,
    FrameType.VECTOR: Vectors,
    FrameType.BYE: Bye,
    FrameType.CHANGE: LayoutChange,
}
FRAME_TYPES: dict[type[Message], FrameType] = {cls: FrameType(number) for number, cls in _MESSAGE_TYPES.items()}
"""Message class -> the frame type that carries it."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[int, msgspec.msgpack.Decoder[Message]] = {
    number: msgspec.msgpack.Decoder(cls) for number, cls in _MESSAGE_TYPES.items()
}


SMALL_MESSAGE_BYTES = 2 * 2**20
SHARED_BYTES, MAX_SHARED = 512, 4096
"""Heartbeats of at most so many bytes are decoded once for all ranks that say the same, and so many are remembered: ranks of
a job are in the same call, thousands of them each second. A bound on memory: 2 MiB of payloads, and what they decode to."""
MAX_MESSAGE_BYTES: Mapping[FrameType, int] = {
    FrameType.DESCRIPTOR: 64 * 2**20,
    FrameType.CHANGE: 64 * 2**20,
    FrameType.END_STEP: 16 * 2**20,
    FrameType.VECTOR: MAX_FRAME_BYTES,
}
"""Most bytes of a payload; a bound on memory: a descriptor of 100,000 tensors has 20 MB. Others have SMALL_MESSAGE_BYTES."""
_HEARTBEAT, _DESCRIPTOR = int(FrameType.HEARTBEAT), int(FrameType.DESCRIPTOR)
# By number: a member of an enumeration is looked up for a microsecond.
_MAX_MESSAGE_BYTES = {int(kind): most for kind, most in MAX_MESSAGE_BYTES.items()}


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who said it, when, and in which order."""

    type: int
    """A FrameType; a number that is not one comes from a newer writer and is for nobody here."""
    incarnation: bytes
    """16 random bytes: one process from attach to end."""
    run_id: int
    """`run_id_of(run)`."""
    rank: int
    seq: int
    """From 1, +1 a frame of the incarnation, lost ones included: a gap is a loss."""
    attempt: int = NO_ATTEMPT
    step: int = NO_STEP
    placement_epoch: int = 0
    """+1 each time the descriptor changes within the incarnation."""
    layout_id: int = 0
    """Which descriptor the rows of this frame point into: within the incarnation, two that differ never have the same (its
    first
    payload's crc32). It stays the same where that descriptor is sent again, whole or not."""
    wall_ns: int = 0
    mono_ns: int = 0
    row_count: int = 0


class Frame(msgspec.Struct, frozen=True):
    """A whole frame, checked."""

    header: Header
    payload: Buffer
    offset_after: int
    """Where the next frame begins: in the scanned buffer, or in the file for frames of a SpoolReader; 0 in a file that was
    thinned, which is read from its beginning after a restart."""
    file_index: int = 0
    num_bytes_away: int = 0
    """Bytes of a payload that is not here (ROWS_AWAY, which `scan` takes for rows): `payload` is empty then."""


class FrameHead(msgspec.Struct, frozen=True):
    """What the header of a frame says, before the frame is read."""

    type: int
    step: int
    num_bytes: int
    """Of the whole frame."""


class Incomplete(msgspec.Struct, frozen=True):
    """The bytes end before the frame does: wait, or cut the torn tail."""

    num_bytes: int
    """Bytes wanted from the frame's start; at least this many."""


class Corrupt(msgspec.Struct, frozen=True):
    """No valid frame begins here."""

    next_offset: int
    """The next place where one might: a magic, or the buffer's end less what could be the beginning of one."""


class Foreign(msgspec.Struct, frozen=True):
    """A whole frame of another protocol version; its checks are right, its content is not for us."""

    protocol: int
    next_offset: int


def run_id_of(run: str) -> int:
    """Return the 64-bit number that stands for a run's name in headers: blake2b, 8 bytes, little-endian."""
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little")


def encode_frame(header: Header, payload: Buffer, *, protocol: int = 0) -> tuple[bytes, Buffer]:
    """Return (header bytes, payload): the two buffers of one writev; the payload is not copied.

    protocol: 0 for the version that has the frame's type.

    WireError when the frame would be longer than MAX_FRAME_BYTES.
    """
    protocol = protocol or (PROTOCOL if header.type == FrameType.CHANGE else OLDEST_PROTOCOL)
    payload_bytes = memoryview(payload).nbytes
    frame_bytes = HEADER_BYTES + payload_bytes
    if frame_bytes > MAX_FRAME_BYTES:
        raise WireError(f"frame from rank {header.rank}: expected at most {MAX_FRAME_BYTES} bytes, got {frame_bytes}")
    words = HEADER_BYTES // 8
    check = zlib.crc32(_CHECKED.pack(MAGIC, protocol, header.type, words, frame_bytes))
    body = _BODY.pack(
        header.incarnation, header.run_id, header.attempt, header.rank, header.step, header.seq,
        header.placement_epoch, header.layout_id, header.wall_ns, header.mono_ns,
    )  # fmt: skip
    blank = _PREFIX.pack(MAGIC, protocol, header.type, words, frame_bytes, check, 0, header.row_count)
    crc = zlib.crc32(body, zlib.crc32(blank))
    crc = crc32(payload, crc) if payload_bytes >= LARGE_BYTES else zlib.crc32(payload, crc)
    return blank[:_CRC_OFFSET] + crc.to_bytes(4, "little") + blank[_CRC_OFFSET + 4 :] + body, payload


def peek(buffer: Buffer, offset: int = 0) -> tuple[int, int] | None:
    """Return (type, bytes in all) of the frame that begins at `offset`, by its prefix alone; None: no whole prefix is there.

    What lies behind the prefix is neither needed nor checked.
    """
    if len(buffer) - offset < PREFIX_BYTES:
        return None
    magic, _, frame_type, _, frame_bytes, check, _, _ = _PREFIX.unpack_from(buffer, offset)
    if magic != MAGIC or zlib.crc32(memoryview(buffer)[offset : offset + _CHECKED.size]) != check:
        return None
    return (frame_type, frame_bytes) if PREFIX_BYTES <= frame_bytes <= MAX_FRAME_BYTES else None


def scan(
    buffer: Buffer, offset: int = 0, base: int = 0, file_index: int = 0, num_behind: int = 0
) -> Frame | Incomplete | Corrupt | Foreign:
    """Return what begins at `offset`. The payload of a Frame is a view into `buffer`, not a copy.

    base, file_index: where the buffer lies in which file, for `Frame.offset_after`. num_behind: bytes of that file behind
    the buffer, where the rows may be that are away: nobody need have read those.
    """
    view = memoryview(buffer)
    available = len(view) - offset
    if available < PREFIX_BYTES:
        begun = bytes(view[offset : offset + 4])
        return Incomplete(PREFIX_BYTES) if MAGIC.startswith(begun) else _corrupt(buffer, offset)
    magic, protocol, frame_type, words, frame_bytes, check, crc, row_count = _PREFIX.unpack_from(view, offset)
    if (
        magic != MAGIC
        or zlib.crc32(view[offset : offset + _CHECKED.size]) != check
        or not PREFIX_BYTES <= frame_bytes <= MAX_FRAME_BYTES
    ):
        return _corrupt(buffer, offset)
    is_away = frame_type == FrameType.ROWS_AWAY
    needed = min(frame_bytes, words * 8) if is_away else frame_bytes
    if available < needed or available + num_behind < frame_bytes:
        return Incomplete(needed if available < needed else frame_bytes)
    end = offset + needed
    rest = offset + _CRC_OFFSET + 4
    is_large = end - offset >= LARGE_BYTES
    if crc != (crc32(buffer, _BEGUN_CRC, rest, end) if is_large else zlib.crc32(view[rest:end], _BEGUN_CRC)):
        return _corrupt(buffer, offset)
    end = offset + frame_bytes
    if not OLDEST_PROTOCOL <= protocol <= PROTOCOL:
        return Foreign(protocol, end)
    header_bytes = words * 8
    if header_bytes < HEADER_BYTES or header_bytes > frame_bytes:
        return _corrupt(buffer, offset)
    incarnation, run_id, attempt, rank, step, seq, placement_epoch, layout_id, wall_ns, mono_ns = _BODY.unpack_from(
        view, offset + PREFIX_BYTES
    )
    header = Header(
        type=int(FrameType.ROWS) if is_away else frame_type,
        incarnation=incarnation, run_id=run_id, rank=rank, seq=seq, attempt=attempt, step=step,
        placement_epoch=placement_epoch, layout_id=layout_id, wall_ns=wall_ns, mono_ns=mono_ns, row_count=row_count,
    )  # fmt: skip
    if is_away:
        return Frame(header, b"", base + end, file_index, frame_bytes - header_bytes)
    return Frame(header, view[offset + header_bytes : end], base + end, file_index)


def without_rows(frame: Buffer) -> bytes | None:
    """Return the HEADER_BYTES that stand for a whole frame of rows where its payload is not; None: it is none.

    With anything behind them that is as long as the payload, they are a frame that `scan` takes.
    """
    found = scan(frame)
    if not isinstance(found, Frame) or found.header.type != FrameType.ROWS or found.num_bytes_away:
        return None
    if found.offset_after != memoryview(frame).nbytes or found.offset_after != HEADER_BYTES + len(found.payload):
        return None
    magic, protocol, _, words, frame_bytes, _, _, row_count = _PREFIX.unpack_from(frame)
    checked = (magic, protocol, int(FrameType.ROWS_AWAY), words, frame_bytes)
    body = bytes(memoryview(frame)[PREFIX_BYTES:HEADER_BYTES])
    check = zlib.crc32(_CHECKED.pack(*checked))
    crc = zlib.crc32(body, zlib.crc32(_PREFIX.pack(*checked, check, 0, row_count)))
    return _PREFIX.pack(*checked, check, crc, row_count) + body


def head_of(header: Buffer) -> FrameHead | None:
    """Return what HEADER_BYTES that begin a frame say of it; None where they begin none that is understood.

    Only the length is checked: `scan` checks the frame.
    """
    if len(header) < HEADER_BYTES:
        return None
    magic, protocol, frame_type, words, frame_bytes, check, _, _ = _PREFIX.unpack_from(header)
    if magic != MAGIC or zlib.crc32(memoryview(header)[: _CHECKED.size]) != check or words * 8 < HEADER_BYTES:
        return None
    if not OLDEST_PROTOCOL <= protocol <= PROTOCOL or not HEADER_BYTES <= frame_bytes <= MAX_FRAME_BYTES:
        return None
    return FrameHead(frame_type, _BODY.unpack_from(header, PREFIX_BYTES)[4], frame_bytes)


def _corrupt(buffer: Buffer, offset: int) -> Corrupt:
    size = len(buffer)
    if isinstance(buffer, memoryview):
        found = bytes(buffer[offset + 1 :]).find(MAGIC)
        found = found if found < 0 else found + offset + 1
    else:
        found = buffer.find(MAGIC, offset + 1)
    if found >= 0:
        return Corrupt(found)
    for num_begun in (3, 2, 1):
        if size - num_begun > offset and buffer[size - num_begun :] == MAGIC[:num_begun]:
            return Corrupt(size - num_begun)
    return Corrupt(size)


def encode_message(message: Message) -> bytes:
    """Return the msgpack payload of a message; NaN and infinities travel as they are."""
    return _ENCODER.encode(message)


def decode_message(frame: Frame) -> Message | None:
    """Return the message of a frame, or None where its type carries none (rows, newer types).

    WireError when the payload is not what its type promises.
    """
    kind, payload = frame.header.type, frame.payload
    decoder = _DECODERS.get(kind)
    if decoder is None:
        return None
    num_bytes = memoryview(payload).nbytes
    try:
        if kind == _HEARTBEAT and num_bytes <= SHARED_BYTES:
            return _shared_heartbeat(bytes(payload))
        most = _MAX_MESSAGE_BYTES.get(kind, SMALL_MESSAGE_BYTES)
        if num_bytes > most:
            raise ValueError(f"expected at most {most} bytes, got {num_bytes}")
        if kind == _DESCRIPTOR:
            return decode_descriptor(payload)
        return shown(decoder.decode(payload))
    except RecursionError as error:
        raise WireError(f"{FrameType(kind).name.lower()} frame {frame.header.seq}: containers nested too deeply") from error
    except (msgspec.DecodeError, SentinelError, ValueError, OverflowError, MemoryError) as error:
        raise WireError(f"{FrameType(kind).name.lower()} frame {frame.header.seq}: {error}") from error


@functools.lru_cache(maxsize=MAX_SHARED)
def _shared_heartbeat(payload: bytes) -> Message:
    return shown(_DECODERS[_HEARTBEAT].decode(payload))


def row_dtype(descriptor: Descriptor) -> np.dtype[np.void]:
    """Return the dtype of the rows of an incarnation, as its own descriptor lays them out; ROW_DTYPE itself where it is
    that.

    WireError when the layout contradicts itself.
    """
    try:
        return _row_dtype(descriptor.row_fields, descriptor.row_bytes)
    except (TypeError, ValueError, OverflowError, SyntaxError) as error:
        raise WireError(f"descriptor of rank {descriptor.place.rank}: row layout: {error}") from error


@functools.lru_cache(maxsize=64)
def _row_dtype(fields: tuple[tuple[str, str, int], ...], row_bytes: int) -> np.dtype[np.void]:
    names, formats, offsets = zip(*fields, strict=True) if fields else ((), (), ())
    for name, form in zip(names, formats, strict=True):
        if np.dtype(form).kind not in "iuf":
            raise ValueError(f'{name}: expected a number, got "{form[:40]}"')
    found = np.dtype({"names": list(names), "formats": list(formats), "offsets": list(offsets), "itemsize": row_bytes})
    return ROW_DTYPE if found == ROW_DTYPE else found


def row_fields(dtype: np.dtype[np.void]) -> tuple[tuple[str, str, int], ...]:
    """Return what a descriptor says of a row dtype: (name, dtype string, byte offset) of each field."""
    fields: Mapping[str, tuple[np.dtype[np.void], int]] = dtype.fields or {}  # type: ignore[assignment]
    return tuple((name, fields[name][0].str, int(fields[name][1])) for name in dtype.names or ())
