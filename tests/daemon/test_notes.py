"""Notes: `sentinel status` shows what ranks said of themselves, and that no loss is logged for as long as that is so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel.cli.main import CLEAN, run_cli
from sentinel.daemon.notes import MAX_NOTES, Notes, note_lines
from sentinel.messages import EndStep, Health
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths


def view(step: int, *, attempt: int = 0, scalars: tuple[str, ...] = ("lr",), health: Any = ()) -> Any:
    """A closed step as far as notes look at it."""
    end = EndStep(step=step, num_rows=0, num_calls=0)
    return SimpleNamespace(
        attempt=attempt,
        step=step,
        scalars=dict.fromkeys(scalars),
        health=list(health),
        parts=[SimpleNamespace(end_step=end)],
    )


def skipped(count: int = 1) -> Health:
    return Health(code="steps_look_skipped", message="call monitor.step()", count=count)


def test_that_no_loss_is_logged_is_noted_until_one_is() -> None:
    notes = Notes()
    seen = []
    for step in range(12):
        notes.take(view(step, scalars=("lr", "train/loss") if step == 9 else ("lr",)))
        seen.append("no_loss" in notes.found)

    assert seen == [True] * 9 + [False] * 3
    assert "monitor.log(loss=loss)" in note_lines(_taken(view(0)))[0]


def _taken(*views: Any) -> Notes:
    notes = Notes()
    for one in views:
        notes.take(one)
    return notes


def test_a_new_attempt_begins_with_no_notes() -> None:
    notes = _taken(view(5, health=[(0, skipped())]), view(3, attempt=1, scalars=("loss",)))

    assert not notes.found


def test_what_several_ranks_say_is_one_note_with_its_ranks_and_first_step() -> None:
    notes = _taken(
        *(view(step, scalars=("loss",), health=[(rank, skipped(2))]) for step, rank in ((15, 3), (16, 1), (17, 3)))
    )

    (line,) = note_lines(notes)

    assert line == "steps_look_skipped: call monitor.step() (rank 3, 1, from step 15 on, 2 times)"


def test_notes_are_bounded() -> None:
    health = [(0, Health(code="hook_failed", message="m", site=str(at))) for at in range(3 * MAX_NOTES)]

    notes = _taken(view(0, scalars=("loss",), health=health))

    assert len(notes.found) == MAX_NOTES
    assert note_lines(notes)[-1] == f"and {MAX_NOTES - 8} more"


@pytest.mark.parametrize("has_notes", [True, False])
def test_status_shows_the_notes_of_the_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str], has_notes: bool) -> None:
    run = tmp_path / "run"
    (run / "spool").mkdir(parents=True)
    journal = Journal(RunPaths.of(run).journal)
    notes = _taken(view(15, scalars=("loss",), health=[(0, skipped())] if has_notes else []))
    notes.write(journal)
    journal.close()

    assert run_cli(["status", str(run)]) == CLEAN
    text = capsys.readouterr().out
    assert ("steps_look_skipped: call monitor.step()" in text) == has_notes
    assert run_cli(["status", str(run), "--json"]) == CLEAN
    notified = json.loads(capsys.readouterr().out)["notes"]
    assert len(notified["found"]) == has_notes


def test_notes_survive_a_restart_and_a_version_that_cannot_be_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "spool").mkdir(parents=True)
    journal = Journal(RunPaths.of(run).journal)
    notes = _taken(view(15, health=[(0, skipped())]))
    notes.write(journal)

    again = Notes.recalled(journal)
    journal.values.put("notes", '{"found": 3}')
    unread = Notes.recalled(journal)
    journal.close()

    assert note_lines(again) == note_lines(notes)
    assert not unread.found
