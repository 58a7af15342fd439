"""Records of TensorBoard's files: checksums are those of its own slow loop."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

from sentinel.report.tfrecord import PIECE_BYTES, crc32c, record


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (b"\0" * 32, 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_checksums(data: bytes, expected: int) -> None:
    """Source: RFC 3720, appendix B.4."""
    assert crc32c(data) == expected


@given(st.binary(max_size=300), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_checksums_are_those_of_the_loop(data: bytes, times: int) -> None:
    long = data * times

    assert crc32c(long) == pywrap_tensorflow.crc32c(long)


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 5 * PIECE_BYTES + 7])
def test_each_byte_counts(size: int) -> None:
    data = bytearray(range(256)) * 2
    data = data[:size]
    known = {crc32c(bytes(data))}

    for at in range(size):
        data[at] ^= 1
        known.add(crc32c(bytes(data)))
        data[at] ^= 1

    assert len(known) == size + 1


def test_a_record_is_length_data_and_checksums() -> None:
    data = b"x" * 1000

    made = record(data)

    assert struct.unpack("<Q", made[:8]) == (1000,) and made[12:1012] == data and len(made) == 1016
    assert struct.unpack("<I", made[8:12])[0] == pywrap_tensorflow.masked_crc32c(made[:8])
    assert struct.unpack("<I", made[1012:])[0] == pywrap_tensorflow.masked_crc32c(data)
