"""`sentinel trace`: an order that a run obeys, and what it shows of the traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.cli.main import run_cli
from sentinel.command import TraceTensors
from sentinel.control.command_files import CommandFiles

from ..daemon.test_trace_api import EVIL, write
from ..support.serving import small_run


def test_an_order_says_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "r").write(3)

    code = run_cli([
        "trace", str(tmp_path / "r"), "--kinds", "activation,attention", "--targets", "layers.0,head",
        "--compressor", "top_k:5", "--softmax", "--tokens", "--at-step", "20", "--for-steps", "7", "--step-interval", "2",
        "--ranks", "0,1", "--json",
    ])  # fmt: skip

    assert code in (0, 1)  # Whether the recorded ranks still count as there.
    said = json.loads(capsys.readouterr().out)
    ((_, command),) = CommandFiles(tmp_path / "r" / "control").fresh()
    assert isinstance(command, TraceTensors)
    assert said["id"] == command.id
    assert (command.at_step, command.for_steps, command.step_interval, command.ranks) == (20, 7, 2, (0, 1))
    assert (command.kinds, command.targets) == (("activation", "attention"), ("layers.0", "head"))
    one = command.trace.compressor
    assert (one.name, one.size, one.softmax, command.trace.tokens) == ("top_k", 5, True, True)


@pytest.mark.parametrize(("words", "says"), [
    (["--compressor", "tiles"], 'unknown compressor'), (["--compressor", "pca:x"], "NAME:SIZE"),
    (["--compressor", "tile:100000"], "1 to 512"), (["--kinds", "actv"], "unknown kind"), (["--ranks", "one"], "--ranks"),
])  # fmt: skip
def test_what_is_typed_wrong(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "r").write(3)

    assert run_cli(["trace", str(tmp_path / "r"), *words]) == 2
    assert says in capsys.readouterr().err
    assert not list((tmp_path / "r").glob("control/*.json"))


def test_what_lies_there_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "r").write(3)
    assert run_cli(["trace", str(tmp_path / "r"), "--show"]) == 1
    assert "no traces there" in capsys.readouterr().err
    write(tmp_path / "r", ranks=1, steps=2, name=EVIL)

    assert run_cli(["trace", str(tmp_path / "r"), "--show"]) == 0

    told = capsys.readouterr().out
    assert "step 1 rank 0 activation of" in told
    assert "(4x96): top_k [2, 3], 1 to 1, mean 1, 1 not finite" in told
    assert "\x1b" not in told
    assert run_cli(["trace", str(tmp_path / "r"), "--show", "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["values"][0] == [None, 0.0, 0.0] and first["indices"] == [[0, 1, 2], [3, 4, 5]]
