"""What people do about incidents: asked for rightly or refused by name, left atomically, strangers' files not taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.control.acts import ActInbox, ActRequest, leave_act
from sentinel.errors import ConfigError

NOW = 1_800_000_000.0


def asked(**fields: Any) -> ActRequest:
    return ActRequest(**{"incident": "i0", "act": "ack", "who": "ana", **fields})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"act": "snooze"}, 'act: expected ack, resolve, reopen, got "snooze"'),
        ({"who": " "}, "who: expected the name of whoever does this"),
        ({"why": "x" * 501}, "why: expected at most 500 characters, got 501"),
        ({"act": "resolve", "until": NOW + 5}, "until: only an acknowledgement runs out, not resolve"),
        ({"until": NOW - 5}, "until: expected a time in the year ahead, got -5 s from now"),
        ({"until": NOW + 1e9}, "until: expected a time in the year ahead"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        asked(**fields).begun(NOW)


def test_acts_wait_in_order_until_they_are_taken_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        acts = [asked(why=str(n)).begun(NOW + n) for n in (2, 0, 1)]
        for one in acts:
            leave_act(tmp_path, one)
    finally:
        os.umask(before)
    refused: list[str] = []
    inbox = ActInbox(tmp_path, refused.append)

    assert [act.why for _, act in inbox.waiting()] == ["0", "1", "2"]
    for path, _ in inbox.waiting()[:2]:
        inbox.take(path)
    assert [act.why for _, act in inbox.waiting()] == ["2"]
    assert refused == []


def test_no_folder_means_nothing_waits(tmp_path: Path) -> None:
    assert ActInbox(tmp_path, pytest.fail).waiting() == []


def test_strange_files_are_refused_once_and_hide_no_other(tmp_path: Path) -> None:
    good = leave_act(tmp_path, asked().begun(NOW))
    folder = good.parent
    (folder / "0.json").write_bytes(b"{torn")
    (folder / "1.json").write_bytes(msgspec.json.encode(asked().begun(NOW)))
    (folder / "1.json").chmod(0o666)
    (folder / "2.json").symlink_to(good)
    os.mkfifo(folder / "3.json")
    (folder / "0.json").chmod(0o600)
    (folder / "note.txt").write_text("not one of ours")
    refused: list[str] = []
    inbox = ActInbox(tmp_path, refused.append)

    assert [path for path, _ in inbox.waiting() + inbox.waiting()] == [good, good]
    assert [Path(one.partition(":")[0]).name for one in refused] == ["0.json", "1.json", "2.json", "3.json"]
    assert "expected it writable by its owner only" in refused[1]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = leave_act(tmp_path, asked().begun(NOW)).parent
    folder.chmod(0o777)
    refused: list[str] = []

    assert ActInbox(tmp_path, refused.append).waiting() == []
    assert len(refused) == 1
