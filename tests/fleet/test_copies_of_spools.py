"""A spool that travels in chunks, lost, repeated and out of order, is the same spool at the join; strangers' are refused."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from sentinel.errors import ConfigError, WireError
from sentinel.fleet import copied_news, copied_runs, run_copies, spool_cursor
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.heard_nodes import FORGOTTEN_S, SILENT_S
from sentinel.fleet.intake_tally import REFUSED_S
from sentinel.fleet.node_runs import BEAT_S, BUSY_S, BUSY_SHARE, HEARTBEATS_S, MAX_PACE_S, NodeRuns
from sentinel.fleet.node_spool import RESEND_S
from sentinel.fleet.sealed import (
    TOGETHER_BYTES,
    Answer,
    Beat,
    FilePlace,
    Published,
    Several,
    SpoolChunk,
    in_messages,
    seal,
    seal_published,
    unseal,
    unseal_published,
)
from sentinel.fleet.spool_copy import SpoolCopy
from sentinel.fleet.spool_cursor import SpoolCursor
from sentinel.fleet.subjects import raw, token
from sentinel.ingest.follow import RunFollower
from sentinel.messages import Heartbeat
from sentinel.native import crc32
from sentinel.wire.frame import Frame
from sentinel.wire.spool import read_ack, write_ack
from sentinel.wire.spool_reader import SpoolReader

from ..support.serving import small_run

FOLDER = "r00003-0123abcd"


class Fleet:
    """Nodes and a join without a broker between them: each message is handed over by the test, on a clock of its own."""

    def __init__(self, where: Path, *nodes: str) -> None:
        self.now = 100.0
        self.wait: Callable[[float], None] = time.sleep
        self.problems: list[str] = []
        self.joined = where / "joined"
        self.nodes = {}
        for name in nodes:
            (where / name).mkdir(parents=True)
            self.nodes[name] = NodeRuns(where / name, name, clock=lambda: self.now, on_problem=self.problems.append)
        self.copies = self.restarted()

    def restarted(self, name: str = "j1") -> CopiedRuns:
        self.joined.mkdir(exist_ok=True)
        self.copies = CopiedRuns(
            self.joined, name, begin_s=0.0, clock=lambda: self.now, on_problem=self.problems.append, wait=self.wait
        )
        return self.copies

    def talk(self, *, is_drained: bool = True) -> None:
        """Have each node speak of each run, and hear the answer."""
        self.now += 0.1
        for node in self.nodes.values():
            node.discover()
            for beat in node.beats():
                answer = self.copies.take_beat(unseal(seal(beat), Beat), is_drained=is_drained)
                if answer is not None:
                    node.take_answer(unseal(seal(answer), Answer))

    def chunks(self, node: str) -> Iterator[SpoolChunk]:
        while found := list(self.nodes[node].next()):
            for chunk in found:
                yield unseal(seal(chunk), SpoolChunk)

    def settle(self) -> None:
        """Have everything sent, and released."""
        for _ in range(3):
            self.talk()
            for node in self.nodes:
                for chunk in self.chunks(node):
                    self.copies.take_chunk(chunk)
            self.talk()
            self.talk()
            self.copies.release()
        self.talk()


def write(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as file:
        file.write(data)


def spool_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.spool"))}


@pytest.mark.parametrize("seed", range(8))
def test_a_spool_is_the_same_whatever_is_lost_repeated_and_out_of_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(tmp_path, "a")
    spool = tmp_path / "a" / "run" / "spool" / FOLDER
    flying: list[SpoolChunk] = []
    for index in range(4):
        for _ in range(rng.randint(1, 4)):
            write(spool, f"{index:06d}.spool", rng.randbytes(rng.randint(1, 600_000)))
            fleet.talk(is_drained=False)
            flying += [chunk for chunk in fleet.chunks("a") for _ in range(rng.choice((0, 1, 1, 2)))]
            rng.shuffle(flying)
            while flying and rng.random() < 0.7:
                fleet.copies.take_chunk(flying.pop())
            if rng.random() < 0.2:
                fleet.restarted(f"j{rng.random()}")
    for chunk in flying:
        fleet.copies.take_chunk(chunk)
    for _ in range(4):
        fleet.settle()
        fleet.now += RESEND_S + 1

    assert spool_bytes(fleet.joined / "run" / "spool" / FOLDER) == spool_bytes(spool)
    assert not fleet.problems


def test_a_thinned_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    spool, copy = tmp_path / "a" / "run" / "spool" / FOLDER, fleet.joined / "run" / "spool" / FOLDER
    write(spool, "000000.spool", b"x" * 1000)
    fleet.settle()
    (spool / "000000.spool").unlink()
    write(spool, "000002.000000-1.spool", b"y" * 1_200_000)
    write(spool, "000003.spool", b"z" * 10)
    chunks = list(fleet.chunks("a"))
    for chunk in chunks[:2]:
        fleet.copies.take_chunk(chunk)
    fleet.talk()
    fleet.talk()
    fleet.copies.release()

    assert set(spool_bytes(copy)) == {"000000.spool"}
    fleet.settle()
    fleet.now += RESEND_S + 1
    fleet.settle()
    assert spool_bytes(copy) == {"000000.spool": b"x" * 1000, **spool_bytes(spool)}


def test_what_is_committed_there_is_acknowledged_here_and_never_more_than_there_is(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    spool, copy = tmp_path / "a" / "run" / "spool" / FOLDER, fleet.joined / "run" / "spool" / FOLDER
    write(spool, "000000.spool", b"x" * 1000)
    write(spool, "000001.spool", b"x" * 1000)
    fleet.settle()

    assert read_ack(spool) == (0, 0)
    write_ack(copy, 1, 500)
    fleet.talk()
    assert read_ack(spool) == (1, 500)
    (spool / "000000.spool").unlink()
    fleet.talk()
    assert set(spool_bytes(copy)) == {"000001.spool"}
    write_ack(copy, 7, 0)
    fleet.talk()
    assert read_ack(spool) == (1, 500)
    assert any("it is not believed" in one for one in fleet.problems)


def test_a_file_that_is_gone_before_it_was_sent_is_passed_over(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    spool, copy = tmp_path / "a" / "run" / "spool" / FOLDER, fleet.joined / "run" / "spool" / FOLDER
    write(spool, "000000.spool", b"a" * 100)
    fleet.settle()
    write(spool, "000001.spool", b"b" * 100)
    write(spool, "000002.spool", b"c" * 100)
    (spool / "000001.spool").unlink()
    fleet.settle()

    assert set(spool_bytes(copy)) == {"000000.spool", "000002.spool"}


def test_files_that_stayed_empty_are_passed_over_where_others_lie_behind_them(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    spool, copy = tmp_path / "a" / "run" / "spool" / FOLDER, fleet.joined / "run" / "spool" / FOLDER
    for index, data in enumerate([b"x" * 1000, b"", b"", b"y" * 1000]):
        write(spool, f"{index:06d}.spool", data)
    fleet.settle()
    assert spool_bytes(copy) == spool_bytes(spool) and not fleet.copies.on_the_way("run")
    write(spool, "000004.spool", b"")
    fleet.settle()
    assert "000004.spool" not in spool_bytes(copy), "it is only begun"
    write(spool, "000004.spool", b"z" * 1000)
    fleet.settle()
    assert spool_bytes(copy) == spool_bytes(spool)


def test_what_lies_behind_a_thinned_file_of_which_nothing_was_kept_is_sent(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    spool, copy = tmp_path / "a" / "run" / "spool" / FOLDER, fleet.joined / "run" / "spool" / FOLDER
    write(spool, "000001.000000-1.spool", b"")
    write(spool, "000002.spool", b"x" * 1000)
    fleet.talk()
    # Nor does it wait to be sent again where the empty one comes last.
    for chunk in reversed(list(fleet.chunks("a"))):
        fleet.copies.take_chunk(chunk)
    fleet.talk()
    fleet.talk()
    fleet.copies.release()
    fleet.talk()

    assert spool_bytes(copy) == spool_bytes(spool) and not fleet.copies.on_the_way("run")
    fleet.restarted("j2")
    write(spool, "000002.spool", b"x" * 2000)
    fleet.settle()
    assert spool_bytes(copy) == spool_bytes(spool)


def test_a_spool_is_its_first_node_s_and_the_other_is_named(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    for node, data in (("a", b"right" * 100), ("b", b"wrong" * 200)):
        write(tmp_path / node / "run" / "spool" / FOLDER, "000000.spool", data)
    write(tmp_path / "b" / "run" / "spool" / "r00004-0123abcd", "000000.spool", b"its own")
    fleet.settle()
    fleet.restarted()
    fleet.settle()

    assert spool_bytes(fleet.joined / "run" / "spool" / FOLDER) == {"000000.spool": b"right" * 100}
    assert spool_bytes(fleet.joined / "run" / "spool" / "r00004-0123abcd") == {"000000.spool": b"its own"}
    assert [one for one in fleet.problems if f"spool {FOLDER} is node a's" in one and "node b sends it too" in one]


@pytest.mark.parametrize("run", ["../out", "a/b", "", ".hidden", "new\nline", "x" * 300])
def test_a_hostile_name_writes_nowhere_and_is_said_once(tmp_path: Path, run: str) -> None:
    fleet = Fleet(tmp_path)
    chunk = SpoolChunk(1, "a", run, FOLDER, "000000.spool", 0, FilePlace(), 0, b"data")
    for _ in range(2):
        fleet.copies.take_chunk(chunk)
    fleet.copies.release()

    assert [path.name for path in tmp_path.iterdir()] == ["joined"]
    assert not any(fleet.joined.iterdir())
    assert len(fleet.problems) == 1 and "\n" not in fleet.problems[0]
    assert fleet.copies.counts["refused"] == 2


def test_names_of_folders_and_files_are_those_of_spools(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    for folder, file in (("../x", "000000.spool"), (FOLDER, "../ack"), (FOLDER, "ack"), (FOLDER, "000000.spool/x")):
        fleet.copies.take_chunk(SpoolChunk(1, "a", "run", folder, file, 0, FilePlace(), 0, b"data"))
    fleet.copies.release()

    assert {path.name for path in fleet.joined.rglob("*") if path.is_file()} == {"node"}
    assert len(fleet.problems) == 2


def test_a_message_that_was_changed_on_its_way_is_refused() -> None:
    data = bytearray(seal(SpoolChunk(1, "a", "run", FOLDER, "000000.spool", 0, FilePlace(), 0, b"data")))
    data[-2] ^= 1

    with pytest.raises(WireError, match="expected the crc32"):
        unseal(bytes(data), SpoolChunk)
    with pytest.raises(WireError, match="expected a beat"):
        unseal(seal(SpoolChunk(1, "a", "run", FOLDER, "f", 0, FilePlace(), 0, b"")), Beat)


def test_nothing_is_released_before_the_other_node_has_spoken(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    for node, rank in (("a", 0), ("b", 1)):
        write(tmp_path / node / "run" / "spool" / f"r{rank:05d}-0123abcd", "000000.spool", b"x" * 100)
    fleet.talk()
    fleet.talk()
    for chunk in fleet.chunks("a"):
        fleet.now += 0.1
        fleet.copies.take_chunk(chunk)

    assert fleet.copies.release() == 0
    fleet.talk()
    assert fleet.copies.release() == 0, "both said so before they could know of it"
    fleet.talk()
    assert fleet.copies.release() == 100
    assert fleet.copies.arrivals("run").on_the_way == {"r00001-0123abcd"}
    fleet.now += SILENT_S
    assert fleet.copies.arrivals("run").on_the_way == frozenset(), "who is silent for long is waited for no more"


def test_a_run_whose_node_is_waited_for_holds_its_share_and_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, "a", "b", "c")
    folders = {"a": FOLDER, "b": "r00004-0123abcd", "c": "r00005-0123abcd"}
    spools = {node: tmp_path / node / ("well" if node == "c" else "stuck") / "spool" / folders[node] for node in folders}
    for spool in spools.values():
        write(spool, "000000.spool", b"x" * 100)
    fleet.settle()
    silent = fleet.nodes.pop("b")
    monkeypatch.setattr(copied_runs, "MAX_HELD_BYTES", 3000)
    for number in range(25):
        for node, num_bytes in (("a", 500), ("c", 100)):
            write(spools[node], "000000.spool", bytes([number]) * num_bytes)
        fleet.talk()
        assert fleet.copies.has_room()
        fleet.settle()
        assert fleet.copies.health().held_bytes < 4000
        assert spool_bytes(fleet.joined / "well" / "spool" / folders["c"]) == spool_bytes(spools["c"])

    assert fleet.copies.counts["dropped"] and not fleet.problems
    assert "run stuck: 0 MiB wait for nodes that are behind, b; more of it is dropped" in fleet.copies.health().problems[0]
    fleet.nodes["b"] = silent
    # What was dropped comes again, though the node goes on writing all the time.
    for number in range(25):
        write(spools["a"], "000000.spool", bytes([number]) * 20)
        fleet.settle()
    fleet.now += RESEND_S
    fleet.settle()
    assert spool_bytes(fleet.joined / "stuck" / "spool" / FOLDER) == spool_bytes(spools["a"])
    fleet.now += SILENT_S
    fleet.settle()
    assert not fleet.copies.health().held_bytes and not fleet.copies.health().problems


@pytest.mark.parametrize("waits_s", [0.0, 2.0 * copied_runs.STUCK_S], ids=["a moment", "long"])
def test_a_run_alone_is_dropped_nothing_of_and_nothing_more_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_s: float
) -> None:
    fleet = Fleet(tmp_path, "a", "b", "old")
    write(tmp_path / "old" / "ended" / "spool" / FOLDER, "000000.spool", b"x" * 100)
    fleet.settle()
    write(tmp_path / "a" / "run" / "spool" / FOLDER, "000000.spool", b"x" * 5000)
    write(tmp_path / "b" / "run" / "spool" / "r00004-0123abcd", "000000.spool", b"x" * 100)
    fleet.talk()
    monkeypatch.setattr(copied_runs, "MAX_HELD_BYTES", 3000)
    for chunk in fleet.chunks("a"):
        fleet.copies.take_chunk(chunk)
    fleet.now += waits_s
    assert not fleet.copies.has_room() and not fleet.copies.counts["dropped"]
    assert "nothing more is taken" in fleet.copies.health().problems[0]


def test_what_was_lost_comes_again_while_all_ranks_go_on_writing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    spools = [tmp_path / "a" / "run" / "spool" / f"r{rank:05d}-0123abcd" for rank in range(4)]
    spools.append(tmp_path / "b" / "run" / "spool" / "r00004-0123abcd")
    for at in range(80):
        for spool in spools:
            write(spool, "000000.spool", bytes([at]) * 10)
        fleet.talk(is_drained=at % 2 == 0)
        for node in fleet.nodes:
            for chunk in fleet.chunks(node):
                if not (at == 20 and chunk.folder == spools[1].name):
                    fleet.copies.take_chunk(chunk)
        fleet.copies.release()
    # More is on its way at each moment: nothing of this run is ever drained.
    for spool in spools:
        have = spool_bytes(fleet.joined / "run" / "spool" / spool.name)["000000.spool"]
        assert len(have) >= 780 and spool_bytes(spool)["000000.spool"].startswith(have)


def test_the_join_says_which_node_is_silent_behind_or_refused_and_which_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, "n1", "n2")
    for node in ("n1", "n2"):
        write(tmp_path / node / "run" / "spool" / FOLDER.replace("3", node[1]), "000000.spool", b"x" * 1000)
    fleet.talk()
    healthy = fleet.copies.health()
    assert {(one.node, one.lag_bytes) for one in healthy.nodes} == {("n1", 1000), ("n2", 1000)}
    assert (healthy.num_silent, healthy.problems) == (0, ())

    # A full disk is said, and no more once it takes what comes again.
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(SpoolCopy, "take", lambda self, chunk: (_ for _ in ()).throw(full))
        fleet.settle()
    said = fleet.copies.health()
    assert said.are_copies_refused and "cannot be written" in said.problems[0] and "No space left" in said.problems[0]
    fleet.now += 2 * RESEND_S
    fleet.settle()
    fleet.settle()
    well = fleet.copies.health()
    assert not well.are_copies_refused and not well.problems and {one.lag_bytes for one in well.nodes} == {0}

    # Another sends what is n1's.
    write(tmp_path / "n2" / "run" / "spool" / FOLDER.replace("3", "1"), "000000.spool", b"y")
    fleet.talk()
    fleet.talk()
    assert [one for one in fleet.copies.health().problems if "is node n1's, and node n2 sends it too" in one]
    fleet.now += REFUSED_S
    del fleet.nodes["n2"]
    fleet.talk()
    assert [one.partition(": ")[2] for one in fleet.copies.health().problems] == ["n2"]
    assert fleet.copies.health().num_silent == 1
    fleet.now += FORGOTTEN_S
    assert not fleet.copies.health().nodes


def test_after_a_restart_a_spool_may_have_more_until_its_node_has_spoken(tmp_path: Path) -> None:
    other = "r00004-0123abcd"
    fleet = Fleet(tmp_path, "a", "b")
    write(tmp_path / "a" / "run" / "spool" / FOLDER, "000000.spool", b"x" * 100)
    write(tmp_path / "b" / "run" / "spool" / other, "000000.spool", b"y" * 100)
    fleet.settle()
    assert not fleet.copies.arrivals("run").on_the_way

    copies = fleet.restarted("j2")
    assert copies.arrivals("run").on_the_way == {FOLDER, other}
    beats = {name: next(node.beats()) for name, node in fleet.nodes.items()}
    copies.take_beat(beats["a"], is_drained=True)
    assert copies.arrivals("run").on_the_way == {other}
    fleet.now += SILENT_S
    assert not copies.arrivals("run").on_the_way


def test_a_beat_that_comes_late_takes_back_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    spool = tmp_path / "a" / "run" / "spool" / FOLDER
    write(spool, "000000.spool", b"x" * 100)
    fleet.settle()
    early = next(fleet.nodes["a"].beats())
    write(spool, "000000.spool", b"x" * 100)
    late = next(fleet.nodes["a"].beats())
    assert fleet.copies.take_beat(late, is_drained=True) is not None
    for stale in (early, msgspec.structs.replace(early, number=("", 0)), late):
        answer = fleet.copies.take_beat(stale, is_drained=True)
        assert (answer is None) == bool(stale.number[0])
        assert fleet.copies.arrivals("run").on_the_way == {FOLDER}


@pytest.mark.parametrize("room", [0, 1, 60_000, 600_000])
def test_a_full_disk_under_the_copies_is_said_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    fleet, pwrite, left = Fleet(tmp_path, "a"), os.pwrite, [room]
    spool, copy = tmp_path / "a" / "run" / "spool" / FOLDER, fleet.joined / "run" / "spool" / FOLDER
    for index in range(3):
        write(spool, f"{index:06d}.spool", bytes([index + 1]) * 400_000)
    write(spool, "000005.000003-5.spool", b"t" * 700_000)

    def full(fd: int, data: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        wrote = pwrite(fd, data[: left[0]], offset)
        left[0] -= wrote
        return wrote

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for _ in range(3):
            fleet.settle()
            fleet.now += RESEND_S + 1
        assert "No space left" in fleet.copies.tally.disk_problem
        assert sum("No space left" in one for one in fleet.problems) == 1
    for is_restarted in (False, True):
        for _ in range(3):
            fleet.settle()
            fleet.now += RESEND_S + 1
        assert spool_bytes(copy) == spool_bytes(spool)
        assert fleet.copies.tally.disk_problem == ""
        if not is_restarted:
            fleet.restarted("j2")


def test_commands_reach_each_node_once_byte_for_byte(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    for node, rank in (("a", 0), ("b", 1)):
        write(tmp_path / node / "run" / "spool" / f"r{rank:05d}-0123abcd", "000000.spool", b"x")
    fleet.settle()
    control = fleet.joined / "run" / "control"
    write(control, "000001.json", b'{"seq": 1}')
    write(control, "draft.tmp", b"no command")
    fleet.talk()
    fleet.restarted("j2")
    fleet.settle()

    for node in ("a", "b"):
        there = tmp_path / node / "run" / "control"
        assert {path.name: path.read_bytes() for path in there.iterdir()} == {"000001.json": b'{"seq": 1}'}
        assert (there / "000001.json").stat().st_mode & 0o777 == 0o600
    assert not fleet.problems


def test_a_cursor_hands_out_what_is_torn_for_the_reader_to_wait_for(tmp_path: Path) -> None:
    write(tmp_path, "000000.spool", b"SNTL torn")
    cursor = SpoolCursor(tmp_path)

    first = cursor.next(2**20)
    write(tmp_path, "000000.spool", b" and whole")
    second = cursor.next(2**20)
    assert first is not None and second is not None
    assert (first.data, second.data, cursor.next(2**20)) == (b"SNTL torn", b" and whole", None)
    assert cursor.head() == (0, FilePlace("000000.spool", 19), 0)


def test_a_cursor_reads_a_file_to_its_end_though_the_next_begins_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "000000.spool", b"first")
    cursor, read = SpoolCursor(tmp_path), spool_cursor.read_window

    def read_late(path: Path, offset: int, max_bytes: int) -> tuple[bytes, int] | None:
        found = read(path, offset, max_bytes)
        if found is not None and not found[0] and not (tmp_path / "000001.spool").exists():
            write(tmp_path, "000000.spool", b", and its end")
            write(tmp_path, "000001.spool", b"second")
        return found

    monkeypatch.setattr(spool_cursor, "read_window", read_late)

    pieces = iter(lambda: cursor.next(2**20), None)
    assert [piece.data for piece in pieces if piece is not None] == [b"first", b", and its end", b"second"]


class BeatingRun:
    """A run of four ranks on one node, which has been heard of by the join."""

    def __init__(self, where: Path) -> None:
        self.fleet = Fleet(where, "a")
        self.node = self.fleet.nodes["a"]
        self.run = small_run(where / "a" / "run")
        self.run.write(2)
        self.fleet.settle()
        self.fleet.now += HEARTBEATS_S + BUSY_S

    def beats(self, *ranks: int) -> None:
        for rank in ranks:
            self.run.report(rank, Heartbeat(step=2, call_id=0, activity="train"))

    def published(self) -> list[Published]:
        return list(self.node.next())

    def read_by(self, follower: RunFollower) -> list[int]:
        """Return the ranks of the heartbeats that a follower has yet to read."""
        return [one.incarnation.rank for one in follower.poll() if isinstance(one.message, Heartbeat)]


def test_heartbeats_wait_for_each_other_and_go_with_whatever_comes(tmp_path: Path) -> None:
    beating = BeatingRun(tmp_path)
    node, fleet = beating.node, beating.fleet
    assert node.pause_s == HEARTBEATS_S
    beating.beats(0)
    assert len(beating.published()) == 1, "none was published within the second"
    beating.beats(1, 2)
    fleet.now += 0.9 * HEARTBEATS_S
    assert not beating.published() and node.pause_s == HEARTBEATS_S
    beating.beats(3)
    fleet.now += 0.2 * HEARTBEATS_S
    assert len(beating.published()) == 3 and node.pause_s == HEARTBEATS_S
    beating.beats(0, 1)
    beating.run.write_rank(3, 2)
    assert len(beating.published()) == 3 and node.pause_s == BEAT_S
    fleet.now += BUSY_S
    assert node.pause_s == HEARTBEATS_S
    for _ in range(3):
        fleet.settle()
        fleet.now += RESEND_S + 1
    for rank in range(4):
        folder = beating.run.folder(rank)
        assert spool_bytes(fleet.joined / "run" / "spool" / folder.name) == spool_bytes(folder)


@pytest.mark.parametrize(("num_others", "pace_s"), [(500, HEARTBEATS_S), (767, 1.5), (9999, MAX_PACE_S)])
def test_a_join_of_many_nodes_has_those_with_nothing_to_say_speak_less(
    tmp_path: Path, num_others: int, pace_s: float
) -> None:
    beating = BeatingRun(tmp_path)
    node, fleet = beating.node, beating.fleet
    run = fleet.copies._runs["run"]
    run.heard.at.update({f"other{number}": fleet.now for number in range(num_others)})
    fleet.talk()
    assert node.pause_s == pytest.approx(pace_s)
    fleet.now += pace_s
    beating.beats(0)
    assert len(beating.published()) == 1
    beating.beats(1)
    fleet.now += 0.9 * pace_s
    assert not beating.published()
    fleet.now += 0.2 * pace_s
    assert len(beating.published()) == 1
    beating.run.write_rank(3, 2)
    assert beating.published() and BEAT_S <= node.pause_s == pace_s / BUSY_SHARE, "it waits though it has a step"


def test_what_is_small_travels_together_and_what_is_large_by_itself(tmp_path: Path) -> None:
    def chunk(folder: str, size: int, run: str = "run") -> SpoolChunk:
        return SpoolChunk(1, "a", run, folder, "000000.spool", 0, FilePlace(), 0, bytes(size))

    small = [chunk(f"r{rank:05d}-0123abcd", 100) for rank in range(4)]
    large = chunk("r00009-0123abcd", TOGETHER_BYTES)
    other = chunk("r00000-0123abcd", 100, "other")
    sent = list(in_messages([*small, large, *small[:1], other]))
    assert sent == [tuple(small), (large,), (small[0],), (other,)]
    for parts in sent:
        assert unseal_published(seal_published(parts)) == parts
    assert len(list(in_messages([*small * 100]))) > 2 and not list(in_messages([]))
    odd = msgspec.structs.replace(small[0], node="b")
    wrongs: tuple[object, ...] = (
        Several(3, "a", "run", ()),
        ["several", 3, "a", "run", [small[0], odd]],
        ["several", 3, "b", "run", small],
    )
    for wrong in wrongs:
        body = msgspec.msgpack.encode(wrong)
        with pytest.raises(WireError):
            unseal_published(crc32(body).to_bytes(4, "little") + body)


def test_what_no_broker_takes_of_several_is_sent_again(tmp_path: Path) -> None:
    beating = BeatingRun(tmp_path)
    beating.run.write(1)
    parts = tuple(beating.published())
    assert len(parts) == 4
    for one in parts:
        beating.node.take_back(one)
    assert tuple(beating.published()) == parts


def test_of_thousands_what_is_committed_is_looked_at_now_and_then_and_at_once_for_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beating = BeatingRun(tmp_path)
    monkeypatch.setattr(run_copies, "ACKS_A_SECOND", 0.1)
    copy = beating.fleet.joined / "run" / "spool" / beating.run.folder(0).name

    def told(*, is_ending: bool = False) -> tuple[int, int]:
        (beat,) = beating.node.beats(is_ending=is_ending)
        answer = beating.fleet.copies.take_beat(beat, is_drained=True)
        assert answer is not None
        return answer.spools[copy.name].acked

    told()
    write_ack(copy, 0, 300)
    assert told() == (0, 0)
    assert told(is_ending=True) == (0, 300)
    write_ack(copy, 0, 400)
    beating.fleet.now += 39.0
    assert told() == (0, 300)
    beating.fleet.now += 2.0
    assert told() == (0, 400)


def test_a_follower_looks_where_something_came_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beating = BeatingRun(tmp_path)
    looked: list[str] = []
    handed: list[str] = []
    poll, take = SpoolReader.poll, SpoolReader.take

    def noted(self: SpoolReader, *, final: bool = False, max_bytes: int = 0) -> list[Frame]:
        looked.append(self.directory.name)
        return poll(self, final=final, max_bytes=max_bytes)

    def noted_take(self: SpoolReader, file_index: int, pieces: Sequence[tuple[int, bytes]], end: int) -> list[Frame] | None:
        found = take(self, file_index, pieces, end)
        if found is not None:
            handed.append(self.directory.name)
        return found

    monkeypatch.setattr(SpoolReader, "poll", noted)
    monkeypatch.setattr(SpoolReader, "take", noted_take)
    follower = RunFollower(beating.fleet.joined / "run", arrivals=lambda: beating.fleet.copies.arrivals("run"))
    names = [beating.run.folder(rank).name for rank in range(4)]
    while follower.poll():
        pass
    assert set(looked) == set(names)
    follower.poll()
    looked.clear()
    assert not follower.poll() and not looked
    beating.beats(2)
    beating.fleet.settle()
    assert beating.read_by(follower) == [2]
    assert not looked and handed == [names[2]], "what came is in memory still, and is not read again"
    beating.beats(1)
    beating.fleet.settle()
    monkeypatch.setattr(copied_news, "MAX_BYTES", 0)
    beating.beats(2, 1)
    beating.fleet.settle()
    assert sorted(beating.read_by(follower)) == [1, 1, 2]
    assert sorted(set(looked)) == [names[1], names[2]], "what is not held is read, and so is what lies before it"
    # One of which more is known to exist is behind, and so no more when nobody waits for it.
    beating.run.write_rank(1, 2)
    beating.fleet.talk()
    follower.poll()
    assert follower.behind == {beating.run.incarnation(1)}
    beating.fleet.now += SILENT_S
    follower.poll()
    assert not follower.behind


def test_subjects_have_one_token_for_any_name() -> None:
    names = ["run", "run.x", "run x", "run>*", "rün", "run%2Ex", "x" * 300, "x" * 301, ""]

    assert len({token(name) for name in names}) == len(names)
    for name in names:
        assert raw(name, "node").count(".") == 4 and not set(raw(name, "node")) & set(" *>\n")


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("user\nsecret\n")
    login.chmod(0o644)

    assert BrokerConfig(server="nats://me:secret@host:4222").shown == "nats://***@host:4222"
    with pytest.raises(ConfigError, match="expected nats://HOST:PORT") as refused:
        BrokerConfig(server="http://me:secret@host")
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="only its owner may read"):
        BrokerConfig(server="nats://host:4222", login_file=str(login)).login()
    login.chmod(0o600)
    assert BrokerConfig(server="nats://host:4222", login_file=str(login)).login() == ("user", "secret")
