"""What a person asks for over HTTP becomes a command in the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.command import DescribeStructure, DumpTensors
from sentinel.control.commands import RunCommands
from sentinel.control.config import ControlConfig
from sentinel.daemon.commanding import Commanding
from sentinel.errors import ConfigError
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths


@pytest.fixture
def commanding(tmp_path: Path) -> Commanding:
    run_dir = tmp_path / "run"
    (run_dir / ".daemon").mkdir(parents=True)
    return Commanding(RunPaths.of(run_dir), ControlConfig(), Journal(run_dir / ".daemon" / "journal.sqlite"))


def known_commands(tmp_path: Path) -> list[object]:
    commands = RunCommands(tmp_path / "run")
    commands.scan(1.0)
    return [status.command for status in commands.known.statuses()]


def test_a_dump_is_ordered(commanding: Commanding, tmp_path: Path) -> None:
    request = {"kinds": ["param"], "targets": ["head"], "at_step": 9, "for_steps": 4, "step_interval": 2, "first_n": 8}

    commanding.order("dump", request, 1.0)

    (command,) = known_commands(tmp_path)
    assert isinstance(command, DumpTensors)
    assert (command.kinds, command.targets, command.at_step) == (("param",), ("head",), 9)
    assert (command.for_steps, command.step_interval, command.first_n) == (4, 2, 8)


def test_a_number_that_no_step_has_is_refused_in_words(commanding: Commanding) -> None:
    with pytest.raises(ConfigError, match=r"at_step must be in \[0, 1099511627776\], got a number of 77 bits"):
        commanding.order("enable", {"at_step": 10**23}, 1.0)


def test_the_structure_is_asked_for(commanding: Commanding, tmp_path: Path) -> None:
    commanding.order("describe", {"ranks": [1]}, 1.0)

    (command,) = known_commands(tmp_path)
    assert isinstance(command, DescribeStructure)
    assert command.ranks == (1,)


@pytest.mark.parametrize("request_", [{"step_interval": 0}, {"first_n": 0}, {"for_steps": 0}, {"kinds": ["x"]}, {"all": 1},
    {"at_step": 10**23}, {"at_step": 2**40 + 1}, {"at_step": -1}, {"for_steps": 10**23}, {"ranks": [2**40]}])  # fmt: skip
def test_nonsense_is_refused(commanding: Commanding, tmp_path: Path, request_: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        commanding.order("dump", request_, 1.0)

    assert not known_commands(tmp_path)
