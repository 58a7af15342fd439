"""Marks of a run: restarts, checkpoints, other rules and commands, each at its step, and nothing that did not happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.run_marks import MARKS_FACT, MOST_KEPT, RunMarks
from sentinel.history.config import HistoryConfig
from sentinel.messages import Heartbeat
from sentinel.store.journal import Journal

from ..support.serving import NOW, catch_up, loaded_packs, served, small_run


def told(run_dir: Path, *packs: Path, order: dict[str, Any] | None = None, config: DaemonConfig | None = None) -> list[Any]:
    """Return the marks once all that there is was judged, and leave what a daemon leaves."""
    one = served(run_dir, config, packs=loaded_packs(*packs))
    catch_up(one)
    if order is not None:
        one.commanding.order("request", order, NOW)
    marks = [(mark.kind, mark.attempt, mark.step, mark.label) for mark in one.marks()]
    one.finish(NOW, is_over=False, deadline=float("inf"))
    one.close()
    return marks


def test_a_run_in_which_nothing_happened_has_none(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(5)
    source.report(0, Heartbeat(step=4, call_id=0, activity="train"))

    assert told(tmp_path / "run") == []
    assert told(tmp_path / "run") == [], "nor does a restart of the daemon make one"


def test_restarts_checkpoints_and_other_rules_are_known_and_stay_known(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run", dp=1)
    source.write(5)
    for _ in range(2):
        for rank in range(source.num_ranks):
            source.report(rank, Heartbeat(step=4, call_id=0, activity="checkpoint"))
    source.write(3)
    checkpoint = ("checkpoint", 0, 4, "a checkpoint is written at step 4")
    assert told(tmp_path / "run") == [checkpoint]

    (tmp_path / "own.yaml").write_text("rules:\n- {name: loss-spike, args: {k: 9.0}}\n")
    source.write(2)
    first, rules = told(tmp_path / "run", tmp_path / "own.yaml")
    assert first == checkpoint and rules[:3] == ("rules", 0, 8)

    source.restart(5, attempt=1)
    source.write(4)
    restart = ("restart", 1, 5, "attempt 1 begins, with the state of a checkpoint behind step 4")
    for _ in range(2):
        assert told(tmp_path / "run", tmp_path / "own.yaml") == [checkpoint, restart, rules]


def test_a_restart_without_a_state_says_nothing_of_a_checkpoint(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(5)
    source.restart(0, attempt=1, is_resumed=False)
    source.write(4)

    assert told(tmp_path / "run") == [("restart", 1, 0, "attempt 1 begins")]


def test_a_command_is_marked_at_its_step_with_what_became_of_it(tmp_path: Path) -> None:
    small_run(tmp_path / "run").write(5)

    [mark] = told(tmp_path / "run", order={"request": "checkpoint", "at_step": 40})

    assert mark[0] == "command" and mark[2:] == (40, "a checkpoint is asked for: issued")


def test_restarts_that_only_a_history_knows_are_marked_too(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(5)
    source.restart(3, attempt=1)
    source.write(4)
    config = DaemonConfig(history=HistoryConfig(enabled=True))
    told(tmp_path / "run", config=config)
    journal = Journal(tmp_path / "run" / ".daemon" / "journal.sqlite")
    journal.values.put(MARKS_FACT, '{"attempt":1,"seq":1000}')
    journal.close()

    assert told(tmp_path / "run", config=config) == [("restart", 1, 3, "attempt 1 begins")]


def test_the_oldest_go_where_there_are_too_many(journal: Journal) -> None:
    marks = RunMarks(journal)
    for step in range(MOST_KEPT + 10):
        marks.take_heartbeat(Heartbeat(step=step, call_id=0, activity="checkpoint"), 0, NOW)

    kept = marks.told((), ())
    assert (len(kept), kept[0].step, kept[-1].step) == (MOST_KEPT, 10, MOST_KEPT + 9)
