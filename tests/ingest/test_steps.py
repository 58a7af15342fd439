from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sentinel.decision import Decision
from sentinel.ingest.attempts import MAX_SILENT
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.steps import StepAssembler, snapshot_positions
from sentinel.messages import Health
from sentinel.testing import SyntheticRun

from ..support.closed_steps import FollowedRun, seen


def steps(followed: FollowedRun) -> list[tuple[int, int]]:
    return [(view.attempt, view.step) for view in followed.views]


def test_a_step_closes_when_every_rank_has_spoken(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, pp=2, dp=2), FollowedRun(run_dir)
    run.write(1, ranks=[2, 0, 3])
    assert followed.listen() == []
    run.write_rank(1, 0)

    (view,) = followed.listen()

    decision = followed.decisions[0]
    assert (decision.seq, decision.run, decision.attempt, decision.step) == (1, "run", 0, 0)
    assert (decision.why, decision.missing) == ("complete", {})
    assert [part.rank for part in decision.ranks] == [0, 1, 2, 3]
    assert [part.incarnation for part in decision.ranks] == [run.incarnation(rank) for rank in range(4)]
    assert view.num_rows == view.num_expected == run.rows_per_step == sum(part.num_rows for part in decision.ranks)
    assert view.time == decision.time == run.clock.time()


def test_each_step_comes_with_its_decision_numbered_in_order(run_dir: Path) -> None:
    SyntheticRun(run_dir).write(3)
    followed = FollowedRun(run_dir)
    followed.assembler.take(followed.follower.poll(), 0.0)

    decided = [view.decision for view in followed.assembler.close(0.0)]

    assert [(one.seq, one.step) for one in decided] == [(1, 0), (2, 1), (3, 2)]


def test_a_decision_survives_msgpack(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(3, skip=[1])
    followed.listen()

    decision = followed.decisions[0]
    assert decision.missing == {1: "late"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=Decision) == decision


@pytest.mark.parametrize(("late_after_steps", "closed"), [(1, 4), (2, 3), (4, 1), (0, 0)])
def test_a_rank_some_steps_behind_is_late(run_dir: Path, late_after_steps: int, closed: int) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir, late_after_steps=late_after_steps)
    run.write(5, skip=[1])

    assert len(followed.listen()) == closed
    assert {decision.why for decision in followed.decisions} <= {"late_steps"}
    assert all(decision.missing == {1: "late"} for decision in followed.decisions)


@pytest.mark.parametrize(("late_after_s", "is_closed"), [(30.0, True), (31.0, False), (0.0, False)])
def test_a_rank_some_time_behind_is_late(run_dir: Path, late_after_s: float, is_closed: bool) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir, late_after_s=late_after_s)
    run.write(1, skip=[1])

    assert followed.listen(now=100.0) == []
    assert bool(followed.listen(now=130.0)) is is_closed
    assert [decision.why for decision in followed.decisions] == ["late_time"] * is_closed


def test_nobody_is_late_for_what_was_written_while_it_was_read(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(1)
    followed.listen()
    before = followed.assembler.newest_step
    run.write(4, skip=[1])
    followed.assembler.take(followed.follower.poll(), 0.0)

    assert list(followed.assembler.close(0.0, settled_step=before)) == []
    assert len(list(followed.assembler.close(0.0, settled_step=4))) == 2


def test_nobody_is_late_whose_records_are_still_on_disk(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(5, skip=[1])
    followed.assembler.take(followed.follower.poll(), 0.0)

    assert list(followed.assembler.close(99.0, behind={run.incarnation(1)})) == []


def test_a_rank_that_never_started_is_waited_for_until_it_is_late(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2, ranks=[0]), FollowedRun(run_dir)
    run.write(2)
    assert followed.listen() == []
    run.write(1)

    assert [view.step for view in followed.listen()] == [0]
    assert followed.decisions[0].missing == {1: "never started"}


def test_a_rank_that_said_bye_is_not_waited_for(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(1)
    run.end(1)
    run.write(1)

    assert [view.step for view in followed.listen()] == [0, 1]
    assert followed.decisions[1].missing == {1: "ended"}
    assert followed.decisions[1].why == "complete"


def test_a_rank_that_died_in_its_step_is_heard_as_far_as_it_came(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(1)
    run.write_rank(0, 1)
    run.write_rank(1, 1, end=False)
    run.kill(1)
    run.step = 2
    run.write(2)

    followed.listen()

    assert followed.decisions[1].missing == {1: "unfinished"}
    assert [part.is_ended for part in followed.decisions[1].ranks] == [True, False]
    assert followed.views[1].num_rows == run.rows_per_step


def test_lost_rows_make_a_rank_unfinished(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir), FollowedRun(run_dir)
    run.write(1)
    run.flip_bit(0, from_end=600)
    run.write(2)

    followed.listen()

    assert followed.decisions[0].missing == {0: "unfinished"}
    assert (followed.views[0].num_rows, followed.views[0].num_expected) == (0, run.rows_per_step)


def test_steps_close_in_order(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.hold(1)
    run.write(2)
    assert followed.listen() == []
    run.release(1)

    assert [view.step for view in followed.listen()] == [0, 1]


def test_end_before_rows_is_waited_out(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir), FollowedRun(run_dir)
    run.write(2)
    run.reverse_last(0)

    assert [view.num_rows for view in followed.listen()] == [run.rows_per_step] * 2


def test_duplicates_are_not_counted_twice(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(2)
    run.repeat_last(1)
    run.write(1)

    assert [view.num_rows for view in followed.listen()] == [run.rows_per_step] * 3


def test_late_rows_never_reopen_a_step(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.hold(1)
    run.write(4)
    followed.listen()
    assert steps(followed) == [(0, 0), (0, 1)]
    run.release(1)
    followed.listen()
    run.write(1)
    followed.listen()

    assert steps(followed) == [(0, step) for step in range(5)]
    late = 2 * run.num_rows(1)
    assert followed.assembler.num_late_rows == {1: late}
    assert followed.assembler.num_late_rows_total == late
    assert followed.decisions[2].blindness == {"late_frames": 2, "late_rows": late}
    assert followed.decisions[3].blindness == {}
    assert followed.views[2].num_rows == run.rows_per_step


def test_new_life_is_not_a_duplicate(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(2)
    followed.listen()
    run.kill(1)
    run.write_rank(0, 2)
    assert followed.listen() == []
    incarnation = run.start(1)
    run.write_rank(1, 2)
    run.step = 3
    run.write(1)

    followed.listen()

    assert steps(followed) == [(0, step) for step in range(4)]
    assert followed.follower.num_duplicates == 0
    assert all(decision.missing == {} for decision in followed.decisions)
    assert followed.decisions[3].ranks[1].incarnation == incarnation


def test_a_replaced_life_that_had_spoken_gives_way_in_an_open_step(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write_rank(1, 0)
    followed.listen()
    incarnation = run.start(1)
    run.write_rank(1, 0)
    run.write(1, ranks=[0])
    followed.listen()

    assert followed.decisions[0].ranks[1].incarnation == incarnation
    assert followed.views[0].num_rows == run.rows_per_step


def test_repeated_steps_after_resume(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(6)
    followed.listen()
    run.kill(0), run.kill(1)
    run.restart(3, attempt=0)
    run.write(2)
    followed.listen()

    assert steps(followed) == [(0, step) for step in range(6)] + [(1, 3), (1, 4)]
    assert all(decision.missing == {} for decision in followed.decisions)
    assert followed.assembler.num_late_rows == {}


def test_an_attempt_that_the_launcher_counted_keeps_its_number(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(3)
    followed.listen()
    run.restart(1, attempt=1)
    run.write(1)
    followed.listen()
    run.restart(1, attempt=1)
    run.write(1)
    followed.listen()
    run.restart(2, attempt=2)
    run.write(1)
    followed.listen()

    assert steps(followed) == [(0, 0), (0, 1), (0, 2), (1, 1), (2, 1), (3, 2)]


def test_a_life_that_cannot_say_its_attempt_opens_a_new_one(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2, attempt=None), FollowedRun(run_dir)
    run.write(2)
    followed.listen()
    run.kill(0), run.kill(1)
    run.restart(2, attempt=None)
    run.write(2)
    followed.listen()

    assert steps(followed) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert all(decision.missing == {} for decision in followed.decisions)


def test_a_trainer_that_goes_back_in_one_life_begins_a_new_attempt(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(5)
    run.step = 2
    run.write(4)
    followed.listen()

    assert steps(followed) == [(0, step) for step in range(5)] + [(1, step) for step in range(2, 6)]
    assert all(decision.missing == {} for decision in followed.decisions)
    assert [part.generation for part in followed.decisions[-1].ranks] == [1, 1]


def test_open_steps_of_an_attempt_close_before_the_next_attempt(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(2)
    run.write(1, skip=[1])
    run.kill(0), run.kill(1)
    run.restart(1, attempt=1)
    run.write(2)
    followed.listen()

    assert steps(followed) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert followed.decisions[2].why == "superseded"


def test_when_all_said_bye_what_is_left_closes_in_order(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=3, ranks=[0, 1]), FollowedRun(run_dir)
    run.write(1)
    run.write(1, skip=[1])
    assert followed.listen() == []
    run.end()

    assert [view.step for view in followed.listen()] == [0, 1]
    assert followed.decisions[1].missing == {1: "ended", 2: "never started"}


def test_finish_closes_what_is_left(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(2, skip=[1])
    assert followed.listen() == []

    assert [view.step for view in followed.finish()] == [0, 1]
    assert [decision.why for decision in followed.decisions] == ["finished", "finished"]


def test_memory_is_bounded_when_nobody_may_be_late(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, dp=2, layers=1)
    followed = FollowedRun(run_dir, late_after_steps=0, late_after_s=0.0, max_open_steps=8)
    for _ in range(30):
        run.write(1, skip=[1])
        followed.listen()
        assert followed.assembler.num_open_steps <= 8

    assert {decision.why for decision in followed.decisions} == {"crowded"}


def test_health_comes_with_the_step_it_was_said_in(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(1)
    run.report(1, Health(code="hook_failed", message="x"))
    run.write(2)
    followed.listen()

    assert [[(rank, one.code) for rank, one in view.health] for view in followed.views] == [[], [(1, "hook_failed")], []]


def test_skipped_step_is_a_step(run_dir: Path) -> None:
    from sentinel.testing import Nan

    run, followed = SyntheticRun(run_dir).plant(Nan(step=1, module="head")), FollowedRun(run_dir)
    run.write(3)
    followed.listen()

    assert [view.is_skipped for view in followed.views] == [False, True, False]


def disorder(run: SyntheticRun, rng: random.Random, followed: FollowedRun | None = None) -> None:
    """Late, missing, duplicated, reordered, killed, replaced, restarted: whatever may happen to ranks."""
    now = 0.0
    held: set[int] = set()
    for _ in range(30):
        action = rng.choice(["none"] * 5 + ["hold", "release", "repeat", "reverse", "kill", "start", "restart", "skip"])
        rank = rng.randrange(run.num_ranks)
        order = rng.sample(range(run.num_ranks), run.num_ranks)
        if action == "hold" and rank not in held:
            held.add(rank)
            run.hold(rank)
        elif action == "release":
            for one in sorted(held):
                run.release(one)
            held.clear()
        elif action == "kill" and rank not in held:
            run.kill(rank)
        elif action == "start":
            run.start(rank)
            held.discard(rank)
        elif action == "restart" and run.step > 3:
            run.restart(run.step - rng.randrange(3), attempt=rng.choice([0, 1, None]))
            held.clear()
        run.write(1, ranks=order, skip=[rank] if action == "skip" else [])
        if action in ("repeat", "reverse") and rank not in held and not run._ranks[rank].is_dead:
            (run.repeat_last if action == "repeat" else run.reverse_last)(rank)
        run.report(rank, Health(code="note", message=action))
        if followed is not None:
            now += rng.choice([0.1, 20.0])
            followed.listen(now)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_replay_is_identical(run_dir: Path, seed: int) -> None:
    run = SyntheticRun(run_dir, pp=2, dp=2, layers=2, elements=4)
    live = FollowedRun(run_dir)
    disorder(run, random.Random(seed), live)
    live.finish(now=1e6)
    assert len(live.decisions) > 10

    again = FollowedRun(run_dir)
    again.replay(live.decisions)
    again.listen(final=True)
    again.views += again.assembler.finish(0.0)

    assert again.decisions == [], "nothing is decided anew"
    assert again.assembler.num_incomplete_replays == live.assembler.num_incomplete_replays
    assert [view.decision for view in again.views] == live.decisions
    replayed = {view.decision.seq: seen(view) for view in again.views if view.decision is not None}
    for view in live.views:
        assert view.decision is not None
        assert replayed[view.decision.seq] == seen(view)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(one, marks=pytest.mark.long) for one in range(3, 8))])
@pytest.mark.parametrize("snapshot_every", [1, 3])
def test_kill_9_loses_nothing(run_dir: Path, seed: int, snapshot_every: int) -> None:
    """The daemon dies between any two views, starts from its last snapshot, and judges the same steps."""
    rng = random.Random(seed)
    run = SyntheticRun(run_dir, dp=3, layers=1, elements=4)
    disorder(run, rng)
    journal: list[Decision] = []
    judged: dict[int, tuple[object, ...]] = {}
    saved: tuple[int, bytes] | None = None
    for _ in range(40):
        follower = RunFollower(run_dir)
        assembler = StepAssembler("run")
        if saved is not None:
            follower.restore(snapshot_positions(saved[1]))
            assembler.restore(saved[1], follower.incarnations)
        assembler.replay_decisions([one for one in journal if saved is None or one.seq > saved[0]])
        incarnations_left = rng.randrange(1, 8)
        while records := follower.poll():
            assembler.take(records, 0.0)
        for view in assembler.close(0.0, follower.behind):
            assert view.decision is not None
            seq = view.decision.seq
            if seq > len(journal):
                journal.append(view.decision)
            assert judged.setdefault(seq, seen(view)) == seen(view)
            if seq % snapshot_every == 0:
                saved = (seq, assembler.snapshot())
            incarnations_left -= 1
            if not incarnations_left:
                break
        else:
            break
    assert sorted(judged) == list(range(1, len(journal) + 1))

    reference = FollowedRun(run_dir)
    records = []
    while found := reference.follower.poll():
        records += found
    reference.assembler.take(records, 0.0)
    views = list(reference.assembler.close(0.0))
    assert [(v.attempt, v.step) for v in views] == [(one.attempt, one.step) for one in journal]
    assert [seen(view)[:6] for view in views] == [judged[one.seq][:6] for one in journal]


def test_what_is_acknowledged_is_not_needed_again(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(3)
    run.write(1, skip=[1])
    followed.listen()

    positions = followed.assembler.positions()

    again = FollowedRun(run_dir)
    again.follower.restore(positions)
    records = again.follower.poll()
    assert sorted((r.incarnation.rank, r.frame.header.step) for r in records) == [(0, 3), (0, 3)]


def test_a_replay_whose_frames_are_gone_goes_on_and_counts_it(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(3)
    followed.listen()
    for path in run.folder(1).glob("*.spool"):
        path.unlink()

    again = FollowedRun(run_dir)
    again.replay(followed.decisions)
    again.listen()

    assert [view.step for view in again.views] == [0, 1, 2]
    assert again.assembler.num_incomplete_replays == 3


def test_rows_judged_equals_rows_expected(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, pp=2, dp=2, tp=2, per_micro_step=True), FollowedRun(run_dir)
    run.write(4)
    followed.listen()

    assert [(view.num_rows, view.num_expected) for view in followed.views] == [(run.rows_per_step, run.rows_per_step)] * 4
    assert all((view.row_logical >= 0).all() and view.present.all() for view in followed.views)
    assert np.unique(followed.views[0].row_rank).tolist() == list(range(8))


@pytest.mark.parametrize("has_snapshot", [False, True])
@pytest.mark.parametrize("is_received_before", [False, True], ids=["late while down", "late before the crash"])
def test_late_rows_are_told_once_across_a_restart(run_dir: Path, has_snapshot: bool, is_received_before: bool) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.hold(1)
    run.write(4)
    followed.listen()
    if is_received_before:
        run.release(1)
        followed.listen()
    snapshot = followed.assembler.snapshot()
    run.release(1)
    run.write(2)

    again = FollowedRun(run_dir)
    if has_snapshot:
        again.follower.restore(snapshot_positions(snapshot))
        again.assembler.restore(snapshot, again.follower.incarnations)
    again.replay([] if has_snapshot else followed.decisions)
    again.listen()

    reported = [one.blindness.get("late_rows", 0) for one in followed.decisions + again.decisions]
    assert sum(reported) == 2 * run.num_rows(1)
    assert again.assembler.num_late_rows == {1: 2 * run.num_rows(1)}


def test_ranks_that_cannot_say_their_attempt_share_one_when_all_is_read_at_once(run_dir: Path) -> None:
    """The bye of the first rank is read before the first step of the second is taken in: its attempt is not over yet."""
    run, followed = SyntheticRun(run_dir, dp=3, attempt=None), FollowedRun(run_dir)
    run.write(4)
    run.end()

    followed.listen(final=True)

    assert steps(followed) == [(0, step) for step in range(4)]
    assert all(decision.missing == {} for decision in followed.decisions)


def test_of_ranks_that_nobody_heard_only_the_first_are_named(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir), FollowedRun(run_dir)
    table = run._ranks[0].table
    place = msgspec.structs.replace(table.descriptor.place, world_size=2**18)
    table.descriptor = msgspec.structs.replace(table.descriptor, place=place)
    run.start(0)
    run.write(2)
    followed.finish()

    assert [len(decision.missing) for decision in followed.decisions] == [MAX_SILENT] * 2
    assert list(followed.decisions[0].missing) == list(range(1, MAX_SILENT + 1))


def test_who_is_behind_is_waited_for_though_nothing_of_it_was_handed_out(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, dp=2, ranks=[0])
    run.write(4)
    followed = FollowedRun(run_dir)
    followed.assembler.take(followed.follower.poll(), 0.0)
    late = run.start(1)

    assert not list(followed.assembler.close(0.0, {late}))
    assert [one.step for one in followed.assembler.close(0.0)] == [0, 1]


def test_steps_wait_for_who_is_behind_before_its_first_step_whatever_attempt_has_begun_since(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, dp=2)
    late = run.incarnation(1)
    run.write(1, ranks=[0])
    run.restart(0, attempt=1)
    run.write(1)
    followed = FollowedRun(run_dir)
    followed.assembler.take(followed.follower.poll(), 0.0)

    assert not list(followed.assembler.close(0.0, {late}))
    decisions = [one.decision for one in followed.assembler.close(0.0) if isinstance(one, ClosedStep)]
    assert [(one.attempt, one.why, one.missing) for one in decisions if one is not None] == [
        (0, "superseded", {1: "never started"}), (1, "complete", {}),
    ]  # fmt: skip
