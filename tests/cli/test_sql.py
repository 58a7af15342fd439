"""`sentinel sql`: what is asked, in which form it is answered, and what is typed wrong."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

from sentinel.cli.main import run_cli

from ..history.test_writer import writing
from ..support.merged_steps import FlatLayout, merged_step

LAYOUT = FlatLayout(2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with writing(tmp_path / "run") as one:
        for seq in range(1, 9):
            one.take(merged_step(LAYOUT, seq, loss=math.nan if seq == 3 else 1.0 / seq, **{"=cmd()": 1.0}))
    return tmp_path / "run"


def test_rows_as_json_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_cli(
            ["sql", str(run), "SELECT step, value FROM scalars WHERE name = 'loss' AND step < 4 ORDER BY step", "--json"]
        )
        == 0
    )

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        {"step": 0, "value": 1.0},
        {"step": 1, "value": 0.5},
        {"step": 2, "value": None},
        {"step": 3, "value": 0.25},
    ]


def test_a_table_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["sql", str(run), "SELECT name, count(*) AS steps FROM moments GROUP BY name ORDER BY name"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "name             steps",
        "layers.0.weight      8",
        "layers.1.weight      8",
    ]


def test_csv_runs_no_formula(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["sql", str(run), "SELECT DISTINCT name FROM scalars ORDER BY name", "--format", "csv"]) == 0

    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [["name"], ["'=cmd()"], ["loss"]]


def test_a_query_from_stdin_into_a_parquet_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    monkeypatch.setattr("sys.stdin", io.StringIO("SELECT step, norm FROM moments WHERE name = 'layers.0.weight'"))

    assert run_cli(["sql", str(run), "-", "--format", "parquet", "-o", str(run / "norms.parquet")]) == 0
    assert pyarrow.parquet.read_table(run / "norms.parquet").num_rows == 8


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELECT nrom FROM moments", 'Candidate bindings: "norm"'),
        ("SELEC 1", "syntax error"),
        ("SET threads=1", ""),
        ("SELECT * FROM momnts", "Did you mean"),
        ("SELECT * FROM read_csv('/etc/passwd')", "disabled"),
    ],
)
def test_what_cannot_be_answered_is_a_users_mistake_in_words(
    run: Path, query: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["sql", str(run), query]) == 2

    said = capsys.readouterr()
    assert said.out == "" and "the query cannot be answered" in said.err and words in said.err


def test_two_runs_of_one_name_and_text_without_a_file_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "there" / "run"
    with writing(other):
        pass

    assert run_cli(["sql", str(run), str(other), "SELECT 1"]) == 2
    assert 'two runs are called "run"' in capsys.readouterr().err
    assert run_cli(["sql", str(run), "SELECT 1", "--format", "parquet"]) == 2
    assert "expected -o FILE" in capsys.readouterr().err
