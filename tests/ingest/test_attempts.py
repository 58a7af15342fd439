"""What comes of an attempt whose state is not kept any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.ingest.attempts import MAX_ATTEMPTS
from sentinel.ingest.steps import snapshot_positions
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import peek

from ..support.closed_steps import FollowedRun


def taken_up(run_dir: Path, former: FollowedRun) -> FollowedRun:
    """Return what goes on from the snapshot of another one."""
    found, snapshot = FollowedRun(run_dir), former.assembler.snapshot()
    found.follower.restore(snapshot_positions(snapshot))
    found.assembler.restore(snapshot, found.follower.incarnations)
    return found


def cut_before_its_last_two_frames(path: Path, *, to_nothing: bool) -> bytes:
    """Cut a spool's file; return what it was."""
    data, ends, at = path.read_bytes(), [0], 0
    while (found := peek(data, at)) is not None:
        at += found[1]
        ends.append(at)
    path.write_bytes(b"" if to_nothing else data[: ends[-3]])
    return data


@pytest.mark.parametrize("attempt", [0, None], ids=["counted by the launcher", "not counted"])
@pytest.mark.parametrize("is_taken_up", [False, True], ids=["", "after a restart"])
@pytest.mark.parametrize("is_known", [False, True], ids=["a process that was never heard", "a known process"])
def test_what_comes_of_an_attempt_long_over_is_late(
    run_dir: Path, is_known: bool, is_taken_up: bool, attempt: int | None
) -> None:
    run, followed = SyntheticRun(run_dir, dp=2, attempt=attempt), FollowedRun(run_dir)
    run.write(2)
    path = run.folder(1) / "000000.spool"
    whole = cut_before_its_last_two_frames(path, to_nothing=not is_known)
    followed.listen(0.0), followed.listen(100.0)
    for number in range(1, MAX_ATTEMPTS + 2):
        run.kill(0), run.kill(1)
        run.restart(2 * number, attempt=None if attempt is None else number)
        run.write(2)
        followed.listen(100.0 * number)
    newest = followed.assembler.attempts.newest
    assert newest == MAX_ATTEMPTS + 1 and 0 not in followed.assembler.attempts.by_number
    if is_taken_up:
        followed = taken_up(run_dir, followed)
        run.write(1)
        followed.listen(900.0)
    path.write_bytes(whole)
    closed = followed.listen(1000.0)
    run.write(1)
    closed += followed.listen(1001.0)

    if not is_known and attempt is None:
        # Nobody can know of what attempt such a process is.
        assert closed
        return
    assert {view.attempt for view in closed} == {newest} and closed[-1].step == run.step - 1
    assert followed.assembler.num_late_rows.keys() == {1}


def test_a_job_that_is_submitted_again_is_judged_though_its_launcher_counts_from_0_once_more(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2, attempt=0), FollowedRun(run_dir)
    run.write(2)
    followed.listen()
    for number in (*range(1, MAX_ATTEMPTS + 2), 0, 1):
        run.kill(0), run.kill(1)
        run.restart(run.step, attempt=number)
        run.write(2)
        followed.listen()

    views = followed.views[-4:]
    assert [view.step for view in views] == list(range(run.step - 4, run.step)) and not any(
        decision.missing for decision in followed.decisions
    )
    assert [view.attempt - views[0].attempt for view in views] == [0, 0, 1, 1] and views[0].attempt == MAX_ATTEMPTS + 2


@pytest.mark.parametrize("late", [(0,), (0, 3)], ids=["rank 0", "rank 0 and one that waited for it"])
def test_ranks_that_waited_for_rank_0_in_vain_are_of_its_attempt(run_dir: Path, late: tuple[int, ...]) -> None:
    """Who asks it for the number and hears nothing for five seconds goes on without, and rank 0 begins behind them."""
    run, followed = SyntheticRun(run_dir, dp=4, attempt=None), FollowedRun(run_dir)
    for rank in set(range(4)) - set(late):
        run.write_rank(rank, 0)
        followed.listen()
    assert not followed.views
    told = SyntheticRun(run_dir, dp=4, attempt=0, ranks=late, clock=run.clock, seed=1)
    told.write(1)
    followed.listen()
    for rank in set(range(4)) - set(late):
        run.write_rank(rank, 1)
    told.write(1)
    followed.listen()

    assert [(view.attempt, view.step, len(view.parts)) for view in followed.views] == [(0, 0, 4), (0, 1, 4)]
    assert not any(decision.missing for decision in followed.decisions)


def test_ranks_of_a_start_that_nobody_counted_are_not_those_of_the_next_one(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2, attempt=None), FollowedRun(run_dir)
    run.write(2)
    followed.listen()
    run.kill(0), run.kill(1)
    run.restart(2, attempt=0)
    run.write(2)
    followed.listen()

    assert [(view.attempt, view.step) for view in followed.views] == [(0, 0), (0, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("attempt", [1, 0, None], ids=["counted by the launcher", "counted as the same", "not counted"])
def test_who_begins_the_next_attempt_in_another_world_is_no_part_of_this_one(run_dir: Path, attempt: int | None) -> None:
    run = SyntheticRun(run_dir, dp=2, attempt=None if attempt is None else 0)
    run.write(2)
    SyntheticRun(run_dir, dp=4, attempt=attempt, first_step=2, seed=1, clock=run.clock)
    followed = FollowedRun(run_dir)
    followed.listen()

    assert [(one.step, one.described) for one in followed.decisions] == [(0, ()), (1, ())]


def test_of_a_rank_by_itself_it_is_seen_whether_a_step_waits_for_it(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, dp=6, ranks=range(5))
    run.write(1)
    run.end(rank=2)
    run.write(1, ranks=[0, 3])
    run.write_rank(1, 1, end=False)
    followed = FollowedRun(run_dir)
    followed.assembler.take(followed.follower.poll(), 0.0)
    attempt = followed.assembler.attempts.by_number[0]
    followed.follower.incarnations[run.incarnation(2)].has_left = True

    waited = attempt.waited_for(1)
    assert waited == [1, 4, 5]
    # Of 5 nothing ever came, of 2 nothing comes, 0 and 3 are there.
    assert [rank for rank in range(6) if attempt.surely_waits(1, [rank])] == [1, 4]
    assert attempt.surely_waits(1, [2], returning={2}) and 2 in attempt.waited_for(1, {2})
    assert attempt.surely_waits(1, range(6)) and not attempt.surely_waits(1, [])
