"""What a worker passes on: only the join commits, nothing is said of a node that it did not say, and who comes after begins
where the join has committed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.heard_nodes import SILENT_S
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.relayed_node import MAX_AHEAD_BYTES, RelayedNode
from sentinel.fleet.relayed_nodes import RelayedNodes
from sentinel.fleet.sealed import (
    VERSION,
    Answer,
    Beat,
    DigestPiece,
    FilePlace,
    Published,
    SpoolChunk,
    seal,
    unseal_published,
)
from sentinel.fleet.spool_copy import SpoolCopy
from sentinel.fleet.spool_cursor import SpoolPiece, frames_of_rows, without_payloads
from sentinel.fleet.subjects import partition_of
from sentinel.fleet.worker_epochs import WorkerEpochs
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.liveness import BACK_S, LivenessTracker
from sentinel.ingest.step_parts import AwayFrame
from sentinel.messages import Heartbeat
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import HEADER_BYTES
from sentinel.wire.spool import read_ack, write_ack
from sentinel.wire.spool_files import file_name, list_files

from ..support.serving import small_run

BEAT_S = 0.25


class Chain:
    """A node that ships, a worker and a join, which hear each other only when the test has them do so."""

    def __init__(self, where: Path) -> None:
        self.now = 1000.0
        self.where = where
        self.problems: list[str] = []
        self.run: SyntheticRun = small_run(where / "n0" / "run", file_bytes=20_000)
        self.run.write(8)
        self.ship = NodeRuns(where / "n0", "n0", clock=self.clock, on_problem=self.problems.append)
        self.join = CopiedRuns(where / "joined", "j1", begin_s=0.0, clock=self.clock, on_problem=self.problems.append)
        self.worker = self.another_worker(1)
        self.to_worker: list[Published] = []
        self.to_join: list[Published] = []
        self.said: list[Beat] = []

    def clock(self) -> float:
        return self.now

    def another_worker(self, epoch: int) -> RelayedNode:
        return RelayedNode(
            self.where / f"w{epoch}", "n0", epoch=epoch, worker=f"w{epoch}", kinds=frozenset(), clock=self.clock,
            on_problem=self.problems.append, is_signed=False,
        )  # fmt: skip

    def turn(self, *, hears_join: bool = True, hears_node: bool = True, number: int = 1) -> None:
        """Have all speak, and publish."""
        for _ in range(number):
            self.now += BEAT_S
            if hears_node:
                self.ship.discover()
                for beat in self.ship.beats():
                    answer = self.worker.take_beat(beat, is_drained=True)
                    if answer is not None:
                        self.ship.take_answer(answer)
                for published in self.ship.next():
                    self.to_worker.append(published)
                    assert isinstance(published, SpoolChunk)
                    self.worker.take_chunk(published)
                self.worker.release()
            if hears_join:
                self.tell_join()

    def tell_join(self) -> None:
        for beat in self.worker.beats(blocked=""):
            self.said.append(beat)
            answer = self.join.take_beat(beat, is_drained=True)
            if answer is not None:
                self.worker.take_answer(answer, has_signature=False)
        for published in self.worker.next():
            self.to_join.append(published)
            for one in unseal_published(seal(published)):
                self.join.take(one)
        self.join.release()

    def folders(self) -> list[Path]:
        return sorted((self.run.directory / "spool").iterdir())

    def committed(self) -> list[tuple[int, int]]:
        """Return what the node believes to be committed."""
        return [read_ack(folder) for folder in self.folders()]

    def commit(self) -> tuple[int, int]:
        """Have the join commit all but the end of each spool; returns how far."""
        place = (list_files(self.folders()[0])[-2], 300)
        for folder in self.folders():
            write_ack(self.where / "joined" / "run" / "spool" / folder.name, *place)
        return place

    def is_whole(self) -> bool:
        joined = self.where / "joined" / "run"
        return all(
            (joined / path.relative_to(self.run.directory)).stat().st_size == path.stat().st_size
            for path in self.run.directory.rglob("*.spool")
            if (joined / path.relative_to(self.run.directory)).exists()
        )


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def test_a_node_goes_on_nowhere_before_the_join_has_spoken_and_deletes_what_it_alone_commits(chain: Chain) -> None:
    chain.turn(hears_join=False, number=20)
    assert not chain.to_worker
    chain.turn(number=8)
    assert chain.is_whole() and chain.to_join and chain.committed() == [(0, 0)] * 4
    assert chain.ship.is_held is False, "rows are not committed, and lie here and at the node alone"

    place = chain.commit()
    chain.turn(number=2)
    assert chain.committed() == [place] * 4 and not chain.problems
    copies = chain.where / "w1" / "n0" / "run" / "spool"
    assert [min(list_files(copies / folder.name)) for folder in chain.folders()] == [place[0]] * 4, "the rest is deleted"


def test_the_join_waits_for_a_node_that_the_worker_does_not_hear(chain: Chain) -> None:
    chain.turn(number=8)
    seen = dict(chain.join._runs["run"].heard._seen_until)
    num_said = len(chain.said)
    chain.turn(hears_node=False, number=8)
    assert chain.join._runs["run"].heard._seen_until == seen and len(chain.said) == num_said

    # What it said before it is worth no more though the worker has heard of the join since.
    looked, late = chain.now, [next(chain.ship.beats()), next(chain.ship.beats())]
    chain.run.write(1)
    for beat in late:
        chain.now += BEAT_S
        chain.worker.take_beat(beat, is_drained=True)
        chain.tell_join()
    assert seen["n0"] <= chain.join._runs["run"].heard._seen_until["n0"] <= looked
    assert not chain.join.arrivals("run").on_the_way
    chain.turn()
    assert chain.join.arrivals("run").on_the_way == {folder.name for folder in chain.folders()}
    chain.turn(number=8)
    assert chain.is_whole() and not chain.join.arrivals("run").on_the_way and not chain.problems


def test_a_worker_that_takes_over_begins_where_the_join_has_committed(chain: Chain) -> None:
    chain.turn(number=8)
    place = chain.commit()
    chain.turn(number=2)
    chain.to_worker.clear()
    chain.worker = chain.another_worker(2)
    chain.run.write(4)
    chain.turn(number=10)
    sent = {one.file for one in chain.to_worker if isinstance(one, SpoolChunk)}
    assert min(sent) == f"{place[0]:06d}.spool"
    assert chain.is_whole() and not chain.problems
    numbers = {one.number for one in chain.to_join if isinstance(one, DigestPiece)}
    assert {number >> 32 for number in numbers} == {1, 2}

    # One that was left behind is refused, and hears by whom.
    former = msgspec.structs.replace(chain.said[-1], epoch=1, number=("former", 1))
    answer = chain.join.take_beat(former, is_drained=True)
    assert answer is not None and (answer.epoch, answer.spools) == (2, {})
    assert "node n0: a worker of epoch 1 speaks of it, and a worker of epoch 2 has it: that is refused" in chain.problems
    before = chain.join.counts["refused"]
    chain.join.take_chunk(msgspec.structs.replace(next(iter(_chunks(chain.to_join))), epoch=1))
    assert chain.join.counts["refused"] == before + 1


def test_rows_that_are_asked_for_before_they_are_copied_are_not_gone(chain: Chain) -> None:
    chain.turn(number=8)
    away = chain.join._runs["run"].copies
    wanted = [
        AwayFrame(folder, index, offset, size, b"", 0)
        for folder, copy in away.items()
        for (index, offset), size in copy.away.items()
    ]
    chain.worker = chain.another_worker(2)
    chain.join.rows_of("run")._wanted["n0"].update(dict.fromkeys(wanted, False))
    chain.to_join.clear()
    chain.turn(number=16)
    chain.turn(number=16)

    assert wanted and not any(chain.join.rows_of("run")._wanted["n0"][one] for one in wanted)
    assert not [key for copy in away.values() for key in copy.away]


def test_a_join_that_lacks_what_is_committed_has_the_copies_made_anew(chain: Chain) -> None:
    chain.turn(number=8)
    chain.commit()
    chain.turn(number=2)
    chain.worker = chain.another_worker(2)
    chain.turn(number=4)
    assert not chain.worker.is_outdated
    chain.join = CopiedRuns(chain.where / "other", "j2", begin_s=0.0, clock=chain.clock)
    chain.turn(number=2)
    assert chain.worker.is_outdated


def test_a_worker_hears_from_the_join_that_a_newer_epoch_has_its_partition(tmp_path: Path) -> None:
    outdone: list[tuple[int, int]] = []
    nodes = RelayedNodes(
        tmp_path, "w1", kinds=frozenset(), is_held=lambda partition, epoch: True,
        on_outdone=lambda partition, epoch: outdone.append((partition, epoch)),
    )  # fmt: skip
    nodes.begin("n0", 3)
    answer = Answer(VERSION, "j1", 1, "n0", "run", {}, epoch=3)
    for one in (answer, msgspec.structs.replace(answer, epoch=7), msgspec.structs.replace(answer, node="n1", epoch=7)):
        nodes.take_answer(one)
    assert outdone == [(partition_of("n0"), 7)]


def test_a_node_that_is_dead_leaves_room_for_the_others_of_its_partition(chain: Chain) -> None:
    chain.turn(number=4)
    chain.worker.num_ahead_bytes = MAX_AHEAD_BYTES
    assert not chain.worker.has_room()
    chain.now += SILENT_S
    assert chain.worker.has_room()
    num_chunks = chain.worker.copies.counts["chunks"]
    chain.worker.take_chunk(next(one for one in chain.to_worker if isinstance(one, SpoolChunk)))
    assert chain.worker.copies.counts["chunks"] == num_chunks, "what comes of it all the same"


def test_who_spoke_last_of_a_node_is_forgotten_when_it_is_silent_or_leaves() -> None:
    now = [100.0]
    epochs = WorkerEpochs(lambda: now[0])

    assert not epochs.is_former("n0", 0) and not epochs.is_former("n0", 3)
    assert epochs.is_former("n0", 2) and epochs.is_former("n0", 0) and not epochs.is_former("n1", 0)
    now[0] += SILENT_S
    assert not epochs.is_former("n0", 1) and epochs.newest("n0") == 1
    epochs.forget("n0")
    assert not epochs.is_former("n0", 0) and epochs.newest("n0") == 0


@pytest.mark.parametrize("num_torn", [1, 50, HEADER_BYTES, 150])
def test_a_frame_whose_beginning_came_as_it_is_has_the_header_of_one_without_rows(tmp_path: Path, num_torn: int) -> None:
    run = small_run(tmp_path / "run")
    run.write(2)
    folder = run.folder(0)
    frames, data, name = list(frames_of_rows(folder, (0, 0))), (folder / file_name(0)).read_bytes(), file_name(0)
    begin, copy = frames[0].offset, SpoolCopy(tmp_path / folder.name)

    def take(offset: int, data: bytes, away: tuple[tuple[int, int], ...] = ()) -> int:
        after = FilePlace(name, offset) if offset else FilePlace()
        return copy.take(SpoolChunk(VERSION, "n0", "run", folder.name, name, offset, after, 0, data, away))

    # A writer had begun the frame when it was read first; who comes after read it when it was whole.
    assert (take(0, data[:begin]), take(begin, data[begin : begin + num_torn])) == (begin, num_torn)
    thin = without_payloads(SpoolPiece(name, begin, FilePlace(name, begin), 0, data[begin:]))
    assert take(begin, *thin) == len(data) - begin - num_torn
    assert copy.place == FilePlace(name, len(data)) and len(copy.away) == len(frames)
    for one in frames:
        assert copy.fill(0, one.offset, data[one.offset : one.offset + one.num_bytes])
    assert (copy.folder / name).read_bytes() == data


def _chunks(published: list[Published]) -> list[SpoolChunk]:
    return [one for one in published if isinstance(one, SpoolChunk)]


def test_of_ranks_that_do_nothing_but_beat_nothing_is_behind(chain: Chain) -> None:
    chain.turn(number=8)
    follower = RunFollower(chain.where / "joined" / "run", arrivals=lambda: chain.join.arrivals("run"))
    tracker, spoke, beats_at, num_beats = LivenessTracker(), chain.now, chain.now, 0
    begun = chain.now
    while chain.now < begun + 60.0:
        chain.now += 0.05
        if chain.now >= beats_at:
            beats_at += 1.0
            for rank in range(4):
                chain.run.report(rank, Heartbeat(step=8, call_id=5, activity="train"), 8)
        if chain.now - spoke >= chain.ship.pause_s:
            spoke = chain.now
            for beat in chain.ship.beats():
                answer = chain.worker.take_beat(beat, is_drained=True)
                if answer is not None:
                    chain.ship.take_answer(answer)
        for published in chain.ship.next():
            assert isinstance(published, SpoolChunk)
            chain.worker.take_chunk(published)
        chain.worker.release()
        chain.tell_join()
        records = follower.poll()
        num_beats += sum(isinstance(one.message, Heartbeat) for one in records)
        tracker.receive(records)
        tracker.look(chain.now, follower.behind, is_caught_up=not follower.behind)
    facts = tracker.facts(-1, lambda incarnation: None)
    assert num_beats > 4 * 45 and not chain.problems
    assert min(tracker.now - one.moved_at for one in facts) > 50, "they hang"
    assert max(tracker.now - one.received_at for one in facts) < BACK_S
