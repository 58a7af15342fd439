"""`sentinel sql`: questions in SQL over the histories of runs."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sentinel.cli.main import CLEAN, to_stderr
from sentinel.cli.opening import find_histories
from sentinel.cli.text_table import show_table
from sentinel.csv_text import guarded
from sentinel.errors import ConfigError
from sentinel.history.questions import answered, asking
from sentinel.history.remote_run import once_more_if_vanished

if TYPE_CHECKING:
    import pyarrow as pa

MOST_SHOWN = 1000
"""Rows that are shown as a table for people; the other formats write all."""


@click.command(epilog="Example: sentinel sql run-a run-b \"SELECT run, step, value FROM scalars WHERE name = 'loss'\"")
@click.argument("runs_and_query", nargs=-1, required=True, metavar="[RUN]... QUERY")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "jsonl", "parquet"]),
    default="table",
    show_default=True,
    help=f"table: for people, at most {MOST_SHOWN} rows; csv with -o. parquet: into the file that -o names.",
)
@click.option("-o", "--output", metavar="FILE", help="Write there instead of stdout.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl: one object a row.")
def sql(runs_and_query: tuple[str, ...], form: str, output: str | None, as_json: bool) -> int:
    """Answer QUERY over the histories of RUNs; by default over that of the run that was written to last. `-`: from stdin.

    Views: moments (a row for each tensor and step), moments_16, moments_256, moments_4096 (buckets of so many steps: of each
    statistic _min, _max, _avg, _last and _num, and all that was not finite), scalars, vectors, steps, series, anomalies,
    incidents, commands; each with the column run. Only these runs are read, no other file and no network, and nothing is
    written but the answer. A RUN may be a URL, as s3://bucket/runs/NAME, under which `sentinel history push` put it: then
    its store is asked for ranges of these files, and for nothing else.

    The daemon writes a history unless its configuration says `history: {enabled: false}`.
    """
    *named, query = runs_and_query
    form = "jsonl" if as_json else form
    if form == "parquet" and not output:
        raise ConfigError("--format parquet: expected -o FILE, for it is no text")
    runs = find_histories(named)
    query = sys.stdin.read() if query == "-" else query

    def ask() -> pa.Table:
        with asking(runs) as connection:
            return answered(connection, query)

    answer = once_more_if_vanished(ask)
    if form == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(answer, output)
    elif form == "table" and not output:
        _show(answer)
    else:
        text = _as_jsonl(answer) if form == "jsonl" else _as_csv(answer)
        if output:
            Path(output).write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    return CLEAN


def _show(answer: pa.Table) -> None:
    rows = [
        ["" if value is None else _cell(value) for value in row.values()] for row in answer.slice(0, MOST_SHOWN).to_pylist()
    ]
    is_number = [str(field.type) in ("double", "int64", "int32") or "decimal" in str(field.type) for field in answer.schema]
    show_table(answer.column_names, rows, right=[at for at, one in enumerate(is_number) if one])
    if answer.num_rows > MOST_SHOWN:
        to_stderr(f"{answer.num_rows} rows, {MOST_SHOWN} shown; --format csv writes all")


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _as_csv(answer: pa.Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(answer.column_names)
    for row in answer.to_pylist():
        writer.writerow([guarded(value) if isinstance(value, str) else value for value in row.values()])
    return out.getvalue()


def _as_jsonl(answer: pa.Table) -> str:
    return "".join(json.dumps(row, default=str, allow_nan=False) + "\n" for row in answer.to_pylist())
