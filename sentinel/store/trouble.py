"""Errors of journals that cannot be opened, read or written: whether the disk or the file is at fault, and what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from pathlib import Path

from sentinel.errors import StoreError
from sentinel.store.disk import mount_point, nearest
from sentinel.store.lock_holders import holders_in_words

PROBE_BYTES = 65536
"""Bytes written to find out why SQLite could not write: more than the 32 KiB of shared memory it needs beside a journal."""

_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_RIGHTS = frozenset({errno.EACCES, errno.EPERM})
_DISK = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})
"""SQLite's codes of failures of the operating system, which do not say which call failed."""


def journal_trouble(path: Path, error: sqlite3.Error | OSError, *, read_only: bool = False) -> StoreError:
    """Return the error to raise when SQLite or the system failed at the journal `path`: where, what is wrong, what to do.

    Its advice is to move the file away only where the content is at fault. read_only: write nothing to find out.
    """
    return StoreError(f"{path}: {_words(path, error, read_only)}")


def disk_trouble(path: Path, error: OSError) -> StoreError:
    """Return the error to raise when the operating system refused `path`: where, what is wrong, what to do."""
    return StoreError(f"{path}: {_of_system(path, error)}")


def repair_words(journal: Path) -> str:
    """Return which command rebuilds a journal."""
    run = journal.parent.parent if journal.parent.name == ".daemon" else journal.parent.name
    return f"sentinel repair {run} rebuilds it from the run's spool and files"


def _words(path: Path, error: sqlite3.Error | OSError, read_only: bool) -> str:
    if isinstance(error, OSError):
        return _of_system(path, error)
    extended = getattr(error, "sqlite_errorcode", None) or 0
    code, name = extended & 0xFF, getattr(error, "sqlite_errorname", None) or "SQLite"
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        what = "is no journal" if code == sqlite3.SQLITE_NOTADB else "is damaged"
        return f"the file {what} ({error}); {repair_words(path)}"
    if code == sqlite3.SQLITE_FULL:
        return _of_system(path, OSError(errno.ENOSPC, str(error)))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        if who := holders_in_words(path):
            return f"it is held ({error}) by {who}"
        return f"another process holds it ({error}); is it being copied or looked into? try again when that has ended"
    if code in _DISK:
        if path.is_dir():
            return "expected a journal, got a directory; remove it, or give another --state-dir"
        found = _reading(path) if read_only else _probe(path)
        if found is not None:
            return ("SQLite makes a file beside it to read it: " if read_only else "") + _of_system(path, found)
        if code == sqlite3.SQLITE_IOERR:
            return _of_system(path, OSError(errno.EIO, f"{error}, {name}"))
        return f"it could not be opened ({error}, {name}); user {os.geteuid()} must own it and be let write there"
    return f"SQLite could not use it: {error} ({name}); try again, and please report it when it lasts"


def _of_system(path: Path, error: OSError) -> str:
    why = error.strerror or str(error)
    if error.errno in _ROOM:
        said = f"{why}{room_words(path)}"
        return (
            f"no room is left on its disk ({said}); free some, or give --state-dir DIR elsewhere; what was written is safe"
        )
    if error.errno == errno.EROFS:
        return f"its file system is read-only ({why}); mount it for writing, or give --state-dir DIR elsewhere"
    if error.errno in _RIGHTS:
        return f"user {os.geteuid()} may not write there ({why}); run as its owner, or give --state-dir DIR elsewhere"
    if error.errno == errno.EIO:
        return f"its disk failed ({why}); see what dmesg says of it, then try again: the file itself is not to blame"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"too many files are open ({why}); raise the limit (ulimit -n), or serve fewer runs"
    where = f"{error.filename}: " if error.filename and str(error.filename) != str(path) else ""
    return f"it could not be opened ({where}{why}); check the path, or give another --state-dir"


def room_words(path: Path) -> str:
    """Return which disk a path is on and how much of it is free, to stand behind something else; empty: not known."""
    try:
        stat = os.statvfs(nearest(path))
    except OSError:
        return ""
    free, total = (count * stat.f_frsize / 2**20 for count in (stat.f_bavail, stat.f_blocks))
    return f"; {mount_point(path)}: {free:,.1f} of {total:,.0f} MiB are free" if total else ""


def _probe(path: Path) -> OSError | None:
    """Return why nothing can be written where the journal is; None when it can."""
    try:
        if path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        with tempfile.TemporaryFile(dir=nearest(path.parent)) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _reading(path: Path) -> OSError | None:
    """Return why the journal cannot be read; SQLite makes a file of shared memory beside one that was left open."""
    try:
        with path.open("rb") as file:
            file.read(1)
        directory = os.statvfs(path.parent)
    except OSError as error:
        return error
    if directory.f_flag & os.ST_RDONLY:
        return OSError(errno.EROFS, os.strerror(errno.EROFS))
    if not os.access(path.parent, os.W_OK):
        return OSError(errno.EACCES, os.strerror(errno.EACCES))
    if directory.f_bavail * directory.f_frsize < PROBE_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None
