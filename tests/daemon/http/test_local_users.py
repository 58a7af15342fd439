"""Whether other people share the machine."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from sentinel.daemon.http.local_users import other_people


def account(name: str, user: int, shell: str = "/bin/bash") -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", user, user, "", f"/home/{name}", shell))


ROOT, SERVICE, NOBODY = account("root", 0), account("www-data", 33), account("nobody", 65534)


@pytest.mark.parametrize(
    ("own", "accounts", "others"),
    [
        (1000, [ROOT, SERVICE, NOBODY, account("ada", 1000)], []),
        (1000, [account("ada", 1000), account("bob", 1001), account("zoe", 1002, "/bin/zsh")], ["bob", "zoe"]),
        (1000, [account("ada", 1000), account("bot", 1001, "/usr/sbin/nologin"), account("old", 1002, "/bin/false")], []),
        (0, [ROOT, account("ada", 1000)], ["ada"]),
        (0, [ROOT, SERVICE, NOBODY], []),
    ],
)
def test_people_are_accounts_that_can_log_in(
    own: int, accounts: list[pwd.struct_passwd], others: list[str], tmp_path: Path
) -> None:
    assert other_people(own, accounts, tmp_path) == others


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_people_of_a_directory_server_are_found_by_what_they_run(tmp_path: Path) -> None:
    for process, user in ((17, 4711), (18, 0), (19, 33), (20, 1000)):
        (tmp_path / str(process)).mkdir()
        os.chown(tmp_path / str(process), user, user)

    assert other_people(1000, [], tmp_path) == ["user 4711"]
