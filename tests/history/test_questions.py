"""Questions in SQL: right where values are not finite, and shut in with the files of their runs."""

from __future__ import annotations

import math
import operator
from pathlib import Path

import pytest

from sentinel.errors import StoreError
from sentinel.history.questions import asking

from ..support.merged_steps import FlatLayout, merged_step
from .test_writer import writing

LAYOUT = FlatLayout(2)
LOSSES = [2.0, math.nan, 1.0, math.inf, 3.0, -math.inf, math.nan, 2.5]
ASKED = {"<": operator.lt, "<=": operator.le, "!=": operator.ne, ">": operator.gt, ">=": operator.ge, "=": operator.eq}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with writing(tmp_path / "run") as one:
        for seq, loss in enumerate(LOSSES, 1):
            one.take(merged_step(LAYOUT, seq, loss=loss, num_nan=1000 if seq == 3 else 0))
    return tmp_path / "run"


@pytest.mark.parametrize("asked", ASKED)
def test_comparisons_are_right_beside_values_that_are_not_finite(run: Path, asked: str) -> None:
    expected = [step for step, loss in enumerate(LOSSES) if math.isfinite(loss) and ASKED[asked](loss, 2.0)]

    with asking({"run": run}) as connection:
        found = connection.execute(f"SELECT step FROM scalars WHERE value {asked} 2.0 ORDER BY step").fetchall()

    assert [step for (step,) in found] == expected


def test_what_is_not_finite_is_counted_and_has_no_value(run: Path) -> None:
    with asking({"run": run}) as connection:
        scalars = connection.execute("SELECT step, nans, infs FROM scalars WHERE value IS NULL ORDER BY step").fetchall()
        nothing = connection.execute("SELECT step, nans, mean, std, norm, min FROM moments WHERE nans > 0").fetchall()

    assert scalars == [(1, 1, 0), (3, 0, 1), (5, 0, 1), (6, 1, 0)]
    assert nothing == [(2, 1000, None, None, None, None)]


def test_several_runs_are_asked_at_once(run: Path, tmp_path: Path) -> None:
    with writing(tmp_path / "other") as one:
        one.take(merged_step(LAYOUT, 1, loss=9.0))

    with asking({"a": run, "it's": tmp_path / "other"}) as connection:
        found = connection.execute("SELECT run, max(value) FROM scalars GROUP BY run ORDER BY run").fetchall()

    assert found == [("a", 3.0), ("it's", 9.0)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_parquet('*.parquet')",
        "COPY (SELECT 1) TO 'stolen.csv'",
        "ATTACH 'other.duckdb'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SELECT * FROM read_csv('http://localhost:1/x.csv')",
        "SET enable_external_access=true",
        "SET allowed_directories=['/']",
        "EXPORT DATABASE 'there'",
    ],
)
def test_a_query_reads_no_other_file_and_writes_none(
    run: Path, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import duckdb

    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    with asking({"run": run}) as connection, pytest.raises(duckdb.Error):
        connection.execute(query)

    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_without_a_history_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"expected a run with a history in .*enabled: false"), asking({"run": tmp_path}):
        pass


def test_a_run_of_which_nothing_was_written_yet_has_empty_views(tmp_path: Path) -> None:
    with writing(tmp_path / "run"):
        pass

    with asking({"run": tmp_path / "run"}) as connection:
        for view in ("moments", "scalars", "steps", "series", "moments_16", "moments_4096", "anomalies", "incidents"):
            assert connection.execute(f"SELECT count(*) FROM {view}").fetchall() == [(0,)]
