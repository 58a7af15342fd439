"""A copy of a run's directory that somebody else made: of what can be read without trusting them.

No link is followed and no pipe or device opened; each folder is entered by its descriptor, so that none can be exchanged on
the way. What lies where a run has nothing is not copied, nor what names other places (`state.json`) or opens doors (tokens).
The journal is copied where it is a database of plain tables.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from pathlib import Path

import msgspec

from sentinel.errors import StoreError
from sentinel.printable import printable
from sentinel.private_files import create_file

MAX_FILE_BYTES = 4 * 2**30
MAX_BYTES = 32 * 2**30
MAX_FILES = 200_000
MAX_DEPTH = 6
CHUNK_BYTES = 2**20

HISTORY = "history"
_FOLDERS = frozenset({"spool", "anomalies", "control", "acts", "attempts", "structure", "dumps"})
_FILES = frozenset({"incidents.jsonl"})
_STATE_FILES = frozenset({"journal.sqlite", "journal.sqlite-wal"})
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,-]{0,200}")
"""Names that Sentinel gives to files."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CopiedRun(msgspec.Struct):
    """What came of a copy."""

    num_files: int = 0
    num_bytes: int = 0
    left_out: list[str] = []
    """`PATH: why`, escaped."""


def copy_run(source: Path, target: Path) -> CopiedRun:
    """Copy what may be read of the run `source` into the new directory `target`. StoreError: `source` is no directory."""
    try:
        folder = os.open(source, _FOLDER_FLAGS)
    except OSError as error:
        raise StoreError(f"{printable(str(source))}: expected a directory that is no link, got: {error.strerror}") from error
    copied = CopiedRun()
    try:
        target.mkdir(mode=0o700)
        _copy(folder, target, copied, "", 0)
    finally:
        os.close(folder)
    _check_journal(target / ".daemon", copied)
    return copied


def _copy(folder: int, target: Path, copied: CopiedRun, inside: str, depth: int) -> None:
    for name in sorted(os.listdir(folder)):
        path = f"{inside}{name}"
        why = _why_not(folder, name, inside, depth)
        if not why and copied.num_files >= MAX_FILES:
            why = f"more than {MAX_FILES} files"
        if not why:
            why = _copy_one(folder, name, target, copied, path, depth)
        if why:
            copied.left_out.append(f"{printable(path)}: {why}")


def _why_not(folder: int, name: str, inside: str, depth: int) -> str:
    """Return why an entry is left out by its name and kind; empty: it is not."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    is_folder, is_file = stat.S_ISDIR(status.st_mode), stat.S_ISREG(status.st_mode)
    if not is_folder and not is_file:
        return f"expected a plain file or a directory, got {_kind(status.st_mode)}"
    if inside == ".daemon/":
        return "" if is_file and name in _STATE_FILES else "not needed, and not believed"
    if not inside:
        if is_folder and name == HISTORY:
            return "Parquet of others is not read here"
        is_known = name in (_FOLDERS | {".daemon"} if is_folder else _FILES)
        return "" if is_known else "no part of a run"
    if not _NAME.fullmatch(name):
        return "a name that Sentinel gives to nothing"
    return f"more than {MAX_DEPTH} folders deep" if is_folder and depth >= MAX_DEPTH else ""


def _copy_one(folder: int, name: str, target: Path, copied: CopiedRun, path: str, depth: int) -> str:
    """Copy an entry; return why it could not be, empty where it was."""
    try:
        opened = os.open(name, _FILE_FLAGS, dir_fd=folder)
    except OSError as error:
        return error.strerror or str(error)
    try:
        status = os.fstat(opened)
        if stat.S_ISDIR(status.st_mode):
            (target / name).mkdir(mode=0o700)
            _copy(opened, target / name, copied, f"{path}/", depth + 1)
            return ""
        if not stat.S_ISREG(status.st_mode):
            return f"expected a plain file, got {_kind(status.st_mode)}"
        if status.st_nlink != 1:
            return "it has another name, which may lie anywhere (a hard link)"
        if status.st_size > MAX_FILE_BYTES or copied.num_bytes + status.st_size > MAX_BYTES:
            return f"too large: {status.st_size} bytes"
        _copy_bytes(opened, target / name, status.st_size)
        copied.num_files += 1
        copied.num_bytes += status.st_size
        return ""
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(opened)


def _copy_bytes(source: int, target: Path, num_bytes: int) -> None:
    with os.fdopen(create_file(target, os.O_WRONLY | os.O_EXCL), "wb") as file:
        left = num_bytes
        while left and (chunk := os.read(source, min(left, CHUNK_BYTES))):
            file.write(chunk)
            left -= len(chunk)


def _check_journal(state: Path, copied: CopiedRun) -> None:
    """Remove a journal that is more than tables and indexes: a view or a trigger would run what its author wrote."""
    journal = state / "journal.sqlite"
    if not journal.exists():
        return
    try:
        connection = sqlite3.connect(journal)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            kinds = connection.execute("SELECT DISTINCT type, sql LIKE 'create virtual%' FROM sqlite_master").fetchall()
        finally:
            connection.close()
        odd = sorted({str(kind) for kind, is_virtual in kinds if kind not in ("table", "index") or is_virtual})
        why = f"expected tables and indexes, got also: {', '.join(odd)}" if odd else ""
    except sqlite3.Error as error:
        why = f"no SQLite database: {error}"
    if why:
        copied.left_out.append(f".daemon/journal.sqlite: {printable(why)}")
        for one in state.glob("journal.sqlite*"):
            one.unlink()


def _kind(mode: int) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a device"}
    return {**kinds, stat.S_IFCHR: "a device"}.get(stat.S_IFMT(mode), "something else")
