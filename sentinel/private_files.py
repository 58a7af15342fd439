"""Directories and files that only their owner may write, whatever the umask of the process that makes them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from sentinel.errors import StoreError


def make_directory(path: Path) -> None:
    """Make `path`, and each directory above it that is missing, with mode 0700; OSError when it cannot be made.

    `Path.mkdir(mode=0o700, parents=True)` gives its mode to the last level alone, and the umask takes bits from that.
    """
    missing = []
    at = path
    while not at.is_dir() and at != at.parent:
        missing.append(at)
        at = at.parent
    for one in reversed(missing):
        try:
            one.mkdir(mode=0o700)
        except FileExistsError as error:
            if not one.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(one)) from error
        else:
            one.chmod(0o700)


def create_file(path: Path | str, flags: int) -> int:
    """Return the descriptor of a file opened with `flags`, mode 0600 if it is made now; OSError as `os.open`."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not os.fstat(fd).st_mode & stat.S_IRUSR:  # the umask hid it from us
            os.fchmod(fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    return fd


def tighten(path: Path) -> str:
    """Take from others the right to write a directory of ours; return a sentence that says so, empty where none had it.

    A directory of another user's, or one whose mode cannot be changed, is left to `refuse_foreign`.
    """
    try:
        status = path.stat()
        mode = stat.S_IMODE(status.st_mode)
        wanted = (mode | stat.S_IRWXU) & ~(stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or wanted == mode:
            return ""
        path.chmod(wanted)
    except OSError:
        return ""
    why = "others could write it" if mode & 0o022 else "we could not use it"
    return f"{path}: its mode was {mode:04o} ({why}), and is {wanted:04o} now"


def refuse_foreign(path: Path, user: int | None = None, *, is_shared: bool = False) -> None:
    """Raise StoreError when `path` is not ours or can be written by others: what lies in it could be forged.

    user: the user id that must own it; None: the one this process runs as.
    is_shared: others may write it, as a team's directory of runs, where each run is looked at by itself.
    """
    owner = os.geteuid() if user is None else user
    try:
        status = path.stat()
    except OSError as error:
        raise StoreError(f"{path}: expected a directory, got: {error.strerror}; check the path") from error
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{path}: expected a directory, got a file; name the run's directory")
    if status.st_uid != owner:
        raise StoreError(
            f"{path}: expected a directory owned by user {owner}, got one owned by {status.st_uid}; "
            "run the daemon as the user who trains"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
        who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
        raise StoreError(
            f"{path}: expected a directory that only its owner may write, got mode "
            f"{stat.S_IMODE(status.st_mode):04o}, which {who} may write; run: chmod go-w {path}"
        )
