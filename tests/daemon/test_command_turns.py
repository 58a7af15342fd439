"""Commands of a run of many ranks: a turn looks at all of them, and the next one comes later for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sentinel.daemon import command_turns
from sentinel.daemon.command_turns import CommandTurns


def turns_of_nobody() -> tuple[CommandTurns, Any]:
    """Return what takes turns, and the stages of a run of which nobody was heard."""
    commanding = SimpleNamespace(turn=lambda *args, **options: None)
    gauges = SimpleNamespace(metrics=SimpleNamespace(step_time_s=None))
    stages = SimpleNamespace(follower=SimpleNamespace(incarnations={}), assembler=SimpleNamespace(newest_step=-1))
    return CommandTurns(commanding, gauges), stages  # type: ignore[arg-type]


def test_of_many_ranks_the_next_turn_comes_after_twenty_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_turns, "MANY_RANKS", 0)
    turns, stages = turns_of_nobody()
    assert turns.turn(stages, 0.0, 100.0, is_due=True) == {}
    turns.rest(0.1, 100.1)
    assert turns.turn(stages, 0.0, 102.0, is_due=True) is None
    assert turns.turn(stages, 0.0, 102.2, is_due=True) == {}


def test_of_few_ranks_it_is_taken_when_it_is_due() -> None:
    turns, stages = turns_of_nobody()
    assert turns.turn(stages, 0.0, 100.0, is_due=True) == {}
    turns.rest(5.0, 105.0)
    assert turns.turn(stages, 0.0, 105.0, is_due=True) == {}
    assert turns.turn(stages, 0.0, 105.01, is_due=False) is None
