"""Why a journal cannot be used, as people are told: only a file at fault is to be moved away."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sentinel.errors import StoreError
from sentinel.store import trouble
from sentinel.store.journal import Journal
from sentinel.store.lock import RunLock
from sentinel.store.trouble import journal_trouble

from ..support.open_files import open_files

pytestmark = pytest.mark.slow

REAL = sqlite3.OperationalError


def sqlite_error(name: str) -> sqlite3.Error:
    error = REAL("what SQLite says")
    error.sqlite_errorcode, error.sqlite_errorname = getattr(sqlite3, name), name
    return error


@pytest.mark.parametrize(
    ("error", "probed", "words"),
    [
        (sqlite_error("SQLITE_FULL"), None, "no room is left on its disk"),
        (sqlite_error("SQLITE_IOERR_SHMSIZE"), errno.ENOSPC, "no room is left on its disk"),
        (sqlite_error("SQLITE_IOERR_WRITE"), errno.EDQUOT, "no room is left on its disk"),
        (sqlite_error("SQLITE_IOERR_WRITE"), errno.EIO, "its disk failed (Input/output error); see what dmesg says"),
        (sqlite_error("SQLITE_IOERR_FSYNC"), None, "its disk failed (what SQLite says, SQLITE_IOERR_FSYNC)"),
        (sqlite_error("SQLITE_CANTOPEN"), errno.EROFS, "its file system is read-only"),
        (sqlite_error("SQLITE_READONLY"), errno.EACCES, "may not write there"),
        (sqlite_error("SQLITE_CANTOPEN"), None, "it could not be opened"),
        (sqlite_error("SQLITE_CANTOPEN"), errno.EMFILE, "too many files are open"),
        (sqlite_error("SQLITE_BUSY"), None, "another process holds it"),
        (sqlite_error("SQLITE_PROTOCOL"), None, "SQLite could not use it: what SQLite says (SQLITE_PROTOCOL)"),
        (OSError(errno.ENOSPC, "No space left on device"), None, "no room is left on its disk (No space left on device; "),
        (OSError(errno.ENAMETOOLONG, "File name too long"), None, "it could not be opened (File name too long)"),
    ],
)  # fmt: skip
def test_what_the_disk_did_is_told_as_that_and_nobody_is_told_to_move_the_file(
    error: sqlite3.Error | OSError,
    probed: int | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = None if probed is None else OSError(probed, os.strerror(probed))
    monkeypatch.setattr(trouble, "_probe", lambda path: found)

    reported = str(journal_trouble(tmp_path / "journal.sqlite", error))

    assert reported.startswith(f"{tmp_path}/journal.sqlite: ") and words in reported
    assert "move" not in reported


@pytest.mark.parametrize(("name", "what"), [("SQLITE_NOTADB", "is no journal"), ("SQLITE_CORRUPT_INDEX", "is damaged")])
def test_a_file_at_fault_is_to_be_rebuilt(name: str, what: str, tmp_path: Path) -> None:
    reported = str(journal_trouble(tmp_path / "journal.sqlite", sqlite_error(name)))

    assert reported.endswith(
        f"the file {what} (what SQLite says); sentinel repair {tmp_path.name} rebuilds it from the run's spool and files"
    )


def test_a_damaged_journal_is_told_from_a_torn_one_and_neither_leaks_a_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.values.put("a", "b" * 100_000)
    journal.close()
    path.write_bytes(path.read_bytes()[:5000])

    for _ in range(3):
        with pytest.raises(StoreError, match="the file is damaged"):
            Journal(path)

    assert open_files(str(tmp_path)) == []


def test_a_database_of_another_program_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE songs(name)")
    other.commit()

    with pytest.raises(StoreError, match='a database of something else, with a table "songs"'):
        Journal(path)

    assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]
    other.close()


def test_a_lock_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match=r"file/state/lock: it could not be opened \(.*file: \w+"):
        RunLock(tmp_path / "file" / "state", "run x")


FULL = """
import errno, os, sys
from pathlib import Path
from sentinel.errors import StoreError
from sentinel.store.journal import Journal

path = Path(sys.argv[1]) / "state" / "journal.sqlite"
Journal(path).close()
with open(path.parent / "fill", "wb", buffering=0) as fill:
    try:
        while True:
            fill.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
def attempt():
    try:
        Journal(path).close()
        return "opened"
    except StoreError as error:
        return str(error)
print(attempt())
(path.parent / "fill").unlink()
print(attempt())
os.system(f"mount -o remount,ro {sys.argv[1]}")
print(attempt())
"""


def test_a_disk_that_is_really_full_or_read_only_is_told_and_used_again_when_it_is_not(tmp_path: Path) -> None:
    own = ["unshare", "--mount", "sh", "-c"]
    try:
        subprocess.run([*own, f"mount -t tmpfs -o size=1m none {tmp_path}"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a file system of its own")
    script = f'mount -t tmpfs -o size=1m none {tmp_path} && "$0" -c "$1" {tmp_path}'

    done = subprocess.run([*own, script, sys.executable, textwrap.dedent(FULL)], capture_output=True, text=True)

    full, again, read_only = done.stdout.splitlines()
    assert "no room is left on its disk" in full and "move" not in full
    assert again == "opened"
    assert "its file system is read-only" in read_only
