"""Questions in SQL over the histories of runs: DuckDB, which sees the files of these runs and nothing else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sentinel.errors import ConfigError, StoreError
from sentinel.history.config import FOLDER
from sentinel.history.manifest import read_manifest
from sentinel.history.sql_views import quoted, views_of

if TYPE_CHECKING:
    import duckdb

FOUND: Mapping[str, pa.Schema] = {
    "anomalies": pa.schema(
        [
            *(
                pa.field(name, pa.string())
                for name in ("run", "id", "event", "rule", "detector", "severity", "kind", "tag_name")
            ),
            *(pa.field(name, pa.string()) for name in ("statistic", "message")),
            *(
                pa.field(name, pa.int64())
                for name in ("attempt", "step", "rank", "micro_step", "pp_stage", "vpp_stage", "call_id")
            ),
            *(pa.field(name, pa.float64()) for name in ("value", "baseline", "score", "time")),
        ]
    ),
    "incidents": pa.schema(
        [
            *(pa.field(name, pa.string()) for name in ("run", "id", "state", "severity", "title", "root", "verdict")),
            *(pa.field(name, pa.int64()) for name in ("revision", "attempt", "opened_step", "last_step")),
            pa.field("time", pa.float64()),
        ]
    ),
}
"""Tables of what was found, as the files of a run say it; of each incident every revision."""


@contextlib.contextmanager
def asking(runs: Mapping[str, Path], *, has_found: bool = True, num_threads: int = 0) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection that answers questions about some runs: name -> directory.

    It reads the files that their manifests name, and no other; it reaches no network and writes nothing. ConfigError where
    DuckDB is not installed, StoreError for a run without a history. has_found: anomalies and incidents can be asked for;
    else their files are not read. num_threads: that compute an answer; 0: as many as there are cores.
    """
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(f"questions in SQL need the package duckdb ({error}); pip install duckdb") from error
    config: dict[str, Any] = {"autoinstall_known_extensions": "false", "TimeZone": "UTC"}
    connection = duckdb.connect(":memory:", config=config | ({"threads": num_threads} if num_threads else {}))
    try:
        _prepare(connection, runs, FOUND if has_found else {})
        yield connection
    finally:
        connection.close()


def _prepare(connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Path], found: Mapping[str, pa.Schema]) -> None:
    selects: dict[str, list[str]] = {}
    allowed: list[str] = []
    for name, run_dir in runs.items():
        folder = (run_dir / FOLDER).absolute()
        manifest = read_manifest(folder)
        if not manifest.files and not folder.is_dir():
            raise StoreError(
                f"{run_dir}: expected a run with a history in {folder}, there is none; the daemon writes it where its "
                "configuration says history.enabled; sentinel export reads the spool"
            )
        allowed += [str(folder / one) for one in (manifest.series, *(one.name for one in manifest.files)) if one]
        for view, select in views_of(name, folder, manifest).items():
            selects.setdefault(view, []).append(select)
    for table, schema in found.items():
        connection.register(f"_{table}", _found(table, schema, runs))
        selects[table] = [f"SELECT * FROM _{table}"]
    connection.execute(f"SET allowed_paths=[{', '.join(map(quoted, allowed))}]")
    connection.execute("SET enable_external_access=false")
    for view, parts in selects.items():
        connection.execute(f"CREATE VIEW {view} AS {' UNION ALL '.join(parts)}")
    connection.execute("SET lock_configuration=true")


def _found(table: str, schema: pa.Schema, runs: Mapping[str, Path]) -> pa.Table:
    rows = []
    for name, run_dir in runs.items():
        paths = sorted((run_dir / "anomalies").glob("*.jsonl")) if table == "anomalies" else [run_dir / "incidents.jsonl"]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                rows += [{**one, "run": name} for one in _lines(path)]
    return pa.Table.from_pylist([{field.name: row.get(field.name) for field in schema} for row in rows], schema=schema)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            # A line that a crash cut is completed by the daemon when it goes on.
            with contextlib.suppress(ValueError):
                yield json.loads(line)
