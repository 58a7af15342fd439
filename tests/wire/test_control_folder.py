from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from sentinel.command import Command, DisableMonitoring, EnableMonitoring, WithdrawCommand
from sentinel.wire.control_folder import ControlFolder

SECOND = 1_000_000_000


class Trainer:
    """Polls a control folder with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self.refused: list[str] = []
        self.control = ControlFolder(folder, self.refused.append)
        self.now = folder.stat().st_mtime_ns

    def poll(self) -> list[Command]:
        self.now += 2 * SECOND
        return self.control.poll(self.now)

    def give(self, command: Command, name: str | None = None) -> Path:
        path = self.folder / (name or f"{command.seq:06d}.json")
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(command))
        fresh.chmod(0o600)
        fresh.rename(path)
        return path


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "control")


def enable(seq: int) -> EnableMonitoring:
    return EnableMonitoring(id=f"c{seq}", seq=seq, at_step=10)


def test_each_command_is_given_once_in_the_order_of_its_number(trainer: Trainer) -> None:
    commands: list[Command] = [
        enable(1),
        DisableMonitoring(id="c2", seq=2, at_step=20),
        WithdrawCommand(id="c10", seq=10, withdraws="c1"),
    ]
    for command in reversed(commands):
        trainer.give(command)

    assert trainer.poll() == commands
    assert trainer.poll() == []
    trainer.give(enable(11))
    assert trainer.poll() == [enable(11)]
    assert trainer.refused == []


def test_a_quiet_folder_is_not_listed_and_a_changed_one_is(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.poll()
    listed: list[object] = []
    names = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or names(path))

    for _ in range(10):
        trainer.now += 20_000_000
        trainer.control.poll(trainer.now)
    assert listed == []
    trainer.give(enable(1))

    assert trainer.control.poll(trainer.now) == [enable(1)]


def test_a_folder_that_is_not_there_yet_is_no_fault(tmp_path: Path) -> None:
    refused: list[str] = []

    assert ControlFolder(tmp_path / "control", refused.append).poll(0) == []
    assert refused == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"type": "EnableMonit', "in JSON"),
        (b'{"type": "FormatDisk", "id": "x", "seq": 1}', "FormatDisk"),
        (b"\xff\xfe", "in JSON"),
        (msgspec.json.encode(enable(7)), "expected seq 1 as its name says, got 7"),
        (b'{"type": "EnableMonitoring", "id": "x", "seq": 1, "at_step": 1' + b"0" * 23 + b"}", "at_step must be in [0, "),
    ],
)
def test_what_is_no_command_is_refused_once(trainer: Trainer, text: bytes, why: str) -> None:
    path = trainer.folder / "000001.json"
    path.write_bytes(text)
    path.chmod(0o600)

    assert trainer.poll() == trainer.poll() == []
    assert len(trainer.refused) == 1
    assert "control file 000001.json refused" in trainer.refused[0]
    assert why in trainer.refused[0]
    trainer.give(enable(1))
    assert trainer.poll() == [enable(1)], "put right, it counts"


def test_foreign_control_file_refused(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    trainer.give(enable(1))

    assert trainer.poll() == []
    assert "expected owner uid" in trainer.refused[0]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_others_may_write_is_refused(trainer: Trainer, mode: int) -> None:
    trainer.give(enable(1)).chmod(mode)

    assert trainer.poll() == trainer.poll() == []
    assert len(trainer.refused) == 1
    assert "chmod go-w" in trainer.refused[0]


def test_a_folder_others_may_write_is_refused(trainer: Trainer) -> None:
    trainer.give(enable(1))
    trainer.folder.chmod(0o770)

    assert trainer.poll() == trainer.poll() == []
    assert len(trainer.refused) == 1
    trainer.folder.chmod(0o700)
    assert trainer.poll() == [enable(1)]


def test_links_pipes_and_folders_are_refused(trainer: Trainer, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_bytes(msgspec.json.encode(enable(1)))
    (trainer.folder / "000001.json").symlink_to(secret)
    os.mkfifo(trainer.folder / "000002.json", 0o600)
    (trainer.folder / "000003.json").mkdir()

    assert trainer.poll() == trainer.poll() == []
    assert len(trainer.refused) == 3


def test_other_names_are_not_looked_at(trainer: Trainer) -> None:
    for name in ("000001.json.new", ".000001.json", "readme", "x1.json"):
        (trainer.folder / name).write_text("nonsense")

    assert trainer.poll() == []
    assert trainer.refused == []


def test_a_huge_file_is_refused(trainer: Trainer) -> None:
    path = trainer.folder / "000001.json"
    path.write_bytes(b" " * (2**20 + 1))
    path.chmod(0o600)

    assert trainer.poll() == []
    assert "expected at most 1048576 bytes" in trainer.refused[0]
