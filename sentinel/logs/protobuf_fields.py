"""Fields of protocol buffers, read without their library or schema: TensorBoard and Weights & Biases write such messages.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (field number, value) of a message: integers for varints, bytes for the rest. IndexError for what is none."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise IndexError(f"wire type {kind}")
        if at + size > len(data):
            raise IndexError("a field goes past the end")
        yield number, data[at : at + size]
        at += size


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return (an integer of variable length, where it ends). IndexError for one without an end."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a number without an end")


def signed(value: int) -> int:
    """Return a varint as the signed integer of 64 bits that it is."""
    return value - (1 << 64) if value >= 1 << 63 else value
