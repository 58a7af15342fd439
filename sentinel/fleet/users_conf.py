"""users.conf: whom a nats-server that includes it lets in: nodes that may speak of any run, and nodes of one run each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError
from sentinel.fleet.broker_users import user_name, write_users
from sentinel.private_files import create_file, make_directory
from sentinel.run_name import folder_name

NAME = "users.conf"
CREDENTIALS = "credentials"
_OWN_USER = re.compile(r'^    users: \[\{ user: ("(?:[^"\\]|\\.)*"), ', re.MULTILINE)
"""The line by which `accounts` names the user of a node."""
_OWN_ACCOUNT = re.compile(r'^  "NODE_', re.MULTILINE)
"""The line with which the account of a node begins, which has one such user."""
_WHOLE = re.compile(r"^accounts \{\s*$.*^\}\s*\Z", re.MULTILINE | re.DOTALL)
"""The first line of `accounts` and the last: no other is a brace alone."""


def let_in(directory: Path, nodes: Sequence[str], run: str | None = None) -> None:
    """Have `users.conf` let in these nodes and no others, in what concerns one run; and write the logins that are missing.

    run: the run of which alone they may speak; None: nodes that may speak of any. Those of other runs stay as they are.
    ConfigError, OSError: the file stands as it was.
    """
    wanted = [user_name(node, run) for node in nodes]
    of_run = "" if run is None else folder_name(run)
    make_directory(directory)
    path = directory / NAME
    with _locked(directory):
        kept = [name for name in users_in(_read_whole(path)) if name.partition("@")[2] != of_run]
        _replace(path, write_users(directory / CREDENTIALS, [*kept, *wanted]))


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Wait until no other process changes the file: of two jobs that begin at once, the second goes on from the first's.

    Each writes another file in its place, so that it cannot be the one that is locked.
    """
    fd = create_file(directory / f".{NAME}.lock", os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read_whole(path: Path) -> str:
    """Return what is in the file; empty: there is none. ConfigError: a part of it is missing, and with it users."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return ""
    if _is_torn(data):
        found = f"{len(data)} bytes that are not, or not all, of that form" if data else "an empty file"
        raise ConfigError(
            f"{path}: expected the users that were let in so far, as `sentinel fleet users` writes them, got {found}; put a "
            "copy of it back, or delete it and name all nodes again, those of single runs with --run: logins that are there "
            "keep their passwords"
        )
    return data.decode()


def _is_torn(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return True
    return _WHOLE.search(text) is None or len(_OWN_ACCOUNT.findall(text)) != len(_OWN_USER.findall(text))


def _replace(path: Path, text: str) -> None:
    """Write the file anew: there is the former one or the new one, whatever fails. It keeps its owner and mode."""
    draft = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(create_file(draft, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "w", encoding="utf-8") as file:
            with contextlib.suppress(FileNotFoundError):
                former, ours = path.stat(), os.fstat(file.fileno())
                # A server that runs as another user reads it by its group.
                if (former.st_uid, former.st_gid) != (ours.st_uid, ours.st_gid):
                    os.fchown(file.fileno(), former.st_uid, former.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(former.st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def users_in(text: str) -> list[str]:
    """Return the names of the users of nodes that a `users.conf` lets in. ConfigError: it is not as we write it."""
    try:
        return [msgspec.json.decode(found, type=str) for found in _OWN_USER.findall(text)]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{NAME}: expected it as it was written, got a name that cannot be read: {error}") from error
