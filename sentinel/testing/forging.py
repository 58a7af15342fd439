"""Frames that are wrong and whole: their checksums are right, and what they say is impossible, or merely untrue."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sentinel.record import ROW_DTYPE
from sentinel.wire.frame import Frame, FrameType, Header, encode_frame

NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 5 * 10**7, 2**40, 2**53, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, -(2**31), -(2**63), 0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324,
)  # fmt: skip
WORDS = (
    "",
    "a",
    "\x00",
    "../../etc",
    "é" * 50,
    "a" * 5000,
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    "|O",
)
MAX_FORGED_BYTES = 16 * 2**20
"""Bytes of a payload above which nothing is forged from it; a bound on the time of a test."""
HEADER_FIELDS = {
    "rank": 2**32, "seq": 2**64, "attempt": 2**32, "placement_epoch": 2**32, "layout_id": 2**32, "row_count": 2**32,
    "run_id": 2**64, "type": 2**8,
}  # fmt: skip
"""Unsigned field of a header -> what it is below."""
SIGNED_FIELDS = ("step", "wall_ns", "mono_ns")


class Forger:
    """Makes a forged frame of a real one. The same seed makes the same frames."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def forge(self, frame: Frame, seq: int) -> bytes:
        """Return a frame like `frame`, with something in it changed, and with checksums that are right.

        seq: the number that it bears where that is not what is changed.
        """
        rng = self._rng
        header = msgspec.structs.replace(frame.header, seq=seq)
        payload = bytes(frame.payload)
        roll = rng.random()
        if roll < 0.3:
            header = self._header(header)
        elif header.type == FrameType.ROWS:
            payload = self._rows(payload)
        elif roll < 0.9:
            payload = self._message(payload)
        else:
            payload = self.damaged(payload)
        if len(payload) > MAX_FORGED_BYTES:
            payload = self.damaged(bytes(frame.payload))
        head, body = encode_frame(header, payload)
        return head + bytes(body)

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return plain data with one value in it, anywhere, changed, gone, or there many times."""
        rng = self._rng
        if isinstance(value, dict) and value and rng.random() < 0.9:
            found = dict(value)
            key = rng.choice(list(found))
            roll = rng.random()
            if roll < 0.08:
                del found[key]
            elif roll < 0.12:
                found[self.word()] = found[key]
            else:
                found[key] = self.value(found[key], depth + 1)
            return found
        if isinstance(value, (list, tuple)) and value and rng.random() < 0.9:
            items = list(value)
            at = rng.randrange(len(items))
            roll = rng.random()
            if roll < 0.08:
                del items[at]
            elif roll < 0.16:
                items += [items[at]] * rng.choice((1, 2, 100, 1000))
            else:
                items[at] = self.value(items[at], depth + 1)
            return items
        return self._leaf(value)

    def word(self) -> str:
        """Return a text that nobody expects."""
        return self._rng.choice(WORDS)

    def damaged(self, data: bytes) -> bytes:
        """Return bytes with some of them changed, cut off or there twice."""
        rng, found = self._rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            if not found:
                break
            at = rng.randrange(len(found))
            roll = rng.random()
            if roll < 0.6:
                found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDF, 0xFF, rng.randrange(256)))
            elif roll < 0.8:
                del found[at : at + rng.choice((1, 4, 64))]
            else:
                found[at:at] = found[at : at + rng.choice((1, 4, 64))]
        return bytes(found)

    def _leaf(self, value: Any) -> Any:
        rng = self._rng
        roll = rng.random()
        if isinstance(value, bytes) and roll < 0.5:
            return self.damaged(value)
        if roll < 0.55:
            number = rng.choice(NUMBERS)
            return number if isinstance(value, float) or not isinstance(number, float) or roll < 0.1 else int(roll * 2**20)
        if roll < 0.75:
            return self.word()
        if roll < 0.85:
            return rng.choice((None, True, False, [], {}, b""))
        nested: Any = []
        for _ in range(rng.choice((5, 40, 400))):
            nested = [nested]
        return nested

    def _header(self, header: Header) -> Header:
        rng = self._rng
        name = rng.choice((*HEADER_FIELDS, *SIGNED_FIELDS, "incarnation"))
        if name == "incarnation":
            return msgspec.structs.replace(header, incarnation=rng.randbytes(16))
        value = rng.choice([one for one in NUMBERS if isinstance(one, int)] + [rng.randrange(100)])
        if name in SIGNED_FIELDS:
            value = max(-(2**63), min(value, 2**63 - 1))
        else:
            value %= HEADER_FIELDS[name]
        return msgspec.structs.replace(header, **{name: value})

    def _rows(self, payload: bytes) -> bytes:
        if len(payload) < ROW_DTYPE.itemsize or self._rng.random() < 0.1:
            return self.damaged(payload)
        rows = np.frombuffer(bytearray(payload), ROW_DTYPE)
        at, name = self._rng.randrange(len(rows)), self._rng.choice(ROW_DTYPE.names or ())
        word = (
            self._rng.randbytes(8)
            if self._rng.random() < 0.5
            else struct.pack("<q", self._rng.choice((0, -1, 1, 2**63 - 1)))
        )
        size = ROW_DTYPE[name].itemsize
        rows[name][at] = np.frombuffer(word[:size], ROW_DTYPE[name])[0]
        return rows.tobytes()

    def _message(self, payload: bytes) -> bytes:
        try:
            reported = msgspec.msgpack.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self.damaged(payload)
        for _ in range(self._rng.choice((1, 1, 1, 3))):
            reported = self.value(reported)
        roll = self._rng.random()
        if roll < 0.02:
            return b"\x81\xa1x" + b"\x91" * self._rng.choice((100, 5000, 300_000)) + b"\x00"
        if roll < 0.04 and isinstance(reported, dict):
            return msgspec.msgpack.encode(reported)[:1] + b"\xa1x" + b"\xdd\xff\xff\xff\xff"
        return msgspec.msgpack.encode(reported)


def samples(frames: Sequence[Frame]) -> dict[int, list[Frame]]:
    """Return frames by their type: a forger that picks a type first changes rare ones as often as common ones."""
    found: dict[int, list[Frame]] = {}
    for frame in frames:
        found.setdefault(frame.header.type, []).append(frame)
    return found
