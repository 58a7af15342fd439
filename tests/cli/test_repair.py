"""`sentinel repair`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.cli.main import run_cli
from sentinel.store.run_paths import RunPaths

from ..support.serving import judge_run, small_run


@pytest.mark.slow
def test_a_damaged_journal_is_found_repaired_and_then_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "run", pp=1, layers=2, micro_steps=1).write(6)
    judge_run(tmp_path / "run")
    RunPaths.of(tmp_path / "run").journal.write_bytes(b"no database" * 1000)

    assert run_cli(["repair", str(tmp_path / "run"), "--dry-run"]) == 1
    assert "found: the file is no journal (file is not a database)\n" in capsys.readouterr().out
    assert run_cli(["repair", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_steps"], found["first_step"], found["last_step"]) == (6, 0, 5)
    assert len(found["set_aside"]) == 1
    assert run_cli(["repair", str(tmp_path / "run"), "--dry-run"]) == 0
    assert "the journal is whole" in capsys.readouterr().out


def test_a_run_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["repair", str(tmp_path / "nosuch")]) == 2
    assert "expected a run, found none" in capsys.readouterr().err
