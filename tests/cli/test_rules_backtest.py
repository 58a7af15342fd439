"""`sentinel rules backtest`: what a pack would have said of logs and runs, and of two packs over both."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sentinel.cli.main import run_cli
from sentinel.logs.log_file import read_log
from sentinel.logs.views import log_views
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.testing import BlowUp, LossJump, Nan, SyntheticRun

from ..support.results import result_bytes
from ..support.serving import judge_run, loaded_packs

pytestmark = pytest.mark.slow

SPIKE, NUM_ROWS = 150, 200


def losses(num_rows: int = NUM_ROWS, spikes: Sequence[int] = (SPIKE,), seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = 2.0 * np.exp(rng.normal(0.0, 0.02, num_rows))
    values[list(spikes)] *= 2.5
    return values


def write_csv(path: Path, values: Sequence[float], first_step: int = 0, every: int = 10) -> Path:
    lines = [f"{first_step + every * at},{value!r},{0.5 + 0.01 * (at % 7)}" for at, value in enumerate(map(float, values))]
    path.write_text("step,loss,grad_norm\n" + "\n".join(lines) + "\n")
    return path


def alarms(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run_cli(["rules", "backtest", *map(str, arguments), "--json"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_alarm_says_file_channel_row_step_rule_severity_and_diagnosis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / "a.csv", losses())

    (alarm,) = alarms(capsys, path)

    assert {key: alarm[key] for key in ("file", "channel", "i", "step", "rule", "severity")} == {
        "file": "a.csv", "channel": "loss", "i": SPIKE, "step": 10 * SPIKE, "rule": "loss-spike", "severity": "critical",
    }  # fmt: skip
    assert alarm["verdict"] in ("batch", "model", "precision", "hardware", "unknown") and alarm["incident"]
    assert alarm["score"] > 1.0 and alarm["value"] > 2 * alarm["baseline"]


def test_a_healthy_log_is_clean_and_all_of_it_was_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv(tmp_path / "a.csv", losses(spikes=()))

    assert run_cli(["rules", "backtest", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and f"1 subject, {NUM_ROWS} rows judged: 0 alarms" in captured.err

    engine = Engine(load_pack())
    for view in log_views(read_log(path), "a"):
        engine.judge(view)
    assert engine.num_points_judged["loss-spike"] == NUM_ROWS and engine.num_points_judged["grad-norm-spike"] == NUM_ROWS


def test_nothing_of_the_rows_behind_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = losses(spikes=(60, 100, 150))
    whole = alarms(capsys, write_csv(tmp_path / "a.csv", values))

    for length in (61, 101, 149):
        cut = alarms(capsys, write_csv(tmp_path / "a.csv", values[:length]))
        assert cut == [alarm for alarm in whole if alarm["i"] < length]
    assert {60, 100, 150} <= {alarm["i"] for alarm in whole}


def test_forms_of_one_log_give_the_same_alarms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = losses()
    values[170:172] = math.nan
    write_csv(tmp_path / "a.csv", values)
    rows = [{"step": 10 * at, "loss": float(value), "grad_norm": 0.5 + 0.01 * (at % 7)} for at, value in enumerate(values)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    line = "step {step} | loss {loss} | norm {grad_norm} |\n"
    (tmp_path / "a.log").write_text("".join(line.format(**row) for row in rows))

    found = {path.name: alarms(capsys, path) for path in sorted(tmp_path.iterdir())}

    keys = ("channel", "i", "step", "rule", "severity")
    reported = [[tuple(one[key] for key in keys) for one in each] for each in found.values()]
    assert len(found) == 4 and reported[0] == reported[1] == reported[2] == reported[3]
    assert ("loss", 170, 1700, "non-finite", "critical") in reported[0]


def test_a_second_higher_spike_in_an_open_episode_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = losses(spikes=())
    values[100] *= 1.35
    values[109] *= 2.0
    values[115] *= 1.5

    found = alarms(capsys, write_csv(tmp_path / "a.csv", values, every=1))

    assert [one["i"] for one in found if one["rule"] == "loss-spike"] == [100, 109]


def test_a_log_that_tells_every_500th_step_has_the_episodes_of_one_that_tells_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = losses(spikes=(60, 62, 64, 150))
    values[100:120:2] = math.nan
    reported = []

    for every in (1, 500):
        lines = write_csv(tmp_path / "a.csv", values, every=every).read_text().splitlines()
        # Rows of an evaluation lie between.
        lines[80:80] = [f"{79 * every - every // 3},,"]
        (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
        reported.append([(one["value"], one["rule"], one["severity"]) for one in alarms(capsys, tmp_path / "a.csv")])

    assert reported[0] == reported[1] and [one for _, one, _ in reported[0]].count("loss-spike") == 2


def test_many_logs_are_told_in_their_order_whatever_the_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write_csv(tmp_path / f"{at}.csv", losses(80 + 20 * at, (60,), at)) for at in range(5)]

    one, two = alarms(capsys, *paths, "-j", 1), alarms(capsys, *paths[::-1], "-j", 2)
    directory = alarms(capsys, tmp_path, "-j", 2)

    assert [alarm["file"] for alarm in one] == [path.name for path in paths]
    assert sorted(one, key=lambda alarm: alarm["file"]) == sorted(two, key=lambda alarm: alarm["file"]) == directory
    assert [alarm["file"] for alarm in two] == [path.name for path in paths[::-1]]


def test_equal_names_are_told_apart_by_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        paths.append(str(write_csv(tmp_path / name / "a.csv", losses())))

    assert [alarm["file"] for alarm in alarms(capsys, *paths)] == paths


def test_what_cannot_be_read_is_said_and_the_rest_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(tmp_path / "a.csv", losses())
    (tmp_path / "b.csv").write_text("step,loss\n1,2\n2,oops\n")

    assert run_cli(["rules", "backtest", str(tmp_path), "--json"]) == 2
    captured = capsys.readouterr()
    assert [json.loads(line)["file"] for line in captured.out.splitlines()] == ["a.csv"]
    assert f'{tmp_path}/b.csv:3: column "loss": expected a number' in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such.csv"], "expected a log or a recorded run, found none there"),
        ([], "Missing argument"),
        (["LOG", "--column", "loss"], "expected CHANNEL=NAME"),
        (["LOG", "--rules", "no-such-pack"], "no such file, directory or built-in pack"),
        (["LOG", "--min-severity", "grave"], "is not one of"),
        (["LOG", "--column", "loss=objective"], 'expected a column "objective"'),
    ],
)
def test_bad_usage_is_2(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv(tmp_path / "a.csv", losses())

    assert run_cli(["rules", "backtest", *(str(path) if one == "LOG" else one for one in arguments)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_the_table_has_the_last_diagnosis_of_each_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv(tmp_path / "a.csv", losses(), every=1)

    assert run_cli(["rules", "backtest", str(path), "-o", str(tmp_path / "out")]) == 1
    head, line = capsys.readouterr().out.splitlines()
    revisions = [json.loads(one) for one in (tmp_path / "out" / "a.csv" / "incidents.jsonl").read_text().splitlines()]

    shown = dict(zip(head.split(), line.split(), strict=True))
    assert shown["diagnosis"] == revisions[-1]["verdict"] and len(revisions) > 1
    assert (shown["row"], shown["rule"], shown["severity"]) == (str(SPIKE), "loss-spike", "critical")


def test_severity_decides_what_an_alarm_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = losses(spikes=())
    values[150] *= 1.3
    path = write_csv(tmp_path / "a.csv", values)

    (alarm,) = alarms(capsys, path)
    assert alarm["severity"] == "warning"
    assert alarms(capsys, path, "--min-severity", "critical", code=0) == []


# -- recorded runs -----------------------------------------------------------------------------------------------------


def record(directory: Path, seed: int = 0) -> Path:
    run = SyntheticRun(directory, dp=2, layers=2, d_model=16, elements=16, seed=seed)
    run.plant(
        Nan(step=30, module="layers.1.mlp", rank=1), LossJump(step=45, factor=12.0),
        BlowUp(step=52, module="layers.0.mlp", factor=40.0, kind="wgrad", for_steps=4),
    )  # fmt: skip
    run.write(60)
    run.end()
    directory.chmod(0o700)
    return directory


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rules")
    (directory / "mine.yaml").write_text(
        "rules:\n"
        "  - {name: loud-norm, detector: AnomalyTurbulence, match: {kind: [wgrad, activation], statistic: [norm, absmax]},\n"
        "     args: {threshold: 0.5}, severity: critical}\n"
        "  - {name: kurtosis-spike, enabled: false}\n"
    )
    return directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, pack: Path) -> Path:
    run_dir = record(tmp_path_factory.mktemp("runs") / "run")
    judge_run(run_dir, packs=loaded_packs(pack), is_over=True)
    return run_dir


def test_live_replay_and_backtest_say_the_same_byte_for_byte(recorded: Path, pack: Path, tmp_path: Path) -> None:
    assert run_cli(["replay", str(recorded), "-o", str(tmp_path / "replay")]) == 0
    assert run_cli(["rules", "backtest", str(recorded), "--rules", str(pack), "-o", str(tmp_path / "out")]) == 1

    live = result_bytes(recorded)
    assert result_bytes(tmp_path / "replay") == live
    assert result_bytes(tmp_path / "out" / "run") == live
    assert live[0].count(b'"rule":"loud-norm"') > 0 and live[0].count(b'"rule":"non-finite"') > 0
    # Another pack says another thing: what is compared is not two empty files.
    assert run_cli(["rules", "backtest", str(recorded), "-o", str(tmp_path / "other")]) == 1
    assert result_bytes(tmp_path / "other" / "run") != live


def test_a_run_that_nobody_judged_can_be_backtested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = record(tmp_path / "run")

    found = alarms(capsys, run_dir)

    assert {"non-finite", "loss-spike"} <= {alarm["rule"] for alarm in found}
    assert {(alarm["step"], alarm["i"]) for alarm in found if alarm["rule"] == "loss-spike"} == {(45, 45)}
    assert not (run_dir / "anomalies").exists() and not (run_dir / ".daemon").exists()


def test_an_output_that_is_there_is_not_overwritten(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")

    assert run_cli(["rules", "backtest", str(recorded), "-o", out]) == 1
    assert run_cli(["rules", "backtest", str(recorded), "-o", out]) == 2
    assert "expected a new directory" in capsys.readouterr().err


def test_two_packs_are_compared_over_logs_and_runs(
    recorded: Path, pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_csv(tmp_path / "a.csv", losses())
    deaf = tmp_path / "deaf.yaml"
    deaf.write_text("rules:\n  - {name: loss-spike, enabled: false}\n")
    arguments = ["rules", "backtest", str(recorded), str(log), "--rules", str(deaf), "--against", "default"]

    assert run_cli([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    by_rule = {one["rule"]: one for one in found["rules"]}

    assert by_rule["loss-spike"]["onsets"][0] == 0 and by_rule["loss-spike"]["onsets"][1] >= 2
    assert by_rule["loss-spike"]["num_lost"] == by_rule["loss-spike"]["onsets"][1]
    assert by_rule["non-finite"]["onsets"][0] == by_rule["non-finite"]["onsets"][1] > 0
    assert by_rule["all"]["num_new"] == 0 == len(found["new"])
    assert {one["file"]: one["num_rows"] for one in found["files"]} == {"run": 60, "a.csv": NUM_ROWS}
    assert {one["rule"] for one in found["lost"]} == {"loss-spike"}

    assert run_cli(arguments) == 1
    table = capsys.readouterr().out
    assert "only those it is held against:" in table and "loss-spike" in table

    same = ["rules", "backtest", str(log), "--rules", str(pack), "--against", str(pack)]
    assert run_cli(same) == 0
    assert "0 new, 0 lost alarms" in capsys.readouterr().err


def references(directory: Path, num: int, num_rows: int = 300) -> list[Path]:
    """Write logs of runs that saw the same batches: 3 % of common noise, 0.1 % of their own."""
    directory.mkdir()
    common = np.random.default_rng(1).normal(0.0, 0.03, num_rows)
    common[200] += 1.0
    own = np.random.default_rng(2)
    every = [3.0 * np.exp(common + own.normal(0.0, 0.001, num_rows)) for _ in range(num)]
    every[0][250] *= 1.03
    return [write_csv(directory / f"{at}.csv", values) for at, values in enumerate(every)]


def test_beside_its_reference_runs_a_small_corruption_shows_and_a_common_spike_is_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = references(tmp_path / "logs", 5)

    alone = alarms(capsys, first)
    beside = alarms(capsys, first, *(argument for path in others for argument in ("--reference", path)))

    assert [one["i"] for one in alone] == [200]
    assert 250 in {one["i"] for one in beside}
    (common,) = [one for one in beside if one["i"] == 200] or [{"verdict": "not told"}]
    assert common["verdict"] in ("batch", "unknown", "not told")


def test_a_run_is_not_its_own_reference_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = references(tmp_path / "logs", 5)

    # The directory holds the run itself: were it one of its own reference runs, what it has for itself would be halved.
    named = alarms(capsys, paths[0], *(argument for path in paths[1:] for argument in ("--reference", path)))
    of_all = alarms(capsys, paths[0], "--reference", tmp_path / "logs")

    assert named == of_all and 250 in {one["i"] for one in of_all}
    assert run_cli(["rules", "backtest", str(paths[0]), "--reference", str(paths[0])]) == 1
    assert "no reference run but itself" in capsys.readouterr().err


def test_a_log_that_no_rule_watches_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.csv"
    path.write_text("alpha,beta\n" + "".join(f"{one},{one}\n" for one in range(30)))

    assert run_cli(["rules", "backtest", str(path)]) == 0
    blind = capsys.readouterr().err
    assert run_cli(["rules", "backtest", str(path), "--column", "loss=beta"]) in (0, 1)
    watched = capsys.readouterr().err

    said = "no rule watches its columns (alpha, beta) but for NaN and infinity; say --column loss=NAME"
    assert said in blind and "no rule watches" not in watched


# -- files as they lie about -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"caf\xe9.csv", b"two\nlines\x1b[31m.csv", b"[bold]x.csv", b"-o.csv"])
def test_names_of_files_are_told_and_nothing_in_them_reaches_the_terminal(
    name: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / os.fsdecode(name), losses())

    (alarm,) = alarms(capsys, path)
    assert os.fsencode(alarm["file"]) == name.replace(b"\xe9", b"\\xe9")
    assert run_cli(["rules", "backtest", str(path), "--against", "default", "--json"]) == 0
    assert run_cli(["rules", "backtest", str(path)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_a_pipe_is_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_csv(tmp_path / "a.csv", losses()).read_bytes()
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(text,))
    writer.start()

    (alarm,) = alarms(capsys, tmp_path / "pipe")
    writer.join()

    assert (alarm["file"], alarm["i"]) == ("pipe", SPIKE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["LOG", ""], "got an empty name"),
        (["LOG", "-o", "LOG/out"], "Not a directory"),
        (["LOG", "--reference", "EMPTY"], "got an empty file"),
    ],
)
def test_what_cannot_be_done_is_2_and_said(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / "a.csv", losses())
    (tmp_path / "EMPTY").touch()
    given = [one.replace("LOG", str(path)).replace("EMPTY", str(tmp_path / "EMPTY")) for one in arguments]

    assert run_cli(["rules", "backtest", *given]) == 2
    assert words in capsys.readouterr().err


def test_a_header_given_takes_the_place_of_the_files_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv(tmp_path / "a.csv", losses())

    (alarm,) = alarms(capsys, path, "--header", "step,loss,gnorm")

    assert (alarm["channel"], alarm["i"]) == ("loss", SPIKE)


def test_rows_that_are_gone_from_a_run_are_said(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(recorded, tmp_path / "run")
    first, second = sorted((tmp_path / "run" / "spool").glob("r*"))
    shutil.rmtree(second)

    assert run_cli(["rules", "backtest", str(tmp_path / "run")]) == 1
    assert "60 steps are no longer whole in the spool" in capsys.readouterr().err
    shutil.rmtree(first)
    assert run_cli(["rules", "backtest", str(tmp_path / "run")]) == 2
    assert "expected the rows of 60 steps, found none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values", [[0.0] * 100 + [1.0] * 20, [0.0, 0.0, 0.01] * 40 + [9.0], [2.0] * 99 + [1.7e308, -1.7e308]]
)
def test_losses_that_were_zero_or_are_the_largest_there_are_can_be_judged(
    values: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = alarms(capsys, write_csv(tmp_path / "a.csv", values, every=1))

    assert found and all(alarm["i"] >= 99 for alarm in found)
