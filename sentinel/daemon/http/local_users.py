"""Which other people use this machine: whatever listens on loopback answers them too."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterable
from pathlib import Path

FIRST_PERSON, NOBODY = 1000, 65534
"""User ids of people, by the convention of Linux distributions (`UID_MIN` of login.defs); below are services."""
NO_SHELLS = frozenset({"nologin", "false", "sync", "shutdown", "halt"})


def other_people(
    own: int | None = None, accounts: Iterable[pwd.struct_passwd] | None = None, processes: Path = Path("/proc")
) -> list[str]:
    """Return the names of people other than ourselves who could log in here, or who run something now, sorted.

    own: our user id. A directory server (LDAP) need not list its users; those that are here have processes.
    """
    own = os.geteuid() if own is None else own
    accounts = pwd.getpwall() if accounts is None else accounts
    names = {
        one.pw_uid: one.pw_name
        for one in accounts
        if FIRST_PERSON <= one.pw_uid != NOBODY and one.pw_shell and Path(one.pw_shell).name not in NO_SHELLS
    }
    for entry in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            user = entry.stat().st_uid
            if FIRST_PERSON <= user != NOBODY:
                names.setdefault(user, f"user {user}")
    return sorted(name for user, name in names.items() if user != own)
