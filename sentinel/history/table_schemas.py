"""The tables of a history: their columns, types and version. What is written here is read by other people's tools.

No column holds a NaN: what is undefined is null, and what is not finite is counted in columns of integers. Readers of
Parquet skip files by the least and greatest value of a column, which a NaN makes meaningless, and answer wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

VERSION = 1

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
"""Column -> [rows]; NaN of a float stands for null."""

STATISTICS = ("mean", "std", "min", "max", "skew", "kurtosis")
"""What a moments row keeps of a distribution; norm, rms, var and absmax follow from them."""
COUNTS = ("count", "nans", "pos_infs", "neg_infs", "zeros")
WIDTHS = (16, 256, 4096)
"""Steps of a bucket, in each of the coarser tables."""
ORDER = ("series", "attempt", "step")
"""What rows are sorted by, in every table of what was measured."""
FOUND = ("anomalies", "incidents", "commands")
"""Tables of what was found and ordered: in the order in which the journal has it."""

MANTISSA_BITS = 24
"""Binary digits that are kept of a float64: as many as float32 has, in the range of float64. The others are zeros, which
compress to nothing."""

ROWS_PER_GROUP = 131_072
"""Rows of a row group: fewer make readers slow (960 rows: ten times), more make small questions read much."""


def _moments() -> pa.Schema:
    return pa.schema(
        [
            pa.field("series", pa.int32(), nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("step", pa.int64(), nullable=False),
            pa.field("is_whole", pa.bool_(), nullable=False),
            *(pa.field(name, pa.int64(), nullable=name == "zeros") for name in COUNTS),
            *(pa.field(name, pa.float64()) for name in STATISTICS),
        ]
    )


def _buckets() -> pa.Schema:
    """Buckets of steps: of each statistic the least, greatest and last value, the mean, and how many steps have one."""
    return pa.schema(
        [
            pa.field("series", pa.int32(), nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("step", pa.int64(), nullable=False),
            pa.field("last_step", pa.int64(), nullable=False),
            pa.field("num_steps", pa.int64(), nullable=False),
            pa.field("nans", pa.int64(), nullable=False),
            pa.field("infs", pa.int64(), nullable=False),
            pa.field("bad_steps", pa.int64(), nullable=False),
            *(
                pa.field(f"{name}_{of}", pa.int64() if of == "num" else pa.float64())
                for name in STATISTICS
                for of in ("num", "min", "max", "avg", "last")
            ),
        ]
    )


def _series() -> pa.Schema:
    return pa.schema(
        [
            pa.field("series", pa.int32(), nullable=False),
            *(pa.field(name, pa.string(), nullable=False) for name in ("name", "kind", "place", "dtype")),
            *(pa.field(name, pa.int32()) for name in ("pp_stage", "vpp_stage", "depth", "site_pos")),
            pa.field("num_elements", pa.int64(), nullable=False),
        ]
    )


def _steps() -> pa.Schema:
    return pa.schema(
        [
            pa.field("series", pa.int32(), nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("step", pa.int64(), nullable=False),
            pa.field("decision", pa.int64(), nullable=False),
            pa.field("time", pa.float64()),
            pa.field("is_skipped", pa.bool_(), nullable=False),
        ]
    )


def _vectors() -> pa.Schema:
    return pa.schema(
        [
            pa.field("series", pa.int32(), nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("step", pa.int64(), nullable=False),
            *(pa.field(name, pa.int64(), nullable=False) for name in ("rank", "micro_step", "call_id")),
            *(pa.field(name, pa.string(), nullable=False) for name in ("statistic", "axis")),
            pa.field("shape", pa.list_(pa.int64()), nullable=False),
            *(pa.field(name, pa.list_(pa.float64()), nullable=False) for name in ("values", "edges")),
        ]
    )


def _found(texts: Sequence[str], whole: Sequence[str], numbers: Sequence[str]) -> pa.Schema:
    return pa.schema(
        [
            *(pa.field(name, pa.string()) for name in texts),
            *(pa.field(name, pa.int64()) for name in whole),
            *(pa.field(name, pa.float64()) for name in numbers),
            pa.field("json", pa.string(), nullable=False),
        ]
    )


SCHEMAS: Mapping[str, pa.Schema] = {
    "moments": _moments(),
    **{f"moments_{width}": _buckets() for width in WIDTHS},
    "steps": _steps(),
    "vectors": _vectors(),
    "series": _series(),
    "anomalies": _found(
        (
            "id", "event", "onset_id", "rule", "detector", "severity", "kind", "tag_name", "statistic", "segment",
            "value_text", "message",
        ),
        ("attempt", "step", "rank", "micro_step", "pp_stage", "vpp_stage", "call_id", "count"),
        ("value", "baseline", "score", "time"),
    ),
    "incidents": _found(
        ("id", "state", "severity", "title", "root", "root_name", "verdict", "segment", "module"),
        ("revision", "attempt", "opened_step", "last_step", "num_members"),
        ("time",),
    ),
    "commands": _found(("actor", "action"), (), ("time",)),
}  # fmt: skip
"""Table -> its columns. `series` of the table `steps` is 0; `json` is the whole record as its file has it."""


def table_of(name: str, columns: Columns) -> pa.Table:
    """Return the rows of a table as Arrow: floats rounded to 24 binary digits, NaN as null."""
    schema = SCHEMAS[name].with_metadata({"sentinel": json.dumps({"table": name, "version": VERSION})})
    arrays = []
    for field in schema:
        values = columns[field.name]
        if values.dtype == object:
            arrays.append(pa.array(values, field.type))
            continue
        is_float = pa.types.is_floating(field.type)
        values = rounded(values) if is_float and field.name != "time" else values
        mask = np.isnan(values) if is_float else (values < 0) if field.name == "zeros" else None
        arrays.append(pa.array(values, field.type, mask=mask))
    return pa.Table.from_arrays(arrays, schema=schema)


def rounded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values to 24 binary digits: a relative error of at most 2**-24. Infinities stay what they are."""
    words = np.ascontiguousarray(values, np.float64).view(np.uint64)
    drop = np.uint64(53 - MANTISSA_BITS)
    half = np.uint64(1) << (drop - np.uint64(1))
    kept: npt.NDArray[np.float64] = ((words + half) >> drop << drop).view(np.float64)
    return np.where(np.isfinite(kept), kept, values)


def columns_of(name: str, table: pa.Table) -> Columns:
    """Return the rows of a table as arrays: of what was measured null of a float as NaN, of `zeros` as -1; else None."""
    found: Columns = {}
    for field in table.schema:
        column = table.column(field.name)
        if name in FOUND or not pa.types.is_primitive(field.type):
            found[field.name] = values = np.empty(len(column), object)
            values[:] = column.to_pylist()
            continue
        if column.null_count and pa.types.is_integer(field.type):
            column = column.fill_null(-1)
        found[field.name] = column.to_numpy()
    return found


def joined(parts: list[Columns]) -> Columns:
    """Return the rows of several parts of one table, one part behind the other."""
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}


def in_order(name: str, columns: Columns) -> Columns:
    """Return the rows of a table in its order: by series, attempt and step, or as they come."""
    if name in FOUND:
        return columns
    order = np.lexsort(tuple(columns[name] for name in reversed(ORDER)))
    return {name: values[order] for name, values in columns.items()}
