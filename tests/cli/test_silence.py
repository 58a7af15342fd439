"""`sentinel silence`: written where the daemon reads it, refused where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, run_cli
from sentinel.report.silences import SilenceBook


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "a" / "spool").mkdir(parents=True)
    return tmp_path / "runs"


def add(runs: Path, *words: str) -> int:
    return run_cli(["silence", "add", *words, "-d", str(runs)])


def test_a_silence_is_begun_listed_and_ended(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert add(runs, "run=a", "severity=~warning|info", "--for", "2h", "--why", "a bad node", "--who", "ana") == CLEAN
    [one] = SilenceBook(runs / ".daemon").all()
    assert (one.matchers, one.who, one.why) == (("run=a", "severity=~warning|info"), "ana", "a bad node")
    assert one.until - one.begun == pytest.approx(7200.0)
    assert capsys.readouterr().out.startswith(f"{one.id} silenced until ")

    assert run_cli(["silence", "list", "-d", str(runs), "--json"]) == CLEAN
    assert json.loads(capsys.readouterr().out)["id"] == one.id

    assert run_cli(["silence", "end", one.id[:5], "-d", str(runs), "--who", "bob"]) == CLEAN
    assert run_cli(["silence", "list", "-d", str(runs)]) == CLEAN
    assert capsys.readouterr().out == f"{one.id} ended: run=a severity=~warning|info\n"
    assert run_cli(["silence", "list", "--all", "-d", str(runs)]) == CLEAN
    assert "ended by bob: run=a severity=~warning|info (ana: a bad node)" in capsys.readouterr().out


def test_of_one_run_it_means_that_run_alone(runs: Path) -> None:
    assert add(runs / "a", "severity=warning", "--for", "1h", "--why", "known") == CLEAN

    [one] = SilenceBook(runs / "a" / ".daemon").all()
    assert one.matchers == ("severity=warning", "run=a")


def test_the_state_directory_may_lie_elsewhere(runs: Path, tmp_path: Path) -> None:
    assert add(runs, "run=a", "--for", "1h", "--why", "known", "--state-dir", str(tmp_path / "state")) == CLEAN

    assert len(SilenceBook(tmp_path / "state").all()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run=a", "--why", "x"], "expected --for TIME or --until TIME, got neither"),
        (["run=a", "--why", "x", "--for", "1h", "--until", "1h"], "got both"),
        (["rnu=a", "--why", "x", "--for", "1h"], 'unknown name "rnu"; did you mean "run"?'),
        (["run=a", "--why", "x", "--for", "1fortnight"], 'unknown unit "fortnight"'),
        (["run=a", "--why", "x", "--for", "9999d"], "a time in the year ahead"),
        (["run=a", "--why", "", "--for", "1h"], "why: expected a reason"),
        (["run=a", "--for", "1h"], "Missing option '--why'"),
    ],
)
def test_what_cannot_be_is_said(runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert add(runs, *words) == BAD_USAGE

    assert said in capsys.readouterr().err
    assert SilenceBook(runs / ".daemon").all() == []


def test_a_broken_file_is_said_and_kept(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / ".daemon").mkdir()
    (runs / ".daemon" / "silences.json").write_text("[{")

    assert add(runs, "run=a", "--for", "1h", "--why", "known") == FOUND

    assert "silences.json: expected silences" in capsys.readouterr().err
    assert (runs / ".daemon" / "silences.json").read_text() == "[{"


def test_an_id_that_nobody_has_is_said_with_those_that_there_are(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["silence", "end", "s1", "-d", str(runs)]) == BAD_USAGE

    assert '"s1": expected the id of one active silence; active: none' in capsys.readouterr().err
