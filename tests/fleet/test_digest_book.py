"""Digests are kept until their steps are judged, in bounded memory."""

from __future__ import annotations

import msgspec
import pytest
import zstandard

from sentinel.errors import WireError
from sentinel.fleet import digest_book
from sentinel.fleet.digest_book import (
    LEAST_STEPS,
    MAX_JUDGED,
    MAX_READY_BYTES,
    MOST_OF_NODE,
    DigestBook,
    ReadyRoom,
)
from sentinel.fleet.packed_digest import PackedDigest, decode_digest, encode_digest
from sentinel.ingest.node_digest import VERSION, DigestedRank, NodeDigest
from sentinel.record import STATS_DTYPE


def a_digest(step: int, num_tensors: int = 10, seq: int = 0) -> PackedDigest:
    """A digest of two ranks with the statistics of so many tensors; seq: of the last frames in it."""
    ranks = tuple(DigestedRank(rank, bytes([rank]) * 16, 0, seq, 3) for rank in range(2))
    found = NodeDigest(
        version=VERSION, step=step, is_native=True, share=b"", ranks=ranks, stats=bytes(num_tensors * STATS_DTYPE.itemsize),
        present=b"", has_rows=b"", marks=b"", is_odd=b"", is_lone=b"",
    )  # fmt: skip
    return decode_digest(encode_digest(found))


def test_of_too_many_digests_those_that_are_judged_next_are_kept() -> None:
    first = 1000
    digests = [a_digest(first + step) for step in range(1000)]
    # Some are a byte longer than others.
    book = DigestBook(max_bytes=100 * digests[0].num_bytes + 500)

    def held() -> list[int]:
        return [one.step - first for one in digests if one.step in book._of_step]

    for one in digests[:200]:
        book.add("a", one)
    assert held() == list(range(100)), "a backlog: the newest, which are judged last, made room"
    for step in range(50):
        assert book.find("a", first + step, digests[step].of) == digests[step].unpack()
        assert book.find("b", first + step, digests[step].of) is None
    for one in digests[200:240]:
        book.add("a", one)
    assert held() == [*range(40, 100), *range(200, 240)], "then those that are judged"


def test_of_what_is_judged_less_is_kept_but_the_newest_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    book = DigestBook()
    for step in range(100):
        book.add("a", a_digest(step))
        book.add("b", a_digest(step))
    monkeypatch.setattr(digest_book, "MAX_JUDGED_BYTES", 10 * a_digest(0).num_bytes + 100)
    assert book.find("b", 50, a_digest(50).of) is not None
    assert sorted(book._of_step) == list(range(45, 100))
    monkeypatch.setattr(digest_book, "MAX_JUDGED_BYTES", 0)
    assert book.find("a", 90, a_digest(90).of) is not None and book.find("a", 91, a_digest(91).of) is not None
    assert sorted(book._of_step) == list(range(89, 100))


def test_a_few_steps_of_many_nodes_are_kept_whatever_they_take() -> None:
    book = DigestBook(max_bytes=1)
    for step in range(2 * LEAST_STEPS):
        for node in range(50):
            book.add(f"n{node}", a_digest(step))
    for step in range(LEAST_STEPS):
        assert all(book.find(f"n{node}", step, a_digest(step).of) for node in range(50)), step


def test_a_node_that_sends_digest_after_digest_of_one_step_keeps_the_newest_of_them() -> None:
    book = DigestBook(max_bytes=1)
    for seq in range(3 * MOST_OF_NODE):
        book.add("liar", a_digest(1, seq=seq))
    book.add("other", a_digest(1))
    kept = [seq for seq in range(3 * MOST_OF_NODE) if book.find("liar", 1, a_digest(1, seq=seq).of)]
    assert kept == list(range(2 * MOST_OF_NODE, 3 * MOST_OF_NODE))
    assert book.find("other", 1, a_digest(1).of) is not None


def test_one_node_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_book, "MAX_NODE_BYTES", 10 * a_digest(0, 1000).num_bytes)
    book = DigestBook(max_bytes=1)
    for step in range(8):
        for seq in range(MOST_OF_NODE):
            book.add("liar", a_digest(step, 1000, seq))
        book.add("other", a_digest(step))
    assert sum(len(of_node["liar"]) for of_node in book._of_step.values() if "liar" in of_node) <= 10
    assert all(book.find("other", step, a_digest(step).of) for step in range(8))
    book.clear()
    assert not book._num_bytes and not any(book._bytes_of_node.values()) and not book._of_step


def test_what_was_judged_long_ago_is_dropped_until_a_restart_goes_back() -> None:
    book = DigestBook()
    last = MAX_JUDGED + 500
    for step in range(last + 1):
        book.add("a", a_digest(step, 1))
        book.find("a", step, ())
    assert sorted(book._of_step)[0] == last - 1 - MAX_JUDGED
    book.add("a", a_digest(2))
    assert 2 not in book._of_step
    book.find("a", 2, ())
    book.add("a", a_digest(3))
    assert book.find("a", 3, a_digest(3).of) is not None


def test_digests_are_unpacked_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    room = ReadyRoom(20 * 2**10)
    book = DigestBook(room=room)
    digests = {(step, node): a_digest(step, 20) for step in (4, 5) for node in "abc"}
    expected = {key: one.unpack() for key, one in digests.items()}
    for (_, node), one in digests.items():
        book.add(node, one)
    unpacked = list[PackedDigest]()
    unpack = PackedDigest.unpack

    def noted(one: PackedDigest) -> NodeDigest:
        unpacked.append(one)
        return unpack(one)

    monkeypatch.setattr(PackedDigest, "unpack", noted)
    found = {(step, node): book.find(node, step, digests[step, node].of) for step, node in digests}
    num_ready = len(digests) - len(unpacked)
    assert found == expected
    assert num_ready == 20 * 2**10 // digests[4, "a"].num_bytes_unpacked > 3, "as many as there is room for"
    assert room._left == 20 * 2**10 and not any(book._ready_of_node.values())
    assert book.find("a", 4, digests[4, "a"].of) == expected[4, "a"], "one that is asked for again is unpacked again"
    unpacked.clear()
    book.add("a", a_digest(4))
    assert not unpacked, "its step was judged"


def test_one_node_takes_no_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    size = a_digest(0, 1000).num_bytes_unpacked
    monkeypatch.setattr(digest_book, "MAX_READY_NODE_BYTES", 3 * size)
    room = ReadyRoom(8 * size)
    book, other = DigestBook(room=room), DigestBook(room=room)
    for step in range(100):
        book.add("liar", a_digest(step, 1000))
    assert room._left == 5 * size
    other.add("a", a_digest(1, 1000))
    assert room._left == 4 * size, "of another run"
    for seq in range(2 * MOST_OF_NODE):
        book.add("liar", a_digest(0, 1000, seq=seq))
    book.clear()
    other.clear()
    assert room._left == 8 * size


def test_what_is_no_digest_is_said_when_its_step_is_judged() -> None:
    room = ReadyRoom()
    book, whole = DigestBook(room=room), a_digest(3)
    for body in (b"", b"no zstd", whole.body[:-4], zstandard.ZstdCompressor().compress(b"\xc1")):
        broken = msgspec.structs.replace(whole, body=body)
        book.add("liar", broken)
        with pytest.raises(WireError):
            book.find("liar", 3, broken.of)
        assert room._left == MAX_READY_BYTES
        book.clear()
        book._asked_step = -1


def test_a_node_that_sends_other_digests_of_one_step_has_none_of_them_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = list[PackedDigest]()
    monkeypatch.setattr(PackedDigest, "unpack", lambda one: unpacked.append(one))
    book = DigestBook(room=ReadyRoom())
    for seq in range(10 * MOST_OF_NODE):
        book.add("liar", a_digest(3, 20, seq=seq))
    assert len(unpacked) <= MOST_OF_NODE
    unpacked.clear()
    again, other = a_digest(5, 20), a_digest(5, 21)
    assert again.of == other.of and again != other
    for one in (again, again, other, again, other):
        book.add("liar", one)
    assert unpacked == [again]
