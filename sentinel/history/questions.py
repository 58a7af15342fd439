"""Questions in SQL over the histories of runs: DuckDB, which sees the files of these runs and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel.errors import ConfigError, StoreError
from sentinel.history.config import FOLDER
from sentinel.history.manifest import read_manifest
from sentinel.history.sql_views import Span, quoted, views_of

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa


@contextlib.contextmanager
def asking(
    runs: Mapping[str, Path], *, num_threads: int = 0, span: Span | None = None, as_parts: bool = False
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection that answers questions about some runs: name -> directory.

    It reads the files that their manifests name, and no other; it reaches no network and writes nothing. ConfigError where
    DuckDB is not installed, StoreError for a run without a history. num_threads: that compute an answer; 0: as many as
    there are cores. span: first and last step that will be asked for; None: all. A bucket that reaches into it is whole.
    as_parts: buckets are shown as the rows that they are made of (`views_of`).
    """
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(f"questions in SQL need the package duckdb ({error}); pip install duckdb") from error
    config: dict[str, Any] = {"autoinstall_known_extensions": "false", "TimeZone": "UTC"}
    connection = duckdb.connect(":memory:", config=config | ({"threads": num_threads} if num_threads else {}))
    try:
        _prepare(connection, runs, span, as_parts=as_parts)
        yield connection
    finally:
        connection.close()


def _prepare(connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Path], span: Span | None, *, as_parts: bool) -> None:
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
        for view, select in views_of(name, folder, manifest, span, as_parts=as_parts).items():
            selects.setdefault(view, []).append(select)
    connection.execute(f"SET allowed_paths=[{', '.join(map(quoted, allowed))}]")
    connection.execute("SET enable_external_access=false")
    for view, parts in selects.items():
        connection.execute(f"CREATE VIEW {view} AS {' UNION ALL '.join(parts)}")
    connection.execute("SET lock_configuration=true")


def answered(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    """Return the rows that a query is answered with. ConfigError says why it cannot be answered."""
    import duckdb

    try:
        relation = connection.sql(query)
        if relation is None:
            raise ConfigError("the query cannot be answered: expected one that has rows, as SELECT, DESCRIBE or SHOW TABLES")
        return relation.to_arrow_table()
    except duckdb.Error as error:
        raise ConfigError(f"the query cannot be answered: {error}") from error
