"""users.conf: whom a nats-server that includes it lets in: nodes that may speak of any run, and nodes of one run each."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
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


def let_in(directory: Path, nodes: Sequence[str], run: str | None = None) -> None:
    """Have `users.conf` let in these nodes and no others, in what concerns one run; and write the logins that are missing.

    run: the run of which alone they may speak; None: nodes that may speak of any. Those of other runs stay as they are.
    ConfigError, OSError.
    """
    wanted = [user_name(node, run) for node in nodes]
    of_run = "" if run is None else folder_name(run)
    make_directory(directory)
    with os.fdopen(create_file(directory / NAME, os.O_RDWR | os.O_NOFOLLOW), "r+") as file:
        # Of two jobs that begin at once, the second waits for the first.
        fcntl.flock(file, fcntl.LOCK_EX)
        kept = [name for name in users_in(file.read()) if name.partition("@")[2] != of_run]
        text = write_users(directory / CREDENTIALS, [*kept, *wanted])
        file.seek(0)
        file.truncate()
        file.write(text)


def users_in(text: str) -> list[str]:
    """Return the names of the users of nodes that a `users.conf` lets in. ConfigError: it is not as we write it."""
    try:
        return [msgspec.json.decode(found, type=str) for found in _OWN_USER.findall(text)]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{NAME}: expected it as it was written, got a name that cannot be read: {error}") from error
