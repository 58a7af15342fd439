"""A node that says what no node says, or hears nothing, and a disk that is full, end no join and hold up nobody else."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sentinel.errors import WireError
from sentinel.fleet import copied_runs, fetched_rows, run_copies, spool_copy
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.heard_nodes import DEAF_S, FORGOTTEN_S, SILENT_S
from sentinel.fleet.join_intake import JoinIntake
from sentinel.fleet.join_lease import JoinLease, LeaseTimes
from sentinel.fleet.node_spool import RESEND_S
from sentinel.fleet.sealed import (
    MAX_EPOCH,
    Beat,
    DigestPiece,
    FilePlace,
    Published,
    SpoolChunk,
    SpoolHead,
    seal,
    unseal,
    unseal_published,
)
from sentinel.fleet.spool_copy import ROOM_BYTES, SpoolCopy
from sentinel.fleet.subjects import raw
from sentinel.record import ROW_DTYPE
from sentinel.run_name import folder_name, given_name
from sentinel.store.run_paths import runs_in
from sentinel.wire.frame import HEADER_BYTES, FrameType, Header, encode_frame, without_rows

from ..support.fleet_parts import Join
from ..support.nats_broker import NatsBroker
from ..support.waiting import wait_for
from .test_copies_of_spools import FOLDER, Fleet, spool_bytes, write
from .test_digest_book import a_digest
from .test_fetched_rows import ThinFleet

LONG = "1" * 5000
CHUNK = SpoolChunk(1, "a", "run", FOLDER, "000000.spool", 0, FilePlace(), 0, b"x" * 10)
HEAD = SpoolHead(0, FilePlace("000000.spool", 10), FilePlace())
BEAT = Beat(1, "a", "run", ("", 0), {FOLDER: HEAD}, [])


@pytest.mark.parametrize(
    "wrong",
    [
        msgspec.structs.replace(CHUNK, folder=f"r{LONG}-0123abcd"),
        msgspec.structs.replace(CHUNK, file=f"{LONG}.spool"),
        msgspec.structs.replace(CHUNK, offset=-1),
        msgspec.structs.replace(CHUNK, epoch=2**40),
        msgspec.structs.replace(CHUNK, epoch=-1),
        msgspec.structs.replace(CHUNK, after=FilePlace("000000.spool", -1)),
        DigestPiece(1, "a", "run", -1, 0, 1, b"x"),
    ],
    ids=["folder", "file", "offset", "epoch", "epoch below 0", "place", "number"],
)
def test_what_no_node_publishes_is_refused_where_it_is_read(wrong: Published) -> None:
    with pytest.raises(WireError, match="expected a chunk"):
        unseal_published(seal(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        msgspec.structs.replace(BEAT, spools={FOLDER: msgspec.structs.replace(HEAD, pulse_ns=2**63)}),
        msgspec.structs.replace(BEAT, spools={f"r{LONG}-0123abcd": HEAD}),
        msgspec.structs.replace(BEAT, spools={FOLDER: msgspec.structs.replace(HEAD, head=FilePlace(LONG, 1))}),
        msgspec.structs.replace(BEAT, epoch=MAX_EPOCH + 1),
        msgspec.structs.replace(BEAT, number=("n", 2**63)),
    ],
    ids=["pulse", "folder", "file", "epoch", "number"],
)
def test_what_no_node_says_is_refused_where_it_is_read(wrong: Beat) -> None:
    with pytest.raises(WireError, match="expected a beat"):
        unseal(seal(wrong), Beat)


@pytest.mark.parametrize(
    "file", ["0000000.spool", "\u0660" * 6 + ".spool", "0000001.000000-1.spool", "000001.000000-01.spool"]
)
def test_a_file_that_would_not_be_found_again_is_not_written(tmp_path: Path, file: str) -> None:
    fleet = Fleet(tmp_path, "a")
    fleet.copies.take_beat(BEAT, is_drained=True)
    fleet.copies.take_chunk(msgspec.structs.replace(CHUNK, file=file, size=0 if file.count(".") == 1 else 10))
    fleet.now += SILENT_S
    fleet.copies.release()
    assert not list(fleet.joined.rglob("*.spool"))
    assert "expected a spool file" in fleet.problems[-1]
    fleet.restarted("j2")


@pytest.mark.parametrize("name", ["spool", "attempts"])
def test_no_run_is_called_as_a_part_of_one(tmp_path: Path, name: str) -> None:
    fleet = Fleet(tmp_path, "a")
    write(tmp_path / "a" / "good" / "spool" / FOLDER, "000000.spool", b"x")
    fleet.settle()
    for published in (CHUNK, DigestPiece(1, "a", "run", 1, 0, 1, b"x")):
        fleet.copies.take(msgspec.structs.replace(published, run=name))
    assert fleet.copies.take_beat(msgspec.structs.replace(BEAT, run=name), is_drained=True) is None
    fleet.now += SILENT_S
    fleet.copies.release()
    assert runs_in(fleet.joined) == [fleet.joined / "good"]
    assert folder_name(name) != name and given_name(folder_name(name)) == name


def test_a_spool_that_begins_while_the_disk_is_full_is_taken_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, "a")
    spool, copy = tmp_path / "a" / "run" / "spool" / FOLDER, fleet.joined / "run" / "spool" / FOLDER
    write(spool, "000000.spool", b"x" * 1000)

    def full(path: Path, flags: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_copies, "create_file", full)
        fleet.settle()
        assert "No space left" in fleet.copies.tally.disk_problem and not spool_bytes(copy)
    # As after a kill at that moment, the folder is nobody's.
    assert [path.name for path in copy.iterdir()] == []
    fleet.restarted("j2")
    for _ in range(2):
        fleet.settle()
        fleet.now += RESEND_S + 1
    assert spool_bytes(copy) == spool_bytes(spool) and not fleet.copies.tally.disk_problem


def test_a_join_that_was_stopped_cuts_nothing_that_its_successor_has_written(tmp_path: Path) -> None:
    header = Header(type=int(FrameType.ROWS), incarnation=bytes(16), run_id=7, rank=3, seq=1, row_count=10)
    frame = b"".join(encode_frame(header, bytes(10 * ROW_DTYPE.itemsize)))
    head = without_rows(frame)
    assert head is not None
    size = len(frame) - HEADER_BYTES
    first = msgspec.structs.replace(CHUNK, data=head, away=((HEADER_BYTES, size),))
    second = msgspec.structs.replace(first, offset=len(frame), after=FilePlace("000000.spool", len(frame)))
    folder = tmp_path / FOLDER
    folder.mkdir()
    former, successor = SpoolCopy(folder), SpoolCopy(folder)
    assert successor.take(first) == successor.take(second) == len(frame)
    assert former.take(first) == len(frame)
    assert (folder / "000000.spool").stat().st_size == successor.place.offset == 2 * len(frame)


def test_who_lost_the_lease_writes_nothing_more(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    for index in range(3):
        write(tmp_path / "a" / "run" / "spool" / FOLDER, f"{index:06d}.spool", b"x" * 1000)
    fleet.talk()
    for chunk in fleet.chunks("a"):
        fleet.copies.take_chunk(chunk)
    fleet.talk(), fleet.talk()
    answers = iter([True, False])
    assert fleet.copies.release(lambda: next(answers, False)) == 1000
    assert fleet.copies.release(lambda: False) == 0 and fleet.copies.release() == 2000


def test_who_speaks_and_does_not_hear_holds_up_nobody_for_good_and_is_named(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    for name, folder in (("a", FOLDER), ("b", "r00004-0123abcd")):
        write(tmp_path / name / "run" / "spool" / folder, "000000.spool", b"x" * 1000)
    fleet.settle()
    assert len(list(fleet.joined.rglob("*.spool"))) == 2
    write(tmp_path / "a" / "run" / "spool" / FOLDER, "000000.spool", b"y" * 1000)
    node = fleet.nodes["b"]
    node.take_answer = lambda answer, **more: None  # type: ignore[method-assign]
    released, began = list[float](), fleet.now
    while fleet.now < began + DEAF_S + 5.0:
        fleet.talk()
        for chunk in fleet.chunks("a"):
            fleet.copies.take_chunk(chunk)
        if fleet.copies.release():
            released.append(fleet.now - began)
    assert len(released) == 1 and DEAF_S <= released[0] < DEAF_S + 1.0
    (problem,) = fleet.copies.health().problems
    assert "nodes that speak and do not hear the answers, and are waited for no more: b; are they given our --key" in problem
    del node.take_answer
    fleet.settle()
    assert not fleet.copies.health().problems


def test_of_a_run_of_which_nobody_spoke_for_an_hour_no_digests_are_kept(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    fleet.copies.take_beat(BEAT, is_drained=True)
    digest = a_digest(5)
    fleet.copies.take_digest(DigestPiece(2, "a", "run", 1, 0, 1, msgspec.msgpack.encode(digest)))
    book = fleet.copies.rows_of("run")._book
    fleet.now += FORGOTTEN_S - 1.0
    fleet.copies.release()
    assert book._of_step
    fleet.now += 1.0
    fleet.copies.release()
    assert not book._of_step and not book._num_bytes


def test_what_comes_early_is_bounded_though_it_is_no_more_than_a_byte_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_copy, "MAX_EARLY_BYTES", 10 * (ROOM_BYTES + 1))
    copy = SpoolCopy(tmp_path / FOLDER)
    for at in range(1, 31):
        assert copy.take(msgspec.structs.replace(CHUNK, offset=at, data=b"x")) == 0
    assert copy.num_dropped == 20
    assert copy.take(msgspec.structs.replace(CHUNK, data=b"x")) == 11 and not copy._early_bytes


def test_rows_that_a_full_disk_does_not_take_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thin = ThinFleet(tmp_path)
    monkeypatch.setattr(fetched_rows, "STALLED_S", 0.2)
    fill, began = SpoolCopy.fill, time.monotonic()

    def full_at_first(self: SpoolCopy, *where: Any) -> bool:
        if time.monotonic() < began + 1.0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fill(self, *where)

    monkeypatch.setattr(SpoolCopy, "fill", full_at_first)
    frames, found = thin.frames(), list[Any]()
    rows = thin.copies.rows_of("run")
    thread = threading.Thread(target=lambda: found.append(rows.fetch(frames)))
    thread.start()
    was_said = False

    def turn() -> bool:
        nonlocal was_said
        thin.turn()
        was_said |= "No space left" in thin.copies.tally.disk_problem
        return not thread.is_alive()

    wait_for(turn)
    assert len(found[0]) == len(frames) and not rows.num_gone and was_said


def test_a_message_that_cannot_be_taken_ends_no_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = list[str]()
    copies = CopiedRuns(tmp_path, "j1", on_problem=problems.append)
    intake = JoinIntake(copies, BrokerConfig(server="nats://127.0.0.1:9"), JoinLease("j1"))

    def broken(published: Published) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(copies, "take", broken)
    message: Any = SimpleNamespace(subject=raw("run", "a"), data=seal(CHUNK))
    intake._take_message(message)
    assert problems == [f"{message.subject}: ZeroDivisionError('division by zero')"] and copies.counts["refused"] == 1


@pytest.mark.slow
def test_a_join_that_reads_a_long_backlog_keeps_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: NatsBroker
) -> None:
    times = LeaseTimes(renew_s=0.2, stop_s=1.0, takeover_s=1.5)
    recall, ends_at = CopiedRuns.recall, [0.0]

    def long(self: CopiedRuns) -> None:
        time.sleep(ends_at[0])
        recall(self)

    monkeypatch.setattr(CopiedRuns, "recall", long)
    joined = Join(tmp_path / "joined", broker.url, lease=JoinLease("j1", times))
    try:
        ends_at[0] = 3.0
        assert wait_for(lambda: not joined.intake.standby_of or joined.intake.lost) and not joined.intake.lost
    finally:
        joined.drop()


def test_names_of_strangers_are_not_remembered_where_they_are_long() -> None:
    copied_runs._is_folder.cache_clear()
    for number in range(100):
        assert not copied_runs._is_name(f"{number}" * 10_000)
    assert copied_runs._is_folder.cache_info().currsize == 0
    assert copied_runs._is_name("llama-7b") and not copied_runs._is_name("") and not copied_runs._is_name("\u00e9" * 101)
