"""The pulses of ranks at a join: there by the time that one asks when a rank ended, and not written while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.sealed import Answer, Beat, seal, unseal
from sentinel.messages import Heartbeat
from sentinel.wire.pulse import NAME, PulseWriter, read_pulse

from ..support.serving import small_run


class PulsingNode:
    """A node of four ranks, and a join, on one clock."""

    def __init__(self, where: Path) -> None:
        self.now = 100.0
        self.run = small_run(where / "a" / "run")
        self.run.write(2)
        self.node = NodeRuns(where / "a", "a", clock=lambda: self.now)
        (where / "joined").mkdir()
        self.copies = CopiedRuns(where / "joined", "j1", begin_s=0.0, clock=lambda: self.now)
        self._spool = where / "joined" / "run" / "spool"
        self._pulses = [PulseWriter(self.run.folder(rank)) for rank in range(4)]
        for _ in range(3):
            self.talk()

    def live(self, rank: int, wall_ns: int, *, beats: bool = True) -> None:
        """Have a rank set its pulse, and write a heartbeat."""
        self._pulses[rank].beat(wall_ns)
        if beats:
            self.run.report(rank, Heartbeat(step=2, call_id=0, activity="train"))

    def talk(self, *, is_leaving: bool = False, seconds: float = 1.0) -> None:
        """Have the node publish and speak, and hear the answer, some seconds later."""
        self.now += seconds
        self.node.discover()
        for one in self.node.next():
            self.copies.take(one)
        for beat in self.node.beats(is_leaving=is_leaving):
            answer = self.copies.take_beat(unseal(seal(beat), Beat), is_drained=True)
            assert answer is not None
            self.node.take_answer(unseal(seal(answer), Answer))
        self.copies.release()

    def known(self, rank: int) -> int:
        """Return the pulse that the join has on its disk."""
        return read_pulse(self._spool / self.run.folder(rank).name)

    def written(self) -> int:
        """Return how many pulses were ever written."""
        return sum((folder / NAME).exists() for folder in self._spool.iterdir())


@pytest.fixture
def node(tmp_path: Path) -> PulsingNode:
    return PulsingNode(tmp_path)


def test_of_ranks_that_go_on_no_pulse_is_written(node: PulsingNode) -> None:
    for turn in range(20):
        for rank in range(4):
            node.live(rank, 1_000 + turn)
        node.talk()
    assert node.written() == 0


def test_the_last_pulse_of_a_rank_that_ends_is_there_before_it_is_asked_for(node: PulsingNode) -> None:
    for turn in range(5):
        for rank in range(4):
            node.live(rank, 1_000 + turn)
        node.talk()
    # Behind its last heartbeat it goes on for a while, and is killed.
    node.live(2, 2_000, beats=False)
    for rank in (0, 1, 3):
        node.live(rank, 3_000)
    # Nobody is asked about a rank that was heard less than 2.5 s ago.
    for _ in range(3):
        node.talk()
    assert node.known(2) == 2_000
    node.live(2, 2_500, beats=False)
    node.talk()
    assert node.known(2) == 2_500, "it lived, and wrote no frames"


def test_while_a_node_speaks_often_a_pulse_that_rises_between_frames_is_not_written(node: PulsingNode) -> None:
    for turn in range(80):
        for rank in range(4):
            node.live(rank, 1_000 + turn, beats=turn % 4 == 0)
        node.talk(seconds=0.25)
    assert node.written() == 0


@pytest.mark.parametrize("leaves", [False, True])
def test_of_a_node_that_is_silent_or_leaves_all_is_written(node: PulsingNode, leaves: bool) -> None:
    for turn in range(3):
        for rank in range(4):
            node.live(rank, 1_000 + turn)
        node.talk(is_leaving=leaves and turn == 2)
    if not leaves:
        assert node.written() == 0
    node.now += 4.0
    node.copies.release()
    assert [node.known(rank) for rank in range(4)] == [1_002] * 4
