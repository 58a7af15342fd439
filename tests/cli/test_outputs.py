"""`-o -` is stdout for what is one text, and an error in words for what is not: never a file of that name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sentinel.cli.main import run_cli
from sentinel.testing import SyntheticRun


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run beside an empty directory, in which the verbs are called."""
    SyntheticRun(tmp_path / "run", layers=2).write(3)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "run"


@pytest.mark.parametrize("more", [[], ["--format", "jsonl"], ["--json"], ["--format", "jsonl", "--json"]])
def test_a_text_goes_to_stdout(run_dir: Path, more: list[str], capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run_cli(["export", str(run_dir), *more]) == 0
    expected = capsysbinary.readouterr().out

    assert run_cli(["export", str(run_dir), *more, "-o", "-"]) == 0

    assert capsysbinary.readouterr().out == expected and len(expected) > 100
    assert not list(Path().iterdir())


@pytest.mark.parametrize("form", ["parquet", "tensorboard", "msprobe-csv", "tensors"])
def test_what_is_no_text_does_not_go_there(run_dir: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["export", str(run_dir), "--format", form, "-o", "-"]) == 2

    assert f"--format {form} does not go to stdout; give -o " in capsys.readouterr().err
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "verb", [["replay"], ["rules", "backtest"], ["topk", "-d"], ["import", "msprobe"]], ids=lambda verb: verb[0]
)
def test_a_directory_is_not_stdout(run_dir: Path, verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([*verb, str(run_dir), "-o", "-"]) == 2

    assert "expected a directory, got -, which is stdout" in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_a_trainer_config_and_its_rules_go_to_stdout_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"wg_distribution": True, "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    command = ["import", "msprobe-config", "config.json"]

    assert run_cli([*command, "-o", "-"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["kinds"] == ["wgrad_unreduced", "wgrad"]
    assert run_cli([*command, "-o", "s.yaml", "--rules-output", "-"]) == 0
    assert [rule["detector"] for rule in yaml.safe_load(capsys.readouterr().out)["rules"]] == ["AnomalyTurbulence"]
    assert run_cli([*command, "--rules-output", "-"]) == 2
    assert "--rules-output - is stdout" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "s.yaml"]
