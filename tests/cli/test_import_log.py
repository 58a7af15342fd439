"""`sentinel import log`: a log becomes a run that is judged as a back-test of the log is, and that all verbs read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, run_cli

from ..support.results import anomalies, incidents
from ..support.serving import judge_run

pytestmark = pytest.mark.slow


def write_log(path: Path, rows: list[tuple[object, ...]], header: str = "step,train/loss,lr") -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def imported(tmp_path: Path, log: Path, *options: str) -> Path:
    run_dir = tmp_path / "run"
    assert run_cli(["import", "log", str(log), "-o", str(run_dir), *options]) == CLEAN
    return run_dir


def test_it_is_judged_as_the_log_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = [2.0 + 0.02 * math.sin(7 * at) for at in range(300)]
    loss[200], loss[250] = math.nan, 40.0
    log = write_log(tmp_path / "log.csv", [(at, one, 1e-3) for at, one in enumerate(loss)])

    run_dir = imported(tmp_path, log)
    judge_run(run_dir, is_over=True)
    capsys.readouterr()
    assert run_cli(["rules", "backtest", "--json", str(log)]) == FOUND
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    expected = {(one["step"], one["rule"], one["channel"], one["severity"]) for one in told}
    found = {(one.step, one.rule, one.tag_name, one.severity.value) for one in anomalies(run_dir) if one.event == "onset"}
    assert expected <= found and (200, "non-finite", "loss", "critical") in found
    assert {step for step, *_ in found} == {step for step, *_ in expected}, "and nothing else is said, of the rank neither"
    assert all(one.root_name.startswith("loss") for one in incidents(run_dir) if one.severity.value != "info")
    assert run_cli(["report", str(run_dir), "-o", str(tmp_path / "report.html")]) == CLEAN
    assert "NaN born in loss" in (tmp_path / "report.html").read_text()


def test_other_verbs_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = imported(tmp_path, write_log(tmp_path / "log.csv", [(at, 2.0, 0.5 * at) for at in range(5)]))
    judge_run(run_dir, is_over=True)
    capsys.readouterr()

    assert run_cli(["export", str(run_dir), "--format", "jsonl", "--kind", "scalar"]) == CLEAN
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["step"], one["name"], one["value"]) for one in rows if one["name"] == "lr"] == [
        (at, "lr", 0.5 * at) for at in range(5)
    ]


def test_steps_that_go_back_are_attempts_and_rows_of_one_step_are_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*((at, 2.0, "") for at in range(60)), *((at, 3.0, "") for at in range(40, 80)), (79, "", 0.1), (79, 4.0, "")]
    log = write_log(tmp_path / "log.csv", rows)

    run_dir = imported(tmp_path, log, "--json")

    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["num_rows"], told["num_steps"], told["num_attempts"]) == (102, 100, 2)
    assert "2 rows are of a step that has one already: the later numbers count" in err
    assert told["channels"]["loss"] == "train/loss"
    judge_run(run_dir, is_over=True)
    capsys.readouterr()
    assert run_cli(["export", str(run_dir), "--format", "jsonl", "--kind", "scalar"]) == CLEAN
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    newest = {(one["step"], one["name"]): (one["attempt"], one["value"]) for one in rows}
    assert newest[39, "loss"] == (0, 2.0) and newest[40, "loss"] == (1, 3.0)
    assert newest[79, "loss"] == (1, 4.0) and newest[79, "lr"] == (1, 0.1)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "log.csv"),
        ([(-3, 2.0, 1.0), (-2, 2.0, 1.0)], "expected steps that rise from 0"),
        ([(at % 2, 2.0, 1.0) for at in range(60)], "expected steps that rise from 0"),
        ([(0, "x", 1.0)], "expected a number"),
    ],
)
def test_what_is_no_run_leaves_nothing(
    rows: list[tuple[object, ...]], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "log.csv", rows)

    assert run_cli(["import", "log", str(log), "-o", str(tmp_path / "runs" / "run")]) in (FOUND, BAD_USAGE)

    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*")) and not list(tmp_path.glob("runs/.*"))


def test_a_run_that_is_there_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "log.csv", [(0, 2.0, 1.0)])
    run_dir = imported(tmp_path, log)

    assert run_cli(["import", "log", str(log), "-o", str(run_dir)]) == BAD_USAGE
    assert "expected no such run yet" in capsys.readouterr().err


def test_names_that_move_a_cursor_reach_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "\x1b[31m<b>.csv"
    write_log(log, [(at, 2.0, 1.0) for at in range(5)], header="step,loss,\x1b]0;owned\x07")

    run_dir = imported(tmp_path, log)

    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and run_dir.exists()
