"""A run directory that somebody else made: what is planted in it is left out and named, and nothing of it is written."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, run_cli
from sentinel.testing import Nan

from ..support.serving import judge_run, small_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("made") / "run"
    small_run(run_dir).plant(Nan(step=6, module="layers.1")).write(12)
    judge_run(run_dir)
    return run_dir


@pytest.fixture
def foreign(whole: Path, tmp_path: Path) -> Path:
    secrets = tmp_path / "home"
    secrets.mkdir()
    (secrets / "key").write_text("SECRET")
    return Path(shutil.copytree(whole, tmp_path / "run"))


def state_of(directory: Path) -> dict[str, tuple[int, ...]]:
    return {
        str(path): (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
        for path in [directory, *directory.rglob("*")]
        for status in [path.lstat()]
    }


@pytest.mark.parametrize(
    ("verb", "code", "words"),
    [
        ([], FOUND, "NaN"),
        (["status"], FOUND, "NaN"),
        (["topk", "-k", "1", "--json"], FOUND, "layers.1"),
        (["explain"], CLEAN, "layers.1"),
        (["export", "--kind", "wgrad", "--statistic", "norm"], CLEAN, "wgrad"),
    ],
)
def test_reading_verbs_read_a_copy_and_write_nothing(
    foreign: Path, verb: list[str], code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = state_of(foreign)

    assert run_cli(["open", "--untrusted", str(foreign), *verb]) == code

    out, err = capfd.readouterr()
    assert words in out and "are read in a copy" in err
    # What a daemon keeps for itself, and what only pyarrow reads.
    left_out = [line.split(": ")[2] for line in err.splitlines() if "left out" in line]
    assert set(left_out) <= {".daemon/lock", ".daemon/page", "history"}
    assert state_of(foreign) == before


def link_out(run: Path) -> None:
    shutil.rmtree(run / "spool")
    (run / "spool").symlink_to(run.parent / "home")


def link_in_spool(run: Path) -> None:
    (next((run / "spool").iterdir()) / "key.spool").symlink_to(run.parent / "home" / "key")


def pipe(run: Path) -> None:
    os.mkfifo(run / "anomalies" / "x.jsonl")


def hard_link(run: Path) -> None:
    os.link(run.parent / "home" / "key", run / "anomalies" / "key.jsonl")


def device(run: Path) -> None:
    os.mknod(run / "anomalies" / "zero.jsonl", 0o600 | 0o020000, os.makedev(1, 5))


def huge(run: Path) -> None:
    with (run / "anomalies" / "huge.jsonl").open("wb") as file:
        file.truncate(2**33)


def odd_name(run: Path) -> None:
    (run / "anomalies" / "a\x1b[31m\nb.jsonl").write_text("x")


def pointing_state(run: Path) -> None:
    (run / ".daemon" / "state.json").write_text('{"state": "' + str(run.parent / "home") + '"}')


def journal_link(run: Path) -> None:
    (run / ".daemon" / "journal.sqlite").unlink()
    (run / ".daemon" / "journal.sqlite").symlink_to(run.parent / "home" / "key")


def journal_with_a_view(run: Path) -> None:
    with contextlib.closing(sqlite3.connect(run / ".daemon" / "journal.sqlite")) as journal:
        journal.execute("CREATE VIEW planted AS SELECT 1")


def journal_of_nothing(run: Path) -> None:
    (run / ".daemon" / "journal.sqlite").write_bytes(b"no database at all, " * 100)


def deep(run: Path) -> None:
    (run / "anomalies" / "/".join("abcdefghijkl")).mkdir(parents=True)


def stranger(run: Path) -> None:
    (run / ".ssh").mkdir()
    (run / "Makefile").write_text("all:")


PLANTED: list[tuple[Callable[[Path], None], str]] = [
    (link_out, "spool: expected a plain file or a directory, got a link"),
    (link_in_spool, "key.spool: expected a plain file or a directory, got a link"),
    (pipe, "anomalies/x.jsonl: expected a plain file or a directory, got a pipe"),
    (hard_link, "anomalies/key.jsonl: it has another name"),
    pytest.param(
        device, "anomalies/zero.jsonl: expected a plain file or a directory, got a device",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="makes a device"),
    ),  # type: ignore[list-item]
    (huge, "anomalies/huge.jsonl: too large: 8589934592 bytes"),
    (odd_name, r"anomalies/a\u001b[31m\nb.jsonl: a name that Sentinel gives to nothing"),
    (pointing_state, ".daemon/state.json: not needed, and not believed"),
    (journal_link, ".daemon/journal.sqlite: expected a plain file or a directory, got a link"),
    (journal_with_a_view, ".daemon/journal.sqlite: expected tables and indexes, got also: view"),
    (journal_of_nothing, ".daemon/journal.sqlite: no SQLite database"),
    (deep, "folders deep"),
    (stranger, "Makefile: no part of a run"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "why"), PLANTED)
def test_what_is_planted_is_left_out_and_named(
    foreign: Path, tmp_path: Path, plant: Callable[[Path], None], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plant(foreign)
    before, around = state_of(foreign), state_of(tmp_path / "home")
    copy = tmp_path / "copy"

    run_cli(["open", "--untrusted", "--keep", str(copy), str(foreign)])

    out, err = capfd.readouterr()
    assert any(line.startswith("sentinel: left out: ") and why in line for line in err.splitlines()), err
    assert "SECRET" not in out + err and "\x1b" not in out + err
    assert state_of(foreign) == before and state_of(tmp_path / "home") == around
    for path in copy.rglob("*"):
        assert path.is_dir() or (path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1)
        assert b"SECRET" not in (path.read_bytes() if path.is_file() else b"")


def test_a_directory_that_is_a_link_and_a_verb_that_writes_are_refused(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(foreign)

    assert run_cli(["open", str(tmp_path / "link")]) == FOUND
    assert run_cli(["open", str(foreign), "serve"]) == BAD_USAGE
    assert run_cli(["open", str(foreign), "explian"]) == BAD_USAGE

    err = capsys.readouterr().err
    assert "expected a directory that is no link" in err
    assert '"serve": expected a verb that only reads, one of status, topk' in err and 'did you mean "explain"?' in err
