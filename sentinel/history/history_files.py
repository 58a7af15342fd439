"""The Parquet files of a history: how one is written and read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sentinel.errors import StoreError
from sentinel.history.manifest import PART, HistoryFile
from sentinel.history.table_schemas import ORDER, ROWS_PER_GROUP, Columns, columns_of, joined, table_of
from sentinel.private_files import create_file

_NO_STEPS = np.empty(0, np.int64)


def write_file(folder: Path, name: str, table: str, columns: Columns, *, level: int = 0) -> HistoryFile:
    """Write the rows of a table into a file that nobody sees until a manifest names it. OSError where that fails."""
    arrow = table_of(table, columns)
    part = folder / f"{PART}{name}"
    fd = create_file(part, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(fd, "wb") as file:
        _write(arrow, file, is_hot=not level and table == "moments")
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    part.replace(folder / name)
    steps = columns.get("step", _NO_STEPS)
    return HistoryFile(
        name=name,
        table=table,
        level=level,
        rows=arrow.num_rows,
        bytes=size,
        attempt=int(columns["attempt"][0]) if len(steps) else 0,
        first_step=int(steps.min()) if len(steps) else 0,
        last_step=int(columns.get("last_step", steps).max()) if len(steps) else -1,
    )


def _write(table: pa.Table, file: object, *, is_hot: bool) -> None:
    """Write a table. is_hot: the file is soon merged into a larger one, so that a third of its size is given for half the
    time, while somebody judges beside it."""
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    encodings = dict.fromkeys(floats, "BYTE_STREAM_SPLIT")
    for name in ("step", "last_step", "decision"):
        if name in table.schema.names:
            encodings[name] = "DELTA_BINARY_PACKED"
    pq.write_table(
        table,
        file,
        row_group_size=ROWS_PER_GROUP,
        compression="lz4" if is_hot else "zstd",
        use_dictionary=not is_hot and [name for name in table.schema.names if name not in encodings],
        column_encoding=encodings,
        version="2.6",
        # What readers skip by. Bounds of floats exclude no row that a question wants.
        write_statistics=[name for name in (*ORDER, "last_step", "time") if name in table.schema.names],
    )


def read_files(folder: Path, files: Sequence[HistoryFile]) -> Columns:
    """Return the rows of some files of one table, file behind file. StoreError names one that cannot be read."""
    return joined([read_file(folder / one.name, one.table) for one in files])


def read_file(path: Path, table: str, only: Sequence[str] | None = None) -> Columns:
    """Return the rows of a file of a table. only: the columns that are wanted; None: all."""
    try:
        return columns_of(
            table, pq.read_table(path, columns=None if only is None else list(only), memory_map=True, partitioning=None)
        )
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path}: expected a Parquet file of a history, got: {error}") from error
