"""A table as Parquet: typed columns, written in row groups, so that memory holds one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from sentinel.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_GROUP = 65_536
"""Rows of a row group; a bound on memory: 15 MB of a table with all statistics."""
SCHEMA_VERSION = "1"

TYPES: dict[str, str] = {
    "attempt": "int32",
    "step": "int64",
    "time": "timestamp",
    "is_skipped": "bool",
    "rank": "int32",
    "kind": "word",
    "name": "word",
    "place": "word",
    "vpp_stage": "int32",
    "micro_step": "int32",
    "num_folded": "int32",
    "call_id": "int64",
    "num_tensors": "int32",
    "num_excluded": "int32",
    "num_elements": "int64",
    "is_whole": "bool",
    "statistic": "word",
    "axis": "word",
    "shape": "sizes",
    "values": "numbers",
    "edges": "numbers",
}
"""Column -> type; every other column is a statistic: float64, null where it is undefined."""


def load() -> Any:
    """Return pyarrow and pyarrow.parquet. ConfigError, saying what to install, where they are not there."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"--format parquet needs the package pyarrow ({error}); pip install pyarrow") from error
    return pyarrow


def schema_of(columns: Sequence[str], about: Mapping[str, str]) -> pa.Schema:
    """Return the schema of a table. about: metadata of the file, beside the version of this schema."""
    pa = load()
    types = {
        "int32": pa.int32(), "int64": pa.int64(), "bool": pa.bool_(), "timestamp": pa.timestamp("us", tz="UTC"),
        "word": pa.dictionary(pa.int32(), pa.string()), "sizes": pa.list_(pa.int64()), "numbers": pa.list_(pa.float64()),
    }  # fmt: skip
    fields = [pa.field(name, types[TYPES[name]] if name in TYPES else pa.float64()) for name in columns]
    reported = {"sentinel": json.dumps({"schema": SCHEMA_VERSION, **about})}
    return pa.schema(fields, metadata=reported)


class ParquetTable:
    """Writes rows into an open file, a row group at a time."""

    def __init__(
        self, file: IO[bytes], columns: Sequence[str], about: Mapping[str, str], rows_per_group: int = ROWS_PER_GROUP
    ) -> None:
        """columns: of `TYPES`, and statistics."""
        self._pa = load()
        self._schema = schema_of(columns, about)
        self._rows_per_group = rows_per_group
        words = [name for name in columns if TYPES.get(name) == "word"]
        numbers = [name for name in columns if name not in TYPES]
        self._writer = self._pa.parquet.ParquetWriter(
            file, self._schema, compression="zstd", use_dictionary=words, use_byte_stream_split=numbers, version="2.6",
        )  # fmt: skip
        self._waiting: list[Any] = []
        self._num_waiting = 0

    def add(self, columns: Mapping[str, Any], num_rows: int) -> None:
        """Take in rows: column -> values; a single value stands for all rows. NaN of a statistic is written as null."""
        pa = self._pa
        arrays = []
        for field in self._schema:
            values = columns[field.name]
            if field.name == "time":
                values = [round(one * 1e6) for one in values] if isinstance(values, list) else round(values * 1e6)
            if not hasattr(values, "__len__") or isinstance(values, str):
                single = pa.scalar(values, field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
                array = pa.repeat(single, num_rows)
                array = array.dictionary_encode() if pa.types.is_dictionary(field.type) else array
            elif pa.types.is_dictionary(field.type):
                array = pa.array(values, pa.string()).dictionary_encode()
            else:
                # Only a statistic's NaN means that there is none.
                array = pa.array(values, field.type, from_pandas=pa.types.is_floating(field.type))
            arrays.append(array)
        self._waiting.append(pa.Table.from_arrays(arrays, schema=self._schema))
        self._num_waiting += num_rows
        if self._num_waiting >= self._rows_per_group:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            table = self._pa.concat_tables(self._waiting).unify_dictionaries()
            self._writer.write_table(table, row_group_size=self._rows_per_group)
        self._waiting, self._num_waiting = [], 0

    def __enter__(self) -> ParquetTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write the last row group and the footer; after an error write nothing more."""
        if error is None:
            self._flush()
            self._writer.close()
        else:
            self._writer.is_open = False
