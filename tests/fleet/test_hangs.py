"""A hang through a fleet: ranks that do nothing but beat are heard, and nobody takes what is on its way for progress."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.heard_nodes import SILENT_S, UNHEARD_S
from sentinel.fleet.node_runs import BUSY_SHARE, HEARTBEATS_S, MAX_PACE_S, TOLD_S, NodeRuns
from sentinel.fleet.run_copies import WAITING_S
from sentinel.fleet.sealed import Answer, Beat, SpoolChunk, seal, unseal
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.liveness import BACK_S, LivenessTracker
from sentinel.messages import Heartbeat
from sentinel.testing import SyntheticRun

from ..support.fleet_parts import Join, Shipper, go_on, split
from ..support.nats_broker import NatsBroker
from ..support.serving import loaded_packs, small_run
from ..support.waiting import wait_for

TURN_S, LOOK_S = 0.05, 0.25
LONGEST_S = 2 * MAX_PACE_S + 1.0
"""Until a heartbeat is read: it waits to be published, and then until each node has spoken."""


class BeatingFleet:
    """Nodes of one rank each that speak at times of their own, a join, and who follows its copies; on one clock."""

    def __init__(self, where: Path, num_nodes: int, pace_s: float) -> None:
        self.now, self._pace_s = 100.0, pace_s
        rng = random.Random(num_nodes)
        self.run = SyntheticRun(where / "whole" / "run", dp=num_nodes, layers=1, d_model=8, elements=8)
        self.nodes = [NodeRuns(path, path.name, clock=lambda: self.now) for path in self._directories(where, num_nodes)]
        (where / "joined").mkdir()
        self.copies = CopiedRuns(where / "joined", "j1", begin_s=0.0, clock=lambda: self.now)
        self.follower = RunFollower(where / "joined" / "run", arrivals=lambda: self.copies.arrivals("run"))
        self.tracker = LivenessTracker()
        self._spoke = [self.now + rng.random() for _ in self.nodes]
        self._beats_at = [self.now + rng.random() for _ in self.nodes]
        self._looks_at = self.now
        self.loses_chunks = self.refuses = False
        self.stopped: set[int] = set()
        """Nodes that do nothing while their ranks go on."""
        self.said: list[Beat] = []
        self.written: dict[int, float] = {}
        """Rank -> when it wrote its newest heartbeat that was not read."""
        self.delays: list[float] = []
        """Seconds from a heartbeat until it was read."""
        for node in self.nodes:
            node.discover()
        self.run.write(3)

    def _directories(self, where: Path, num_nodes: int) -> list[Path]:
        found = [where / f"node{number}" for number in range(num_nodes)]
        for folder in (self.run.directory / "spool").iterdir():
            there = found[int(folder.name[1:6])] / "run" / "spool"
            there.mkdir(parents=True)
            (there / folder.name).symlink_to(folder)
        return found

    def hang(self, seconds: float) -> None:
        """Have all ranks stand where they stand, and beat."""
        until = self.now + seconds
        while self.now < until:
            self.now += TURN_S
            for rank in range(len(self.nodes)):
                if self.now >= self._beats_at[rank]:
                    self._beats_at[rank] += 1.0
                    self.run.report(rank, Heartbeat(step=3, call_id=5, activity="train"), 3)
                    self.written.setdefault(rank, self.now)
            for number, node in enumerate(self.nodes):
                if number not in self.stopped:
                    self._speak(number, node)
            self.copies.release()
            if self.now >= self._looks_at:
                self._looks_at += LOOK_S
                self._look()

    def _speak(self, number: int, node: NodeRuns) -> None:
        for one in list(node.next()):
            if self.refuses:
                node.take_back(one)
            elif not (self.loses_chunks and isinstance(one, SpoolChunk)):
                self.copies.take(one)
        if self.now - self._spoke[number] < node.pause_s:
            return
        self._spoke[number] = self.now
        for beat in node.beats():
            self.said.append(beat)
            answer = self.copies.take_beat(unseal(seal(beat), Beat), is_drained=False)
            if answer is not None:
                answer = msgspec.structs.replace(answer, pace_s=self._pace_s)
                node.take_answer(unseal(seal(answer), Answer))

    def _look(self) -> None:
        records = self.follower.poll()
        for one in records:
            if isinstance(one.message, Heartbeat) and one.incarnation.rank in self.written:
                self.delays.append(self.now - self.written.pop(one.incarnation.rank))
        unheard = self.follower.unheard
        self.tracker.receive(records, unheard)
        is_caught_up = not self.follower.behind
        self.tracker.look(
            self.now, self.follower.behind, is_caught_up=is_caught_up, unheard=unheard, followed=self.follower.followed
        )

    def waiting_s(self) -> list[float]:
        """Return for how long what waits has waited, as each node says of its spools."""
        return [one.waiting_s for node in self.nodes for beat in node.beats(is_ending=True) for one in beat.spools.values()]

    def stands_s(self) -> list[float]:
        """Return for how long each rank has not moved, by what is known of it."""
        facts = self.tracker.facts(-1, lambda incarnation: None)
        return [self.tracker.now - one.moved_at for one in facts]

    def silent_s(self) -> list[float]:
        """Return for how long nothing was heard of each rank."""
        facts = self.tracker.facts(-1, lambda incarnation: None)
        return [self.tracker.now - one.received_at for one in facts]


@pytest.mark.parametrize("pace_s", [HEARTBEATS_S, MAX_PACE_S])
@pytest.mark.parametrize("num_nodes", [1, 2, 12])
def test_ranks_that_beat_and_stand_still_are_known_to(tmp_path: Path, num_nodes: int, pace_s: float) -> None:
    fleet = BeatingFleet(tmp_path, num_nodes, pace_s)
    fleet.hang(10)
    fleet.delays.clear()
    fleet.hang(60)
    assert len(fleet.stands_s()) == num_nodes
    # The first steps are read when each node has spoken twice, as often as it speaks while it publishes.
    assert min(fleet.stands_s()) > 70 - LONGEST_S - 2 * MAX_PACE_S / BUSY_SHARE
    assert max(fleet.silent_s()) < BACK_S, "more would be taken for a rank that was stopped"
    assert len(fleet.delays) > 20 * num_nodes / LONGEST_S and max(fleet.delays) <= LONGEST_S
    # Nor do they wait for longer and longer, as if a node did not come after.
    assert 0 < max(fleet.waiting_s()) <= LONGEST_S + (TOLD_S if pace_s > HEARTBEATS_S else 0.0)


def test_of_ranks_whose_frames_do_not_come_nothing_is_said(tmp_path: Path) -> None:
    fleet = BeatingFleet(tmp_path, 3, HEARTBEATS_S)
    fleet.hang(10)
    fleet.loses_chunks = True
    for _ in range(12):
        fleet.hang(5)
        # Their heads are known, what lies before these is not here.
        assert max(fleet.silent_s()) < 2 * BACK_S + LONGEST_S and max(fleet.stands_s()) < 10 + 2 * BACK_S + LONGEST_S
    assert fleet.follower.behind and 50 < min(fleet.waiting_s()) <= 65
    fleet.loses_chunks = False
    fleet.hang(30)
    assert max(fleet.waiting_s()) <= LONGEST_S
    assert max(fleet.silent_s()) < BACK_S and not fleet.follower.behind
    assert 30 - LONGEST_S - BACK_S < min(fleet.stands_s()) < 90


@pytest.mark.parametrize("pace_s", [HEARTBEATS_S, MAX_PACE_S])
@pytest.mark.parametrize("trains", [True, False], ids=["training", "standing still"])
@pytest.mark.parametrize("parts", range(4))
def test_the_ranks_of_a_node_that_fell_silent_are_silent_from_then_on_and_no_others(
    tmp_path: Path, parts: int, trains: bool, pace_s: float
) -> None:
    fleet = BeatingFleet(tmp_path, 3, pace_s)
    fleet.hang(10 + parts / 4)
    # The last that it sent waits for itself, or more is known to exist than came.
    fleet.run.write(1)
    fleet.hang(parts / 8)
    fleet.stopped.add(0)
    for seconds in range(1, 70):
        if trains:
            fleet.run.write(1)
        fleet.hang(1)
        of_its_own, *others = fleet.silent_s()
        assert seconds - LONGEST_S < of_its_own <= seconds + LONGEST_S, seconds
        assert max(others) <= WAITING_S + BACK_S + LONGEST_S < SILENT_S, seconds
        unheard = {one.node for one in fleet.follower.unheard.values()}
        assert unheard == ({"node0"} if seconds > UNHEARD_S + LONGEST_S else unheard & {"node0"})
    fleet.stopped.clear()
    fleet.hang(30)
    assert max(fleet.silent_s()) < BACK_S and not fleet.follower.unheard


def test_ranks_that_were_begun_again_are_not_silent_while_what_they_write_waits_for_a_node_that_is_gone(
    tmp_path: Path,
) -> None:
    fleet = BeatingFleet(tmp_path, 3, HEARTBEATS_S)
    fleet.hang(5.0)
    fleet.stopped.add(2)
    former = set(fleet.follower.incarnations)
    fleet.run.restart(3, attempt=1)
    for rank in range(3):
        # The third rank is begun again on the second machine: its own is lost.
        there = tmp_path / f"node{min(rank, 1)}" / "run" / "spool" / fleet.run.folder(rank).name
        there.symlink_to(fleet.run.folder(rank))
    for node in fleet.nodes[:2]:
        node.discover()

    longest_s = 0.0
    while not set(fleet.follower.incarnations) > former:
        fleet.hang(LOOK_S)
        longest_s = max(longest_s, *map(fleet.tracker.silence_s, former))
    assert len(fleet.follower.incarnations) == 6
    assert longest_s < SILENT_S / 2


def test_what_no_broker_takes_waits(tmp_path: Path) -> None:
    fleet = BeatingFleet(tmp_path, 2, HEARTBEATS_S)
    fleet.hang(10)
    fleet.refuses = True
    for seconds in (10, 20, 30, 40):
        fleet.hang(10)
        assert seconds - LONGEST_S < min(fleet.waiting_s()) <= max(fleet.waiting_s()) <= seconds + LONGEST_S
    fleet.refuses = False
    fleet.hang(10)
    assert max(fleet.waiting_s()) <= LONGEST_S


def test_what_is_not_heartbeats_is_waited_for(tmp_path: Path) -> None:
    fleet = BeatingFleet(tmp_path, 2, MAX_PACE_S)
    fleet.hang(10)
    fleet.run.write_rank(1, 3)
    node = fleet.nodes[1]
    for beat in node.beats():
        fleet.copies.take_beat(unseal(seal(beat), Beat), is_drained=False)
    fleet.follower.poll()
    assert fleet.follower.behind == {fleet.run.incarnation(1)}, "it is known to have ended a step that is not here"
    # A heartbeat behind a step that waits changes nothing of that.
    chunks = list(node.next())
    fleet.run.report(1, Heartbeat(step=4, call_id=0, activity="train"), 4)
    for one in (*chunks, *node.next()):
        fleet.copies.take(one)
    for beat in node.beats():
        fleet.copies.take_beat(unseal(seal(beat), Beat), is_drained=False)
    fleet.follower.poll()
    assert fleet.follower.behind == {fleet.run.incarnation(1)}


def test_of_ranks_that_do_nothing_but_beat_a_node_that_is_asked_to_says_little(tmp_path: Path) -> None:
    fleet = BeatingFleet(tmp_path, 2, MAX_PACE_S)
    fleet.hang(20)
    fleet.said.clear()
    fleet.hang(24)
    counts = [(len(beat.spools), beat.num_quiet) for beat in fleet.said]
    assert set(counts) == {(1, 0), (0, 1)} and counts.count((1, 0)) <= 2 * (24 / TOLD_S + 1)
    # The end of a step is said, until the join has it.
    fleet.run.write(1)
    fleet.said.clear()
    fleet.hang(6)
    assert [len(beat.spools) for beat in fleet.said].count(1) >= 4
    assert not fleet.follower.behind
    # Another join hears of all, and waits until it has.
    fleet.run.write_rank(1, 4)
    fleet.copies = CopiedRuns(tmp_path / "joined", "j2", begin_s=0.0, clock=lambda: fleet.now)
    assert len(fleet.copies.arrivals("run").on_the_way) == 2
    fleet.said.clear()
    fleet.hang(10)
    assert not fleet.copies.arrivals("run").on_the_way
    assert {beat.node for beat in fleet.said[:5] if not beat.num_quiet} == {"node0", "node1"}


HANG_PACK = """
rules:
  - name: stale-rank
    detector: StaleRank
    severity: critical
    args: {stale_after_s: 6, hang_after_s: 6, quiet_after_s: 6}
"""


@pytest.mark.server
@pytest.mark.slow
def test_a_hang_is_told_by_a_join(tmp_path: Path, broker: NatsBroker) -> None:
    pack = tmp_path / "hang.yaml"
    pack.write_text(HANG_PACK)
    run = small_run(tmp_path / "whole" / "run", dp=2)
    run.write(3)
    nodes = split(run.directory, tmp_path, 2)
    join = Join(tmp_path / "joined", broker.url, packs=loaded_packs(pack))
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    num_beats = 0

    def is_told() -> bool:
        nonlocal num_beats
        num_beats += 1
        if num_beats % 10 == 0:
            for rank in range(run.num_ranks):
                run.report(rank, Heartbeat(step=3, call_id=5, activity="train", module="head", phase="forward"), 3)
            go_on(run, nodes)
        join.turn()
        return '"stale-rank"' in "".join(path.read_text() for path in (tmp_path / "joined").rglob("*.json*"))

    wait_for(is_told, "a rank that hangs", timeout_s=60.0, interval_s=0.05)
    # Too soon would be as wrong: what is on its way is no standing still.
    assert num_beats > 6 / 0.06 / 2
    for one in shippers:
        one.drop()
    join.drop()
