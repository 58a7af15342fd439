"""Turns that wait: the others go on, each answer goes to whoever asked, and what is given up is closed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sentinel.daemon import run_turns
from sentinel.daemon.run_turns import PlainTurns, WaitingTurns


def waits_until(turns: WaitingTurns, is_so: Callable[[], bool], done: list[str], name: str) -> Callable[[], bool]:
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
    turns, done, has_come = WaitingTurns(), list[str](), list[int]()
    waiting = waits_until(turns, lambda: bool(has_come), done, "a")

    assert [turns.take("a", waiting), turns.take("b", lambda: True), turns.take("c", lambda: False)] == [False, True, False]
    assert turns.are_waiting and not done
    time.sleep(0.002)
    # What is handed in meanwhile is another turn, which comes after this one.
    assert not turns.take("a", lambda: pytest.fail("the turn before waits"))
    has_come.append(1)
    time.sleep(0.002)
    assert turns.take("a", waiting) and done == ["a", "a closed"] and not turns.are_waiting


def test_nothing_is_looked_at_before_it_is_due() -> None:
    turns, looks = WaitingTurns(), list[int]()

    def turn() -> bool:
        looks.append(1)
        turns.wait(3600.0)
        return True

    assert [turns.take("a", turn) for _ in range(3)] == [False] * 3
    assert len(looks) == 1


def test_a_turn_that_has_much_to_do_gives_way_when_it_has_had_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, done = WaitingTurns(), list[str]()

    def long_turn() -> bool:
        for number in range(3):
            done.append(f"a{number}")
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
    WaitingTurns().give_way()


def test_a_turn_can_be_waited_for_by_all() -> None:
    turns, done = WaitingTurns(), list[str]()
    until = time.monotonic() + 0.05
    turns.take("a", waits_until(turns, lambda: time.monotonic() > until, done, "a"))

    turns.finish("a")

    assert done == ["a", "a closed"] and not turns.are_waiting
    turns.finish("a")


def test_what_a_turn_raises_after_it_waited_reaches_whoever_goes_on_with_it() -> None:
    turns = WaitingTurns()

    def turn() -> bool:
        turns.wait(0.001)
        raise ValueError("rows")

    assert not turns.take("a", turn)
    time.sleep(0.002)
    with pytest.raises(ValueError, match="rows"):
        turns.take("a", turn)
    assert not turns.are_waiting and turns.take("a", lambda: True)


def test_a_turn_that_is_given_up_closes_what_it_opened_and_goes_no_further() -> None:
    turns, done = WaitingTurns(), list[str]()
    turns.take("a", waits_until(turns, lambda: False, done, "a"))

    turns.abandon("a")
    turns.abandon("a")

    assert done == ["a closed"] and not turns.are_waiting and turns.take("a", lambda: True)


def test_outside_a_turn_seconds_pass() -> None:
    before = time.monotonic()
    WaitingTurns().wait(0.02)
    assert time.monotonic() - before >= 0.02


def test_plain_turns_are_taken_to_their_end() -> None:
    turns = PlainTurns()
    assert turns.take("a", lambda: True) and not turns.take("a", lambda: False) and not turns.are_waiting
    turns.give_way()
    turns.finish("a")
    turns.abandon("a")
