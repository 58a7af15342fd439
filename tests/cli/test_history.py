"""`sentinel history push`: what is typed, what is said, and what `sentinel sql` then reads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sentinel.cli.main import run_cli

from ..history.test_writer import write, writing


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with writing(tmp_path / "run") as one:
        write(one, 1, 8)
    return tmp_path / "run"


def test_a_run_is_pushed_and_asked_where_it_lies_then(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/runs"

    assert run_cli(["history", "push", str(run), url]) == 0
    assert f"{url}/run: steps up to 7; " in capsys.readouterr().out
    assert run_cli(["history", "push", str(run), url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["url"], told["files"], told["last_step"]) == (f"{url}/run", 0, 7)
    assert run_cli(["sql", f"{url}/run", "SELECT run, max(step) AS last FROM steps GROUP BY run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "run", "last": 7}


def test_it_is_repeated_whatever_goes_wrong_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            (run / "history").rename(run / "gone")
        elif len(waited) == 2:
            (run / "gone").rename(run / "history")
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)

    assert run_cli(["history", "push", str(run), f"file://{tmp_path}/runs", "--every", "2min"]) == 130

    told = capsys.readouterr()
    assert waited == [120.0] * 3 and told.out.count("\n") == 1
    assert "expected a run with a history" in told.err and told.err.count("sentinel: ") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "bucket/runs"], '"bucket/runs": expected the URL of a directory of runs'),
        (["{run}", "s3://AKIA:hunter2@bucket/runs"], "expected a URL without credentials"),
        (["{run}", "memory://runs", "--every", "often"], '--every: expected a time like 60s, 10min, got "often"'),
    ],
)
def test_what_is_typed_wrong_is_said(
    run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["history", "push", *(one.format(run=run) for one in arguments)]) == 2

    told = capsys.readouterr().err
    assert words in told and "hunter2" not in told
