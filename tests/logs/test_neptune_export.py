"""Runs of Neptune, as its exporter writes them: a row a point, one series behind the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sentinel.errors import LogError
from sentinel.logs.log_file import find_logs, read_log

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("project_id", "run_id", "attribute_path", "attribute_type")),
        ("step", pa.decimal128(18, 6)), ("timestamp", pa.timestamp("ms", tz="UTC")), ("int_value", pa.int64()),
        ("float_value", pa.float64()), ("string_value", pa.string()), ("bool_value", pa.bool_()),
        ("datetime_value", pa.timestamp("ms", tz="UTC")), ("string_set_value", pa.list_(pa.string())),
        ("file_value", pa.struct([("path", pa.string())])),
        ("histogram_value", pa.struct([("type", pa.string()), ("edges", pa.list_(pa.float64()))])),
    ]
)  # fmt: skip
"""As neptune-exporter's README has it."""
PARAMETER = {"attribute_path": "config/lr", "attribute_type": "float", "float_value": 7.0}


def series(path: str, points: Iterable[tuple[float | str, float | None]]) -> list[dict[str, object]]:
    return [
        {"attribute_path": path, "attribute_type": "float_series", "step": Decimal(str(step)), "float_value": value}
        for step, value in points
    ]


def write(path: Path, *rows: dict[str, object], run: str = "RUN-1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([{"project_id": "a/b", "run_id": run, **row} for row in rows], schema=SCHEMA)
    pq.write_table(table, path, compression="snappy")
    return path


def test_series_of_numbers_are_put_together_by_their_steps(tmp_path: Path) -> None:
    loss = series("metrics/train/loss", [(at, math.nan if at == 7 else 3.0 / (at + 1)) for at in range(20)])
    norm = series("metrics/grad_norm", [(at, 1.0) for at in range(0, 20, 2)])
    text = {"attribute_path": "log", "attribute_type": "string_series", "step": Decimal(3), "string_value": "x"}
    path = write(tmp_path / "RUN-1_part_0.parquet", PARAMETER, *norm, text, *loss)

    log = read_log(path)

    assert (log.form, log.notes) == ("neptune", ())
    assert log.steps.tolist() == list(range(20)) and not log.attempts.any()
    assert log.sources == {"loss": "metrics/train/loss", "grad_norm": "metrics/grad_norm"}
    assert math.isnan(log.columns["loss"][7]) and log.present["loss"].all()
    assert log.present["grad_norm"].tolist() == [True, False] * 10


def test_all_parts_of_a_run_are_one_log_and_other_runs_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "project"
    for at in range(12):
        write(folder / f"RUN-1_part_{at}.parquet", *series("loss", [(10 * at + one, 1.0) for one in range(10)]))
    write(folder / "RUN-2_part_0.parquet", *series("loss", [(0, 5.0)]), run="RUN-2")
    (folder / "RUN-3_part_0.parquet.tmp").write_bytes(b"PAR1 half")

    first, second = folder / "RUN-1_part_0.parquet", folder / "RUN-2_part_0.parquet"
    assert find_logs(folder) == find_logs(tmp_path / "data") == [first, second]
    assert read_log(first).steps.tolist() == list(range(120))
    assert read_log(second).columns["loss"].tolist() == [5.0]


def test_what_is_there_twice_or_at_no_whole_step_or_of_the_machine_is_counted(tmp_path: Path) -> None:
    loss = series("loss", [(2, 3.0), (0, 1.0), (1, 2.0), (1, 2.5), ("1.5", 9.0), (3, None)])
    machine = series("monitoring/0/cpu", [(0, 50.0), (1, 51.0)])
    path = write(tmp_path / "RUN-1_part_0.parquet", *loss, *machine)

    log = read_log(path)

    assert log.steps.tolist() == [0, 1, 2] and log.columns["loss"].tolist() == [1.0, 2.5, 3.0]
    assert log.notes == (
        "1 values are at no whole step and were left out",
        "2 values are of the machine (monitoring/, sys/) and were left out",
        "1 values are of a step that their series has twice: the last one counts",
    )


def test_names_that_move_a_cursor_stay_what_they_are_for_who_prints_them(tmp_path: Path) -> None:
    path = write(tmp_path / "RUN-1_part_0.parquet", *series("loss", [(0, 1.0)]), *series("\x1b[31m\n|", [(0, 1.0)]))

    assert set(read_log(path).columns) == {"loss", "\x1b[31m\n|"}


def two_runs(path: Path) -> None:
    rows = [{"project_id": "p", "run_id": run, **series("loss", [(0, 1.0)])[0]} for run in ("a", "b")]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


def without_steps(path: Path) -> None:
    pq.write_table(pa.table({"loss": [1.0, 2.0], "step": [0, 1]}), path)


def torn(path: Path) -> None:
    write(path, *series("loss", [(at, 1.0) for at in range(100)]))
    path.write_bytes(path.read_bytes()[:-30])


def flipped(path: Path) -> None:
    write(path, *series("loss", [(at, math.sin(at)) for at in range(5000)]))
    body = bytearray(path.read_bytes())
    for at in range(60, len(body) - 4000, 50):
        body[at] ^= 0xFF
    path.write_bytes(bytes(body))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (two_runs, 'expected one run in a file, got 2 ("a", "b")'),
        (without_steps, "it has no run_id, attribute_path, attribute_type, float_value; write other Parquet as CSV first"),
        (torn, "expected Parquet, got damaged data"),
        (flipped, "expected Parquet, got damaged data"),
        (lambda path: write(path, PARAMETER), "expected series of numbers in Neptune's export, found none"),
        (lambda path: write(path), "expected series of numbers in Neptune's export, found none"),
        (lambda path: path.write_bytes(b""), "got an empty file"),
        (lambda path: path.write_bytes(b"PAR1"), "expected Parquet, got damaged data"),
    ],
)
def test_what_is_no_export_of_a_run_is_said(make: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "RUN-1_part_0.parquet"
    make(path)  # type: ignore[operator]

    with pytest.raises(LogError) as error:
        read_log(path)

    assert str(error.value).startswith(str(path)) and says in str(error.value)
