"""When each rank was heard and moved, by the time that was watched; and which ranks count."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from sentinel.decision import RankFacts
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.liveness import LivenessTracker
from sentinel.ingest.steps import StepAssembler
from sentinel.messages import Heartbeat
from sentinel.testing import SyntheticRun


class Tracked:
    """A tracker fed from a synthetic run, on a clock that the test moves."""

    def __init__(self, run: SyntheticRun) -> None:
        self.run, self.mono = run, 50.0
        self.follower = RunFollower(run.directory)
        self.assembler = StepAssembler("run")
        self.tracker = LivenessTracker()

    def look(self, seconds: float = 0.5, *, behind: Collection[bytes] = ()) -> dict[int, RankFacts]:
        self.mono += seconds
        records = self.follower.poll()
        self.assembler.take(records, self.mono)
        list(self.assembler.close(self.mono))
        self.tracker.look(self.mono, behind, is_caught_up=not records)
        self.tracker.receive(records)
        return {one.rank: one for one in self.tracker.facts(self.assembler.attempt, self.assembler.attempts.attempt_of)}

    def pass_time(self, seconds: float, **options: Collection[bytes]) -> dict[int, RankFacts]:
        for _ in range(round(seconds / 0.5) - 1):
            self.look(**options)
        return self.look(**options)


def beat(call_id: int = 5, step: int = 3, activity: str = "train") -> Heartbeat:
    return Heartbeat(step=step, call_id=call_id, activity=activity, module="layers.0.mlp", phase="forward", micro_step=2)


@pytest.fixture
def tracked(tmp_path: Path) -> Tracked:
    run = SyntheticRun(tmp_path / "run", dp=2, layers=1, d_model=16, elements=8)
    run.write(3)
    found = Tracked(run)
    found.pass_time(2)
    return found


def test_beats_without_progress_are_heard_and_do_not_move(tracked: Tracked) -> None:
    tracked.run.report(0, beat())
    first = tracked.look()[0]
    for _ in range(10):
        tracked.pass_time(1)
        tracked.run.report(0, beat())
    second = tracked.look()[0]
    tracked.run.report(0, beat(call_id=6))
    third = tracked.look()[0]

    assert (first.step, first.call_id, first.module, first.micro_step) == (3, 5, "layers.0.mlp", 2)
    assert second.received_at - first.received_at >= 10
    assert second.moved_at == first.moved_at
    assert third.moved_at == third.received_at == tracked.tracker.now


def test_a_wait_is_counted_from_its_first_beat_and_anew_after_each_move(tracked: Tracked) -> None:
    def wait(is_waiting: int, call_id: int = 5) -> RankFacts:
        tracked.run.report(0, msgspec.structs.replace(beat(call_id), is_waiting=is_waiting))
        return tracked.look()[0]

    assert (wait(0).waiting_at, wait(-1).waiting_at) == (None, None)
    first = wait(1)
    assert {wait(1).waiting_at for _ in range(20)} == {first.waiting_at} == {first.received_at}
    moved = wait(1, call_id=6)
    assert moved.waiting_at == moved.moved_at
    assert wait(0, call_id=6).waiting_at is None
    assert first.world_size == 2


def test_a_rank_whose_waits_end_moves_though_each_beat_finds_it_waiting(tracked: Tracked) -> None:
    def wait(num_waits: int) -> RankFacts:
        tracked.run.report(0, msgspec.structs.replace(beat(), is_waiting=1, num_waits=num_waits))
        return tracked.look()[0]

    first, second, third = wait(7), wait(8), wait(8)

    assert (second.moved_at, second.waiting_at) == (second.received_at, second.received_at)
    assert second.moved_at > first.moved_at
    assert (third.moved_at, third.waiting_at) == (second.moved_at, second.waiting_at)


def test_where_a_rank_stands_is_forgotten_when_it_moves(tracked: Tracked) -> None:
    tracked.run.report(0, msgspec.structs.replace(beat(), site="gpt/train.py:66 (main)"))
    stands = tracked.look()[0]
    tracked.run.report(0, beat(call_id=6))

    assert (stands.site, tracked.look()[0].site) == ("gpt/train.py:66 (main)", "")


def test_the_end_of_a_step_moves_a_rank(tracked: Tracked) -> None:
    tracked.run.write(1, skip=(1,))
    facts = tracked.look()

    assert (facts[0].step, facts[0].call_id, facts[0].has_stepped) == (4, 0, True)
    assert facts[0].moved_at == tracked.tracker.now > facts[1].moved_at


def test_time_that_nobody_watched_does_not_pass(tracked: Tracked) -> None:
    before = tracked.tracker.now
    tracked.look(3600.0)

    assert tracked.tracker.now - before == 1.0


def test_who_is_still_being_read_is_heard(tracked: Tracked) -> None:
    facts = tracked.pass_time(20, behind={tracked.run.incarnation(1)})

    assert facts[1].received_at == tracked.tracker.now
    assert tracked.tracker.now - facts[0].received_at >= 19


def test_who_is_behind_for_a_moment_now_and_then_stands_still_all_the_same(tracked: Tracked) -> None:
    tracked.run.report(0, beat())
    incarnation = tracked.look()[0].incarnation
    for turn in range(80):
        if turn % 4 == 0:
            tracked.run.report(0, beat())
        found = tracked.look(behind=[incarnation] if turn % 3 else [])[0]
    assert tracked.tracker.now - found.moved_at > 35


def test_only_what_comes_after_all_was_read_is_live(tracked: Tracked) -> None:
    assert not any(one.is_live for one in tracked.look().values())
    tracked.run.report(0, beat())

    assert {rank: one.is_live for rank, one in tracked.look().items()} == {0: True, 1: False}


def test_a_rank_that_comes_back_has_the_whole_limit_to_move(tracked: Tracked) -> None:
    tracked.run.report(0, beat())
    tracked.pass_time(60)
    tracked.run.report(0, beat())
    facts = tracked.look()

    assert facts[0].moved_at == tracked.tracker.now


def test_a_newer_life_takes_the_place_of_a_rank(tracked: Tracked) -> None:
    former = tracked.look()[1].incarnation
    tracked.run.kill(1, in_frame=False)
    tracked.run.start(1)

    facts = tracked.look()
    assert facts[1].incarnation == tracked.run.incarnation(1) != former
    assert not facts[1].has_stepped


def test_while_new_lives_start_the_silent_ones_before_them_do_not_count(tracked: Tracked) -> None:
    tracked.pass_time(10)
    tracked.run.attempt = 1
    tracked.run.start(0)

    assert set(tracked.look()) == {0}, "rank 1 fell silent before the restart; its new life is still to come"


def test_ranks_of_an_older_attempt_and_of_a_larger_world_do_not_count(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", dp=4, layers=1, d_model=16, elements=8)
    run.write(2)
    tracked = Tracked(run)
    assert set(tracked.pass_time(2)) == {0, 1, 2, 3}
    smaller = SyntheticRun(
        tmp_path / "run", dp=2, layers=1, d_model=16, elements=8, attempt=1, first_step=2, ranks=(), clock=run.clock
    )
    smaller._num_incarnations = 50
    smaller.start(0), smaller.start(1)
    assert set(tracked.look()) == {0, 1}
    smaller.write(2)

    assert set(tracked.look()) == {0, 1}


def test_a_rank_that_says_the_run_is_smaller_hides_no_other(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", dp=2, layers=1, d_model=16, elements=8, ranks=())
    table = run._ranks[0].table
    place = msgspec.structs.replace(table.descriptor.place, world_size=1)
    table.descriptor = msgspec.structs.replace(table.descriptor, place=place)
    run.start(1), run.start(0)
    run.write(2)

    assert set(Tracked(run).pass_time(2)) == {0, 1}


def test_why_a_rank_left_is_known_after_a_restart(tracked: Tracked) -> None:
    tracked.run.end(1, reason="exception")
    assert tracked.look()[1].left == "exception"
    snapshot, positions = tracked.assembler.snapshot(), tracked.assembler.positions()

    again = Tracked(tracked.run)
    again.follower.restore(positions)
    again.assembler.restore(snapshot, again.follower.incarnations)
    again.tracker.restore(again.follower.incarnations.values())

    facts = again.pass_time(5)
    assert {rank: one.left for rank, one in facts.items()} == {0: "", 1: "exception"}
    assert {rank: (one.step, one.has_stepped) for rank, one in facts.items()} == {0: (3, True), 1: (3, True)}
