"""Ends of steps are read as they come while ranks are in step, and none of it makes anybody late who is not."""

from __future__ import annotations

import errno
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from sentinel.decision import Decision, Tick
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.heard_nodes import SILENT_S
from sentinel.fleet.lockstep import QUIET_S, Lockstep
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.sealed import Answer, Beat, Published, SpoolChunk, seal, unseal
from sentinel.fleet.waiting_chunks import LOOK_S
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.steps import StepAssembler
from sentinel.messages import Heartbeat
from sentinel.testing import SyntheticRun

NODES = 3
TURN_S = 0.1


class SlowFleet:
    """Nodes of one rank each, whose ranks wait for each other at each step; what nodes send and say is long on its way."""

    def __init__(self, where: Path, seed: int = 0) -> None:
        self.now, self.rng = 100.0, random.Random(seed)
        self.run = SyntheticRun(where / "whole" / "run", dp=NODES, layers=1, d_model=8, elements=8)
        self.paths = [where / f"node{number}" for number in range(NODES)]
        (where / "joined").mkdir()
        self.copies = CopiedRuns(where / "joined", "j1", begin_s=0.0, clock=lambda: self.now)
        self.follower = RunFollower(where / "joined" / "run", arrivals=lambda: self.copies.arrivals("run"))
        self.assembler = StepAssembler("run", late_after_steps=1)
        self.flying: list[list[tuple[float, Published]]] = [[] for _ in self.paths]
        self.delay_s, self.says_s = 0.0, 0.25
        """Most seconds that chunks are on their way, and seconds between what nodes say."""
        self._said = [0.0] * NODES
        self.muted: set[int] = set()
        """Nodes that say nothing."""
        self.stuck: set[int] = set()
        """Nodes whose chunks do not come."""
        self.decisions: list[Decision] = []
        self.link()
        self.nodes = [NodeRuns(path, path.name, clock=lambda: self.now) for path in self.paths]

    def link(self) -> None:
        """Have each node see the spools of its rank."""
        for folder in (self.run.directory / "spool").iterdir():
            there = self.paths[int(folder.name[1:6])] / "run" / "spool"
            there.mkdir(parents=True, exist_ok=True)
            if not (there / folder.name).is_symlink():
                (there / folder.name).symlink_to(folder)

    def write(self, step: int, *ranks: int) -> None:
        for rank in ranks or range(NODES):
            self.run.write_rank(rank, step)

    def beat(self, step: int) -> None:
        for rank in range(NODES):
            self.run.report(rank, Heartbeat(step=step, call_id=0, activity="train"), step)

    def go(self, seconds: float) -> None:
        """Have nodes send and speak, and the join judge."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += TURN_S
            for number, node in enumerate(self.nodes):
                node.discover()
                arrives = max([self.now, *(at for at, _ in self.flying[number][-1:])])
                for one in node.next():
                    arrives += self.rng.random() * self.delay_s
                    self.flying[number].append((arrives, one))
                while self.flying[number] and self.flying[number][0][0] <= self.now and number not in self.stuck:
                    chunk = self.flying[number].pop(0)[1]
                    assert isinstance(chunk, SpoolChunk)
                    self.copies.take(unseal(seal(chunk), SpoolChunk))
                if self.now - self._said[number] >= self.says_s and number not in self.muted:
                    self._said[number] = self.now
                    for beat in node.beats():
                        answer = self.copies.take_beat(unseal(seal(beat), Beat), is_drained=False)
                        if answer is not None:
                            node.take_answer(unseal(seal(answer), Answer))
            self.copies.release()
            self.judge()

    def judge(self) -> None:
        settled = self.assembler.newest_step
        self.assembler.take(self.follower.poll(), self.now)
        for one in self.assembler.close(self.now, self.follower.behind, settled_step=settled):
            assert not isinstance(one, Tick) and one.decision is not None
            self.decisions.append(one.decision)

    @property
    def steps(self) -> list[int]:
        """The steps that were closed, in their order."""
        return [one.step for one in self.decisions]

    @property
    def whys(self) -> Counter[str]:
        return Counter(one.why for one in self.decisions)


def trained(fleet: SlowFleet, num_steps: int, *, restarts: bool) -> None:
    """Have ranks train that wait for each other, each as long as it pleases."""
    step, attempt = 0, 0
    for _ in range(num_steps):
        order = fleet.rng.sample(range(NODES), NODES)
        for rank in order:
            fleet.write(step, rank)
            fleet.go(fleet.rng.choice((0.0, 0.0, 0.1, 0.4)))
        if fleet.rng.random() < 0.3:
            fleet.beat(step)
        if fleet.rng.random() < 0.2:
            fleet.muted = {fleet.rng.randrange(NODES)}
        elif fleet.rng.random() < 0.3:
            fleet.muted = set()
        step += 1
        if restarts and fleet.rng.random() < 0.08:
            attempt += 1
            step = max(0, step - fleet.rng.randrange(3))
            fleet.run.restart(step, attempt=attempt)
            fleet.link()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_late_whatever_is_on_its_way(tmp_path: Path, seed: int, restarts: bool) -> None:
    fleet = SlowFleet(tmp_path, seed)
    fleet.go(1.0)
    fleet.delay_s, fleet.says_s = fleet.rng.choice((0.05, 0.5, 1.5)), fleet.rng.choice((0.25, 2.0))
    trained(fleet, 40, restarts=restarts)
    fleet.muted = set()
    fleet.go(SILENT_S + 20)
    assert fleet.whys.keys() <= ({"complete", "superseded"} if restarts else {"complete"})
    if not restarts:
        assert fleet.steps == list(range(40))


def begun(where: Path) -> SlowFleet:
    """Return a fleet whose ranks have ended steps 0 to 2, all of them judged."""
    fleet = SlowFleet(where)
    for step in range(3):
        fleet.write(step)
        fleet.go(1.0)
    assert fleet.steps == [0, 1, 2]
    return fleet


def test_a_step_is_judged_though_nobody_speaks(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.muted = set(range(NODES))
    for step in range(3, 8):
        fleet.write(step)
        fleet.beat(step)
        fleet.go(TURN_S)
        assert fleet.steps[-1] == step
    assert set(fleet.whys) == {"complete"}


def test_a_node_that_comes_back_is_waited_for_at_once(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    run = fleet.copies._runs["run"]
    while run.waiting._look_at - fleet.now > TURN_S:
        fleet.go(TURN_S)
    for beat in fleet.nodes[2].beats(is_leaving=True):
        fleet.copies.take_beat(beat, is_drained=True)
    fleet.muted = {2}
    fleet.go(0.5)
    fleet.nodes[2] = NodeRuns(fleet.paths[2], "node2", clock=lambda: fleet.now)
    fleet.muted = set()
    fleet.go(1.0)
    fleet.write(3, 0, 1)
    fleet.go(0.6)
    fleet.muted = fleet.stuck = {2}
    fleet.write(3, 2)
    for step in (4, 5, 6, 7):
        fleet.write(step)
        fleet.go(0.4)
    fleet.muted = fleet.stuck = set()
    fleet.go(3.0)
    assert fleet.steps == list(range(8)) and set(fleet.whys) == {"complete"}


def test_what_was_read_out_of_turn_is_let_go_of(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.write(3)
    again = [one for node in fleet.nodes for one in node.next()]
    for one in again:
        fleet.copies.take(one)
    fleet.go(1.0)
    fleet.muted = set(range(NODES))
    fleet.copies.take(again[0])
    run = fleet.copies._runs["run"]
    for step in range(4, 14):
        fleet.write(step)
        came = [one for node in fleet.nodes for one in node.next()]
        fleet.run.write_rank(2, step + 1, end=False)
        for one in [*came, *fleet.nodes[2].next()]:
            fleet.copies.take(one)
        fleet.go(TURN_S)
    assert fleet.steps[-1] == 13
    assert sum(len(one.chunk.data) for one in run.waiting._all) == fleet.copies.held_bytes


def test_heartbeats_wait_for_all_to_speak(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.muted = set(range(NODES))
    fleet.go(0.5)
    fleet.beat(2)
    fleet.go(3.0)
    assert fleet.copies.held_bytes > 0
    fleet.muted = set()
    fleet.go(1.0)
    assert fleet.copies.held_bytes == 0


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control: nobody looks at the others"])
def test_who_runs_ahead_of_a_node_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_control: bool) -> None:
    if is_control:
        monkeypatch.setattr(Lockstep, "is_kept", True)
    fleet = begun(tmp_path)
    fleet.muted, fleet.stuck = {2}, {2}
    fleet.write(3)
    fleet.write(4, 0, 1)
    fleet.go(5.0)
    if is_control:
        assert "late_steps" in fleet.whys
        return
    assert fleet.steps == [0, 1, 2]
    fleet.run.write_rank(2, 4)
    fleet.stuck = set()
    fleet.go(0.5)
    assert fleet.steps == [0, 1, 2, 3, 4] and set(fleet.whys) == {"complete"}


@pytest.mark.parametrize(("late_after_steps", "every"), [(1, 1), (2, 5)], ids=["strict", "each fifth step is recorded"])
def test_who_has_rows_of_the_step_after_the_next_waits(tmp_path: Path, late_after_steps: int, every: int) -> None:
    fleet = SlowFleet(tmp_path)
    fleet.assembler = StepAssembler("run", late_after_steps=late_after_steps)
    for number in range(3):
        fleet.write(number * every)
        fleet.go(1.0)
    fleet.muted, fleet.stuck = {2}, {2}
    fleet.write(3 * every)
    for rank in (0, 1):
        fleet.run.write_rank(rank, 4 * every, end=False)
    fleet.go(3.0)
    fleet.muted, fleet.stuck = set(), set()
    fleet.go(2.0)
    assert fleet.steps == [0, every, 2 * every, 3 * every] and set(fleet.whys) == {"complete"}


def test_an_end_of_which_a_part_is_here_is_none(tmp_path: Path) -> None:
    fleet = SlowFleet(tmp_path)
    for step in (0, 5, 10):
        fleet.write(step)
        fleet.go(1.0)
    fleet.muted = fleet.stuck = {2}
    fleet.write(15)
    (chunk,) = fleet.nodes[2].next()
    assert isinstance(chunk, SpoolChunk)
    fleet.copies.take(msgspec.structs.replace(chunk, data=chunk.data[:-10]))
    fleet.write(20, 0, 1)
    fleet.go(3.0)
    assert fleet.steps == [0, 5, 10]
    fleet.copies.take(msgspec.structs.replace(chunk, data=chunk.data[-10:], offset=chunk.offset + len(chunk.data) - 10))
    fleet.go(TURN_S)
    fleet.muted = fleet.stuck = set()
    fleet.run.write_rank(2, 20)
    fleet.go(2.0)
    assert fleet.steps == [0, 5, 10, 15, 20] and set(fleet.whys) == {"complete"}


def test_who_ran_ahead_and_left_waits_too(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.muted, fleet.stuck = {2}, {2}
    for step in range(3, 9):
        fleet.write(step)
    fleet.run.end()
    fleet.go(LOOK_S + 5.0)
    assert fleet.steps == [0, 1, 2]
    fleet.muted, fleet.stuck = set(), set()
    fleet.go(1.0)
    assert fleet.steps == list(range(9)) and set(fleet.whys) == {"complete"}


def test_a_rank_that_is_gone_keeps_others_from_it_for_a_minute(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.run.kill(2, in_frame=False)
    for step in range(3, 5):
        fleet.write(step)
        fleet.go(1.0)
    fleet.go(QUIET_S + LOOK_S + 1)
    fleet.write(5)
    fleet.go(1.0)
    fleet.muted = {0, 1, 2}
    before = len(fleet.follower.incarnations[fleet.run.incarnation(0)].layouts), fleet.copies.held_bytes
    fleet.write(6)
    fleet.go(TURN_S)
    assert fleet.copies.held_bytes == before[1] == 0, "what is left of the ranks is in step"


def test_steps_that_go_back_wait_until_all_went_back(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.write(3)
    fleet.go(1.0)
    fleet.muted = {0, 1, 2}
    fleet.write(1, 0, 1)
    fleet.go(TURN_S)
    assert fleet.copies.held_bytes > 0, "the process is the same, and training is at a checkpoint again"
    fleet.write(1, 2)
    fleet.go(TURN_S)
    assert fleet.copies.held_bytes > 0
    fleet.muted = set()
    fleet.go(1.0)
    fleet.write(2)
    fleet.go(1.0)
    fleet.muted = {0, 1, 2}
    fleet.write(3)
    fleet.go(TURN_S)
    assert fleet.copies.held_bytes == 0


def test_who_went_back_alone_as_far_as_is_known_waits_for_the_others(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.write(3)
    fleet.go(1.0)
    fleet.muted, fleet.stuck = {2}, {2}
    for step in (2, 3, 4):
        fleet.write(step)
        fleet.go(0.5)
    fleet.write(5, 0, 1)
    fleet.go(5.0)
    assert fleet.steps == [0, 1, 2, 3], "of the third rank step 3 of before is here, and its node has not spoken since"
    fleet.muted, fleet.stuck = set(), set()
    fleet.go(2.0)
    fleet.write(5, 2)
    fleet.go(2.0)
    assert fleet.steps == [0, 1, 2, 3, 2, 3, 4, 5] and set(fleet.whys) == {"complete"}


def test_a_chunk_that_is_lost_is_waited_for(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.muted = set(range(NODES))
    fleet.write(3)
    lost = list(fleet.nodes[1].next())
    fleet.write(4)
    fleet.go(2.0)
    assert fleet.steps == [0, 1, 2]
    for chunk in lost:
        fleet.copies.take(chunk)
    fleet.go(TURN_S)
    assert fleet.steps[3:] in ([3], [3, 4])
    fleet.muted = set()
    fleet.go(5.0)
    fleet.muted = set(range(NODES))
    for step in (5, 6, 7):
        fleet.write(step)
        fleet.go(TURN_S)
    fleet.muted = set()
    fleet.go(1.0)
    assert fleet.steps == list(range(8)) and set(fleet.whys) == {"complete"}
    fleet.muted = set(range(NODES))
    fleet.write(8)
    fleet.go(TURN_S)
    assert fleet.steps[-1] == 8, "where it goes on is known again"


def test_an_end_that_the_disk_does_not_take_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = begun(tmp_path)
    fleet.muted, fleet.stuck = set(range(NODES)), {2}
    copy = fleet.copies._runs["run"].copies[fleet.run.folder(2).name]
    fleet.write(3)
    came = list(fleet.nodes[2].next())
    fleet.beat(3)
    for one in [*came, *fleet.nodes[2].next()]:
        fleet.copies.take(one)

    def refuse(_: SpoolChunk) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(copy, "take", refuse)
        fleet.go(TURN_S)
    for step in (4, 5, 6):
        fleet.write(step)
        fleet.go(0.5)
    assert fleet.steps == [0, 1, 2]
    fleet.muted = fleet.stuck = set()
    fleet.go(5.0)
    assert fleet.steps == list(range(7)) and set(fleet.whys) == {"complete"}


def test_bytes_that_are_no_frames_have_a_spool_wait_until_two_steps_have_ended_behind_them(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    (newest,) = (tmp_path / "node1" / "run" / "spool").glob("*/*.spool")
    with newest.open("ab") as file:
        file.write(b"\x5a" * 500)
    fleet.muted = set(range(NODES))
    fleet.write(3)
    fleet.go(1.0)
    assert fleet.steps == [0, 1, 2]
    fleet.muted = set()
    fleet.go(1.0)
    for step in (4, 5):
        fleet.write(step)
        fleet.go(1.0)
    fleet.muted = set(range(NODES))
    fleet.write(6)
    fleet.go(TURN_S)
    assert fleet.steps == list(range(7)) and set(fleet.whys) == {"complete"}


def test_a_rank_that_joins_is_waited_for_from_its_first_bytes_on(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.run.restart(3, attempt=1)
    fleet.link()
    fleet.go(0.5)
    fleet.muted, fleet.stuck = {2}, {2}
    fleet.write(3)
    fleet.write(4, 0, 1)
    fleet.go(5.0)
    assert fleet.steps == [0, 1, 2]
    fleet.muted, fleet.stuck = set(), set()
    fleet.go(2.0)
    fleet.write(4, 2)
    fleet.go(2.0)
    assert fleet.steps == [0, 1, 2, 3, 4] and set(fleet.whys) == {"complete"}
