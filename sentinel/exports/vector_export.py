"""Vectors (histograms, values for each head, expert or channel) as JSON lines, Parquet or TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from sentinel.aggregate import nearest_names
from sentinel.errors import ConfigError
from sentinel.exports import tensorboard
from sentinel.exports.output import WholeDirectory, WholeFile
from sentinel.exports.parquet import ParquetTable
from sentinel.exports.recorded_vectors import VECTOR_COLUMNS, RecordedVector, VectorReader
from sentinel.exports.request import ExportRequest, ExportSetting, Written
from sentinel.exports.series import SeriesQuery

ROWS_AT_ONCE = 256


def export_vectors(request: ExportRequest, query: SeriesQuery, setting: ExportSetting) -> Written:
    """Write a row for each vector, and return how many there are. ConfigError for a glob that no vector's name has."""
    paths, form, output = request.paths, request.form, request.output
    reader = VectorReader(paths, query, request.attempt, request.times)
    written = Written()
    series: set[tuple[str, str, str]] = set()
    steps: set[int] = set()
    if form == "tensorboard":
        assert output is not None
        tensorboard.load()
        with WholeDirectory(output) as directory:
            for one in _counted(reader, written, series, steps):
                name = f"rank{one.rank}/{one.tensor.kind}/{tensorboard.FILE_NAME}"
                directory.append(name, _events(one), tensorboard.head())
            _check(query, reader)
        written.num_files = len(directory.files)
        return _reported(reader, written, series, steps, setting)
    with ExitStack() as stack:
        whole = None if output is None else stack.enter_context(WholeFile(output))
        table: ParquetTable | None = None
        out: Any = None
        if form == "parquet":
            assert whole is not None
            table = stack.enter_context(
                ParquetTable(whole.file, VECTOR_COLUMNS, {"run": paths.name, "table": "vectors"}, ROWS_AT_ONCE)
            )
        else:
            out = whole.file if whole is not None else stack.enter_context(setting.stdout())
        for rows in _batches(reader, written, series, steps):
            if table is not None:
                table.add({name: [row[name] for row in rows] for name in VECTOR_COLUMNS}, len(rows))
            else:
                out.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
        _check(query, reader)
        if whole is not None:
            whole.is_wanted = written.num_rows > 0
    return _reported(reader, written, series, steps, setting)


def _check(query: SeriesQuery, reader: VectorReader) -> None:
    for glob in query.names:
        if glob not in reader.met and (reader.names or glob != "*"):
            near = nearest_names([glob], reader.names)
            hint = f"; nearest: {', '.join(near)}" if near else "; there are none at all"
            raise ConfigError(f'"{glob}" matches no name of a vector{hint}')


def _reported(
    reader: VectorReader, written: Written, series: set[tuple[str, str, str]], steps: set[int], setting: ExportSetting
) -> Written:
    if reader.num_broken:
        setting.to_stderr(f"{reader.num_broken} vectors do not hold what they say, or are of tensors that nobody described")
    if not written.num_rows:
        setting.to_stderr("no vectors there")
    written.num_series, written.num_steps = len(series), len(steps)
    return written


def _events(one: RecordedVector) -> bytes:
    """Return a vector as TensorBoard has it: a histogram as one, else a value for each head, expert or channel."""
    vector = one.vector
    tag = f"vp{one.tensor.vpp_stage}:{one.tensor.name}"
    tag += f":micro{vector.micro_step}/{vector.statistic}" if vector.micro_step >= 0 else f"/{vector.statistic}"
    if len(vector.edges) == len(one.values) + 1:
        return tensorboard.histograms(one.step, one.time, [(tag, one.values, vector.edges)])
    places = (",".join(map(str, place)) for place in np.ndindex(*vector.shape))
    values = ((f"{tag}/{vector.axis} {place}", value) for place, value in zip(places, one.values, strict=True))
    return tensorboard.events(one.step, one.time, values)


def _counted(
    reader: VectorReader, written: Written, series: set[tuple[str, str, str]], steps: set[int]
) -> Iterator[RecordedVector]:
    for one in reader:
        written.num_rows += 1
        series.add((one.tensor.kind, one.tensor.name, one.vector.statistic))
        steps.add(one.step)
        yield one


def _batches(
    reader: VectorReader, written: Written, series: set[tuple[str, str, str]], steps: set[int]
) -> Iterator[list[dict[str, object]]]:
    batch: list[dict[str, object]] = []
    for one in _counted(reader, written, series, steps):
        batch.append(one.row())
        if len(batch) >= ROWS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
