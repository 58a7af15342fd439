"""A digest comes back bit for bit, whatever its ranks carry; what is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from sentinel.errors import WireError
from sentinel.fleet.packed_digest import MAX_DIGEST_BYTES, PackedDigest, decode_digest, encode_digest
from sentinel.ingest.node_digest import VERSION, DigestedRank, NodeDigest
from sentinel.record import ROW_DTYPE, STATS_DTYPE, STATS_OFFSET

STATS, ROW = STATS_DTYPE.itemsize, ROW_DTYPE.itemsize


def a_digest(stats: bytes, carried: list[bytes]) -> NodeDigest:
    """A digest with these statistics whose ranks carry these rows."""
    ranks = tuple(DigestedRank(2 * at, bytes([at]) * 16, 7, 30 + at, 5, rows) for at, rows in enumerate(carried))
    return NodeDigest(
        version=VERSION, step=3, is_native=True, share=b"s" * 16, ranks=ranks, stats=stats, present=b"\xff",
        has_rows=b"\xf0", marks=b"12345678", is_odd=b"\x02", is_lone=b"\x04", kinds=("activation",), is_bad=b"\x01",
        bad=bytes(range(56)) * 2, first_ranks=bytes(range(16)), site_pos=bytes(range(16, 0, -1)),
    )  # fmt: skip


def rows_with(rng: np.random.Generator, stats: bytes, num: int) -> bytes:
    """Some rows, of which most have the statistics of a tensor as they are."""
    found = b""
    for _ in range(num):
        at = int(rng.integers(len(stats) // STATS)) if stats else 0
        measured = stats[at * STATS : (at + 1) * STATS] if stats and rng.random() < 0.8 else rng.bytes(STATS)
        found += rng.bytes(STATS_OFFSET) + measured
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_digest_comes_back_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stats = rng.bytes(STATS * int(rng.integers(6)))
    carried: list[bytes] = []
    for _ in range(int(rng.integers(1, 7))):
        former = carried[-1] if carried else b""
        flipped = bytearray(former)
        if flipped:
            flipped[int(rng.integers(len(flipped)))] ^= 1
        carried.append([b"", former, bytes(flipped), rows_with(rng, stats, int(rng.integers(5)))][int(rng.integers(4))])
    found = a_digest(stats, carried)
    packed = decode_digest(encode_digest(found))
    assert packed.unpack() == found
    assert (packed.step, packed.of) == (3, found.of)


def test_what_repeats_takes_no_bytes() -> None:
    rng = np.random.default_rng(1)
    stats = rng.bytes(STATS * 100)
    rows = b"".join(bytes(STATS_OFFSET) + stats[at : at + STATS] for at in range(0, 90 * STATS, STATS))
    bare, one, eight = (len(encode_digest(a_digest(stats, given))) for given in ([b""] * 8, [rows] + [b""] * 7, [rows] * 8))
    assert len(rows) > 10_000 and bare < 11_000
    assert one < bare + 400 and eight < one + 50


def _body_with(change: Callable[[list[Any]], object]) -> Callable[[PackedDigest], bytes]:
    def changed(packed: PackedDigest) -> bytes:
        body = msgspec.msgpack.decode(zstandard.decompress(packed.body))
        change(body)
        return zstandard.compress(msgspec.msgpack.encode(body))

    return changed


def _set(at: int, value: Any) -> Callable[[list[Any]], object]:
    return lambda body: body.__setitem__(at, value)


WRONG: dict[str, Callable[[PackedDigest], bytes]] = {
    "cut": lambda packed: packed.body[:-1],
    "more behind it": lambda packed: packed.body + b"1",
    "another behind it": lambda packed: packed.body + packed.body,
    "no zstd": lambda packed: b"1234" * 10,
    "empty": lambda packed: b"",
    "its length is not said": lambda packed: zstandard.ZstdCompressor(write_content_size=False).compress(
        zstandard.decompress(packed.body)
    ),
    "too long": lambda packed: zstandard.compress(bytes(MAX_DIGEST_BYTES + 1)),
    "statistics are not whole": _body_with(lambda body: body[0].__setitem__(5, b"1234")),
    "places are not whole": _body_with(lambda body: body[0].__setitem__(-1, b"12345")),
    "rows are not whole": _body_with(_set(2, [b"1234", None])),
    "rows of too few ranks": _body_with(_set(2, [None])),
    "rows of too many ranks": _body_with(_set(2, [None] * 3)),
    "twins of too few rows": _body_with(_set(1, b"")),
    "twins that are not there": _body_with(_set(1, b"\xff\xff\xff\x7f" * 3)),
    "half a twin": _body_with(_set(1, b"12345")),
    "another step": _body_with(lambda body: body[0].__setitem__(1, 4)),
    "other ranks": _body_with(lambda body: body[0][4].reverse()),
    "rows of very many ranks": _body_with(_set(2, [None] * 5000)),
    "very many kinds": _body_with(lambda body: body[0].__setitem__(11, [""] * 5000)),
    "no ranks": _body_with(lambda body: (body[0].__setitem__(4, []), body.__setitem__(2, []))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_body_that_is_none_is_refused(wrong: str) -> None:
    rng = np.random.default_rng(0)
    stats = rng.bytes(STATS * 4)
    rows = rows_with(rng, stats, 3)
    packed = decode_digest(encode_digest(a_digest(stats, [rows, rows])))
    assert packed.unpack().ranks[1].carried == rows
    with pytest.raises(WireError, match="step 3"):
        msgspec.structs.replace(packed, body=WRONG[wrong](packed)).unpack()


def test_bytes_that_are_no_digest_are_refused() -> None:
    found = a_digest(bytes(STATS), [b""])
    data = encode_digest(found)
    newer = encode_digest(msgspec.structs.replace(found, version=VERSION + 1))
    for wrong in (b"", data[:-1], data + b"1", b"\xc1", newer):
        with pytest.raises(WireError):
            decode_digest(wrong)
    packed = decode_digest(data)
    for change in ({"step": 1}, {"of": packed.of * 2}):
        with pytest.raises(WireError):
            msgspec.structs.replace(packed, **change).unpack()
    falling = msgspec.structs.replace(found, ranks=(*found.ranks, *found.ranks))
    with pytest.raises(WireError, match="rising"):
        decode_digest(encode_digest(falling)).unpack()
