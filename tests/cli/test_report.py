"""`sentinel report`: which file is written in which form, and what is said where it cannot be."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path

import pytest

from sentinel.cli.main import run_cli
from sentinel.cli.report import default_name
from sentinel.store.lock import RunLock
from sentinel.testing import Nan

from ..support.serving import judge_run, small_run


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judged run in which a NaN is born at step 12."""
    run = small_run(tmp_path_factory.mktemp("report") / "good").plant(Nan(step=12, module="layers.1", rank=1))
    run.write(16)
    run.end()
    judge_run(run.directory, is_over=True)
    return run.directory


def contents(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("journal.sqlite-shm", "journal.sqlite-wal")
    }


def test_the_ending_of_the_name_says_the_form(judged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["report", str(judged), "-o", str(tmp_path / "a.html")]) == 0
    assert run_cli(["report", str(judged), "worst", "-o", str(tmp_path / "a.MD")]) == 0
    assert run_cli(["report", str(judged), "latest", "-o", "-"]) == 0

    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.MD").read_text().startswith("# Post-mortem of incident i")
    said = capsys.readouterr()
    assert said.out.startswith("# Post-mortem of incident i")
    assert str(tmp_path / "a.html") in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.MD", "a.html"], "nothing is left beside them"


def test_another_ending_is_refused_before_anything_is_read(
    tmp_path: Path, judged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["report", str(judged), "-o", str(tmp_path / "a.docx")]) == 2
    assert 'expected a name that ends with .html, .htm, .md, .markdown, .pdf, got ".docx"' in capsys.readouterr().err


def test_pdf_without_a_browser_is_refused_in_words(
    judged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert run_cli(["report", str(judged), "-o", str(tmp_path / "a.pdf")]) == 2
    assert "apt-get install chromium" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_or_an_incident_that_there_is_not_is_bad_usage(
    judged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["report", str(tmp_path / "none"), "-o", "-"]) == 2
    assert run_cli(["report", str(judged), "nope", "-o", "-"]) == 2
    assert "no incident has an id that begins so; known: i" in capsys.readouterr().err


def test_nothing_is_written_into_the_run(judged: Path, tmp_path: Path) -> None:
    before = contents(judged)
    run_cli(["report", str(judged), "-o", str(tmp_path / "a.html")])

    assert contents(judged) == before


def test_addresses_come_from_the_configuration_of_the_daemon(judged: Path, tmp_path: Path) -> None:
    (tmp_path / "daemon.yaml").write_text(
        "notify: {external_url: 'https://sentinel.example.org', runbook_url: 'https://wiki.example.org/{detector}'}\n"
    )
    run_cli(["report", str(judged), "worst", "-o", str(tmp_path / "a.html"), "--config", str(tmp_path / "daemon.yaml")])

    assert 'href="https://wiki.example.org/AnomalyNan"' in (tmp_path / "a.html").read_text()


def test_without_a_name_the_file_is_called_after_the_run(
    judged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run_cli(["report", str(judged), "worst"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["postmortem-good-worst.html"]
    assert default_name(Path("/runs/a b\n<script>"), None) == "postmortem-a_b_script_.html"


def test_a_run_that_a_daemon_judges_is_said_to_be_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "live")
    run.write(5)
    judge_run(run.directory)
    with contextlib.closing(RunLock(run.directory / ".daemon", "run live")):
        run_cli(["report", str(run.directory), "-o", "-"])
    live = capsys.readouterr().out
    run_cli(["report", str(run.directory), "-o", "-"])

    assert "> The run is LIVE: process " in live and "no daemon" not in live
    assert "LIVE" not in capsys.readouterr().out


def test_a_directory_of_runs_is_no_run(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["report", str(judged.parent), "-o", "-"]) == 2
    assert "expected a run, got a directory of 1: name one" in capsys.readouterr().err


def test_a_run_that_others_made_is_read_in_a_copy(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["open", "--untrusted", str(judged), "report", "worst", "-o", "-"]) == 0
    assert "layers.1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_writes_it_at_its_end_and_as_html_where_no_browser_prints_pdf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = [sys.executable, "-c", "raise SystemExit(7)"]

    assert (
        run_cli(["run", "--dir", str(tmp_path / "runs"), "--name", "a", "--report", str(tmp_path / "a.pdf"), "--", *command])
        == 7
    )
    body = (tmp_path / "a.html").read_text()
    assert "nothing was watched" in body and "No incident is on record." in body
    assert "HTML is written in its place" in capsys.readouterr().err
