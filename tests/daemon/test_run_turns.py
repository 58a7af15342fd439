"""Turns that wait: the others go on, each answer goes to whoever asked, and what is given up is closed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.daemon import run_turns
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.run_turns import PlainTurns, SharedTurns
from sentinel.daemon.serving import ServedRun
from sentinel.history.config import HistoryConfig
from sentinel.judge.config import JudgingConfig
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan

from ..support.serving import catch_up, loaded_packs, small_run


def waits_until(turns: SharedTurns, is_so: Callable[[], bool], done: list[str], name: str) -> Callable[[], bool]:
    def turn() -> bool:
        try:
            while not is_so():
                turns.wait(0.001)
            done.append(name)
        finally:
            done.append(f"{name} closed")
        return True

    return turn


def test_the_others_take_their_turns_while_one_waits() -> None:
    turns, done, has_come = SharedTurns(), list[str](), list[int]()
    waiting = waits_until(turns, lambda: bool(has_come), done, "a")

    assert [turns.take("a", waiting), turns.take("b", lambda: True), turns.take("c", lambda: False)] == [False, True, False]
    assert turns.is_left("a") and not done
    time.sleep(0.002)
    # What is handed in meanwhile is another turn, which comes after this one.
    assert not turns.take("a", lambda: pytest.fail("the turn before waits"))
    has_come.append(1)
    time.sleep(0.002)
    assert turns.take("a", waiting) and done == ["a", "a closed"] and not turns.is_left("a")


def test_nothing_is_looked_at_before_it_is_due() -> None:
    turns, looks = SharedTurns(), list[int]()

    def turn() -> bool:
        looks.append(1)
        turns.wait(3600.0)
        return True

    assert [turns.take("a", turn) for _ in range(3)] == [False] * 3
    assert len(looks) == 1


def test_a_turn_that_has_much_to_do_gives_way_when_it_has_had_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, done = SharedTurns(), list[str]()

    def long_turn() -> bool:
        for number in range(3):
            done.append(f"a{number}")
            if turns.is_share_over:
                turns.give_way()
        return False

    assert not turns.take("a", long_turn) and done == ["a0", "a1", "a2"], "it had no share to lose yet"
    done.clear()
    monkeypatch.setattr(run_turns, "SLICE_S", 0.0)
    moved = []
    for _ in range(4):
        moved.append(turns.take("a", long_turn))
        turns.take("b", lambda: bool(done.append("b")))
    assert done == ["a0", "b", "a1", "b", "a2", "b", "b"]
    # It moved each time that it gave way; that nothing is left is its own answer.
    assert moved == [True, True, True, False]


def test_outside_a_turn_nobody_is_given_way_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_turns, "SLICE_S", 0.0)
    assert not SharedTurns().is_share_over


def test_a_turn_can_be_waited_for_by_all() -> None:
    turns, done = SharedTurns(), list[str]()
    until = time.monotonic() + 0.05
    turns.take("a", waits_until(turns, lambda: time.monotonic() > until, done, "a"))

    assert turns.finish("a", time.monotonic() + 200.0)

    assert done == ["a", "a closed"] and not turns.is_left("a")
    assert turns.finish("a", 0.0)


def test_whoever_waits_for_a_turn_gives_up_in_time() -> None:
    turns, done = SharedTurns(), list[str]()
    turns.take("a", waits_until(turns, lambda: False, done, "a"))

    assert not turns.finish("a", time.monotonic() + 0.02)

    assert turns.is_left("a") and not done


def test_what_others_took_is_not_the_turns_own_time() -> None:
    turns, left = SharedTurns(), list[float]()

    def turn() -> bool:
        for _ in range(2):
            left.append(turns.left_s)
            turns.give_way()
        left.append(turns.left_s)
        return True

    for _ in range(3):
        turns.take("a", turn)
        turns.take("b", lambda: bool(time.sleep(0.02)))

    assert left[0] < 0.001 and 0.02 <= left[1] <= left[2] - 0.02


def test_what_a_turn_raises_after_it_waited_reaches_whoever_goes_on_with_it() -> None:
    turns = SharedTurns()

    def turn() -> bool:
        turns.wait(0.001)
        raise ValueError("rows")

    assert not turns.take("a", turn)
    time.sleep(0.002)
    with pytest.raises(ValueError, match="rows"):
        turns.take("a", turn)
    assert not turns.is_left("a") and turns.take("a", lambda: True)


def test_a_turn_that_is_given_up_closes_what_it_opened_and_goes_no_further() -> None:
    turns, done = SharedTurns(), list[str]()
    turns.take("a", waits_until(turns, lambda: False, done, "a"))

    turns.abandon("a")
    turns.abandon("a")

    assert done == ["a closed"] and not turns.is_left("a") and turns.take("a", lambda: True)


def test_outside_a_turn_seconds_pass() -> None:
    before = time.monotonic()
    SharedTurns().wait(0.02)
    assert time.monotonic() - before >= 0.02


def test_plain_turns_are_taken_to_their_end() -> None:
    turns = PlainTurns()
    assert turns.take("a", lambda: True) and not turns.take("a", lambda: False) and not turns.is_left("a")
    turns.give_way()
    assert turns.finish("a", 0.0)
    turns.abandon("a")


@pytest.mark.usefixtures("snapshots_may_take_all_the_time")
def test_what_was_found_is_told_before_the_state_is_kept(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run").plant(Nan(step=2, module="layers.2"))
    run.write(4)
    run.end()
    seen = list[tuple[int, int, int]]()

    class Noting(PlainTurns):
        is_share_over = True

        def give_way(self) -> None:
            journal = one.journal
            kept = [seq for seq, _ in journal.snapshots()]
            seen.append((journal.judged, max(kept, default=0), journal.found.num_onsets()))

    paths = RunPaths.of(run.directory)
    run.directory.chmod(0o700)
    config = DaemonConfig(judging=JudgingConfig(snapshot_interval_s=0.0), history=HistoryConfig(enabled=False))
    one = ServedRun(paths, config, loaded_packs(), turns=Noting())
    try:
        catch_up(one)
        newest = max(seq for seq, _ in one.journal.snapshots())
    finally:
        one.close()

    assert len(seen) == 4 and seen[-1][2] > 0
    # Whoever is given way to tells what is committed; the snapshot of a step comes behind that.
    assert all(judged > kept for judged, kept, _ in seen)
    assert newest >= seen[-1][0]
