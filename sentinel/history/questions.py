"""Questions in SQL over the histories of runs: DuckDB, which sees the files of these runs and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sentinel.errors import ConfigError, NotThere, PackageMissing
from sentinel.history.config import FOLDER
from sentinel.history.manifest import Manifest
from sentinel.history.question_cache import QuestionCache
from sentinel.history.remote_run import RemoteRun, RunPlace, manifest_of
from sentinel.history.sql_views import Span, quoted, views_of
from sentinel.history.table_schemas import STATISTICS

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from sentinel.history.remote_files import RemoteFiles


MOST_AT_ONCE = 16
"""Manifests in stores that are asked for at a time (chosen)."""


@contextlib.contextmanager
def asking(
    runs: Mapping[str, RunPlace],
    *,
    num_threads: int = 0,
    span: Span | None = None,
    as_parts: bool = False,
    statistics: tuple[str, ...] = STATISTICS,
    cache: QuestionCache | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection that answers questions about some runs: name -> where it lies.

    It reads the files that their manifests name, and no other; it reaches no network by itself and writes nothing. What lies
    in a store it is handed. PackageMissing where DuckDB is not installed, NotThere for a run without a history, StoreError
    where its store gives no answer: FileVanished where it would with the manifest read again (`once_more_if_vanished`).
    num_threads: that compute an answer; 0: as many as there are cores. span: first and last step that will be asked for;
    None: all. A bucket that reaches into it is whole. as_parts: buckets are shown as the rows that they are made of
    (`views_of`), where there is a cache the newest of them with these `statistics` alone. cache: of runs on a disk, where
    what was prepared is taken from and left: whoever asks leaves nothing of its own in the connection.
    """
    try:
        import duckdb
    except ImportError as error:
        raise PackageMissing(f"questions in SQL need the package duckdb ({error}); pip install duckdb") from error
    manifests = _manifests(runs)
    is_remote = any(isinstance(one, RemoteRun) for one in runs.values())
    keeps = None if is_remote else cache
    key = QuestionCache.key(
        {name: str(one) for name, one in runs.items()}, manifests, num_threads, span, as_parts, statistics
    )
    connection = None if keeps is None else keeps.take(key)
    is_kept = connection is not None
    if connection is None:
        config: dict[str, Any] = {"autoinstall_known_extensions": "false", "TimeZone": "UTC"}
        connection = duckdb.connect(":memory:", config=config | ({"threads": num_threads} if num_threads else {}))
    remote = _remote_files() if is_remote else None
    is_answered = False
    try:
        if not is_kept:
            _prepare(connection, runs, manifests, remote, span, statistics, keeps if as_parts else None, as_parts=as_parts)
        yield connection
        is_answered = True
    except (duckdb.Error, ConfigError) as error:
        if remote is not None and remote.failure is not None:
            raise remote.failure from error
        raise
    finally:
        if keeps is not None and is_answered:
            keeps.give(key, connection)
        else:
            connection.close()


def _manifests(runs: Mapping[str, RunPlace]) -> dict[str, Manifest]:
    """Return what is published of each run now; of runs in stores all are asked for at once."""
    num_remote = sum(isinstance(one, RemoteRun) for one in runs.values())
    if num_remote < 2:
        return {name: manifest_of(place) for name, place in runs.items()}
    with ThreadPoolExecutor(min(num_remote, MOST_AT_ONCE), "sentinel-store") as pool:
        return dict(zip(runs, pool.map(manifest_of, runs.values()), strict=True))


def _remote_files() -> RemoteFiles:
    # It imports fsspec, which nobody needs whose runs lie on a disk.
    from sentinel.history.remote_files import RemoteFiles

    return RemoteFiles()


def _prepare(
    connection: duckdb.DuckDBPyConnection,
    runs: Mapping[str, RunPlace],
    manifests: Mapping[str, Manifest],
    remote: RemoteFiles | None,
    span: Span | None,
    statistics: Sequence[str],
    cache: QuestionCache | None,
    *,
    as_parts: bool,
) -> None:
    selects: dict[str, list[str]] = {}
    allowed: list[str] = []
    if remote is not None:
        connection.register_filesystem(remote)
    for number, (name, place) in enumerate(runs.items()):
        manifest, young = manifests[name], ""
        if isinstance(place, RemoteRun):
            assert remote is not None
            folder = remote.add(number, place.folder, manifest, span)
        else:
            folder = str((place / FOLDER).absolute())
            if not manifest.files and not (place / FOLDER).is_dir():
                raise NotThere(
                    f"{place}: expected a run with a history in {folder}, there is none; the daemon writes it unless its "
                    "configuration says history: {enabled: false}; sentinel export reads the spool"
                )
            if cache is not None and any(one.level == 0 for one in manifest.of("moments")):
                young = f"young_{number}"
                connection.register(young, cache.young_buckets(place / FOLDER, manifest, statistics, span))
        allowed += [f"{folder}/{one}" for one in (manifest.series, *(one.name for one in manifest.files)) if one]
        for view, select in views_of(name, folder, manifest, span, as_parts=as_parts, young=young).items():
            selects.setdefault(view, []).append(select)
    if remote is not None:
        remote.fetch()
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
