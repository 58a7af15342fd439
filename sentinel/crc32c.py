"""The checksum of TensorBoard's records: CRC-32C, rotated and offset; of many bytes formed over many lanes at once."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_LANE_BYTES = 64
_LONG = 1 << 12
"""Bytes from which lanes are faster than one byte after the other."""


def _make_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _make_table()


def masked_crc32c(data: bytes) -> int:
    """Return the checksum as TFRecord has it.

    Source: tensorflow/core/lib/hash/crc32c.h, Mask.
    """
    crc = _of_lanes(data) if len(data) >= _LONG else _byte_by_byte(data)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _byte_by_byte(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc


def _of_lanes(data: bytes) -> int:
    """Return the same by the linearity of a CRC: that of each lane from 0, then those of neighbours joined.

    What it begins with is as good as added to the first four bytes, and zeros in front of them change nothing.
    """
    num_lanes = 1 << (-(-len(data) // _LANE_BYTES) - 1).bit_length()
    padded = np.zeros(num_lanes * _LANE_BYTES, np.uint8)
    begin = len(padded) - len(data)
    padded[begin:] = np.frombuffer(data, np.uint8)
    padded[begin : begin + 4] ^= 0xFF
    columns = np.ascontiguousarray(padded.reshape(num_lanes, _LANE_BYTES).T)
    table = np.array(_TABLE, np.uint32)
    crcs = np.zeros(num_lanes, np.uint32)
    for column in columns:
        crcs = table[(crcs ^ column) & 0xFF] ^ (crcs >> np.uint32(8))
    for level in range(num_lanes.bit_length() - 1):
        crcs = _shifted(crcs[0::2], _shift_of(level)) ^ crcs[1::2]
    return int(crcs[0])


@functools.cache
def _shift_of(level: int) -> npt.NDArray[np.uint32]:
    """Return [4, 256] what each byte of a CRC becomes when `_LANE_BYTES * 2**level` zeros follow."""
    of_byte = (np.arange(256, dtype=np.uint32)[None, :] << (8 * np.arange(4, dtype=np.uint32))[:, None]).reshape(-1)
    if level:
        return _shifted(_shifted(of_byte, _shift_of(level - 1)), _shift_of(level - 1)).reshape(4, 256)
    table = np.array(_TABLE, np.uint32)
    for _ in range(_LANE_BYTES):
        of_byte = table[of_byte & 0xFF] ^ (of_byte >> np.uint32(8))
    return of_byte.reshape(4, 256)


def _shifted(crcs: npt.NDArray[np.uint32], shift: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    found: npt.NDArray[np.uint32] = shift[3][crcs >> 24]
    for at in range(3):
        found = found ^ shift[at][(crcs >> (8 * at)) & 0xFF]
    return found
