"""Records of TensorBoard's event files: each with its length, and checksums of both.

The checksum is CRC-32C, of which Python has none but a loop over bytes: this one works on many pieces at a time.
"""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_ALL = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8
PIECE_BYTES = 64
"""Bytes of a piece (chosen): pieces are taken side by side, their bytes one after the other."""


def _byte_table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(_POLYNOMIAL) ^ (table >> np.uint32(1)), table >> np.uint32(1))
    return table.astype(np.uint32)


_TABLE = _byte_table()
_LIST = _TABLE.tolist()


def record(data: bytes) -> bytes:
    """Return a record that holds `data`."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked(length), data, _masked(data)))


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _ALL)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of some bytes (Castagnoli; RFC 3720, appendix B.4)."""
    head = len(data) % PIECE_BYTES
    state = _ALL
    for byte in data[:head]:
        state = _LIST[(state ^ byte) & 0xFF] ^ (state >> 8)
    if head == len(data):
        return state ^ _ALL
    pieces = np.frombuffer(data, np.uint8, offset=head).reshape(-1, PIECE_BYTES).T
    # Pieces of zeros before the first one change nothing: so there are as many as halve to one.
    num_pieces = 1 << (pieces.shape[1] - 1).bit_length()
    crcs = np.zeros(num_pieces, np.uint32)
    own = crcs[num_pieces - pieces.shape[1] :]
    own[0] = state
    for column in np.ascontiguousarray(pieces):
        own[:] = _TABLE[(own ^ column) & np.uint32(0xFF)] ^ (own >> np.uint32(8))
    doublings = 0
    while len(crcs) > 1:
        crcs = _moved(crcs[0::2], doublings) ^ crcs[1::2]
        doublings += 1
    return int(crcs[0]) ^ _ALL


def _moved(crcs: npt.NDArray[np.uint32], doublings: int) -> npt.NDArray[np.uint32]:
    """Return states after PIECE_BYTES * 2**doublings further bytes of zero: a linear map, looked up by byte."""
    tables = _tables(doublings)
    moved: npt.NDArray[np.uint32] = tables[0][crcs & np.uint32(0xFF)]
    for at in (1, 2, 3):
        moved = moved ^ tables[at][(crcs >> np.uint32(8 * at)) & np.uint32(0xFF)]
    return moved


@cache
def _tables(doublings: int) -> npt.NDArray[np.uint32]:
    """Return [4, 256] what each value of each byte of a state becomes."""
    values = (np.arange(256, dtype=np.uint32)[None, :] << (np.uint32(8) * np.arange(4, dtype=np.uint32)[:, None])).ravel()
    if doublings:
        for _ in range(2):
            values = _moved(values, doublings - 1)
    else:
        for _ in range(PIECE_BYTES):
            values = _TABLE[values & np.uint32(0xFF)] ^ (values >> np.uint32(8))
    return values.reshape(4, 256)
