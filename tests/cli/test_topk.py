"""`sentinel topk`: exit codes, table, files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from sentinel.cli.main import run_cli

from .test_explain import write_run

GOLDEN = Path(__file__).parent.parent / "explain" / "golden"


@pytest.fixture
def run(tmp_path):
    target = tmp_path / "run" / "anomaly_detected" / "rank0"
    target.mkdir(parents=True)
    shutil.copy(GOLDEN / "msprobe_anomaly.json", target / "anomaly.json")
    return tmp_path / "run"


def test_table_of_step_5(run, capsys):
    code = run_cli(["topk", "-d", str(run), "-s", "5", "-k", "3"])

    out, err = capsys.readouterr()
    assert code == 1
    assert out == (GOLDEN / "topk_step_5.txt").read_text()
    assert "first critical: NaN born in encoder.layers.0.linear1 (forward) on rank 0, micro_step 0, step 5" in err


def test_result_file_has_msprobes_own_answer(run, tmp_path, capsys):
    code = run_cli(["topk", "-d", str(run), "-o", str(tmp_path / "out"), "-s", "5", "--order", "msprobe"])

    written = json.loads((tmp_path / "out" / "anomaly_analyse.json").read_text())
    expected = json.loads((GOLDEN / "msprobe_analyse_step_5.json").read_text())
    assert code == 1
    assert list(written) == list(expected)
    assert not (run / "anomaly_analyse.json").exists()


def test_json_is_strict_and_whole(run, capsys):
    run_cli(["topk", "-d", str(run), "--json", "-k", "1", "--min-severity", "critical"])

    data = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"bare {word}"))
    assert data["anomalies"] == [data["worst"]]
    assert data["worst"]["value_text"] == "nan"


def test_exit_codes(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no sentinel_runs lies beside
    empty = tmp_path / "empty"
    empty.mkdir()

    assert run_cli(["topk", "-d", str(run)]) == 1
    assert run_cli(["topk", "-d", str(run), "-s", "99"]) == 0
    assert run_cli(["topk", "-d", str(empty)]) == 0
    assert "no anomaly files there" in capsys.readouterr().err
    for wrong in (["-d", str(tmp_path / "nowhere")], ["-d", str(run), "-k", "0"], ["-d", str(run), "-s", "x"], []):
        assert run_cli(["topk", *wrong]) == 2
    assert "expected a directory of anomalies, found none" in capsys.readouterr().err


def test_runs_are_found_by_name_by_age_and_by_incident(tmp_path, monkeypatch, capsys):
    home = tmp_path / "runs"
    monkeypatch.setenv("SENTINEL_DIR", str(home))
    incidents = {}
    for number, name in enumerate(("old", "new")):
        incidents[name] = write_run(home, name, 40 + number)
        os.utime(home / name / "spool", (1e9 + number, 1e9 + number))

    def first(*options):
        code = run_cli(["topk", "--json", "-o", str(tmp_path / "out"), *options])
        out = capsys.readouterr().out
        return code, json.loads(out)["anomalies"][0]["run"] if out else None

    assert first() == (1, "new")
    assert first("-d", "old") == (1, "old")
    assert first("--incident", incidents["old"].id) == (1, "old")
    assert first("-d", str(home), "--incident", "latest") == (1, "new")
    assert first("-d", str(home / "old"), "--incident", "latest") == (1, "old")
    assert first("-d", str(home)) == (2, None)


def test_json_says_where_each_was_born(tmp_path, capsys):
    write_run(tmp_path, "run", 40)

    run_cli(["topk", "-d", str(tmp_path / "run"), "--json"])

    (born,) = json.loads(capsys.readouterr().out)["origins"]
    assert (born["module"], born["rank"], born["micro_step"], born["phase"]) == ("fc1", 0, 0, "forward")


def test_steps_may_be_ranges(run, capsys):
    run_cli(["topk", "-d", str(run), "-s", "1-2,5", "-k", "1000", "--json"])

    steps = {record["step"] for record in json.loads(capsys.readouterr().out)["anomalies"]}
    assert steps == {1, 2, 5}


def test_files_that_cannot_be_read_hide_nothing_and_are_no_good_news(tmp_path, capsys):
    write_run(tmp_path, "run", 41)
    line = (tmp_path / "run" / "anomalies" / "000001.jsonl").read_bytes()
    (tmp_path / "some" / "c.jsonl").mkdir(parents=True)
    # A line longer than the buffer, behind one that is looked at while the buffer grows.
    (tmp_path / "some" / "a.jsonl").write_bytes(line + b"x" * 3_000_000 + b"\n" + line.replace(b":41,", b":40,"))
    (tmp_path / "b.json").write_text("[]")

    assert run_cli(["topk", "-d", str(tmp_path / "some"), "--json"]) == 1
    captured = capsys.readouterr()
    assert [one["step"] for one in json.loads(captured.out)["anomalies"]] == [40, 41]
    assert "2 lines could not be read" in captured.err
    assert run_cli(["topk", "-d", str(tmp_path / "b.json")]) == 2
    for steps in ("0-99999999999", "9" * 5000):
        assert run_cli(["topk", "-d", str(tmp_path / "run"), "-s", steps]) == 2
    assert "at most 1,000,000 steps" in capsys.readouterr().err
