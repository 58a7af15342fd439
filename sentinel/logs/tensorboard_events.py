"""TensorBoard's event files, read without TensorBoard: records of protocol buffers, of which scalars matter here."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from sentinel.crc32c import masked_crc32c
from sentinel.errors import LogError
from sentinel.logs.labels import LabelledPoints
from sentinel.logs.protobuf_fields import fields, signed, varint
from sentinel.logs.rows import Rows

MAX_RECORD_BYTES = 1 << 30
"""Bytes of a record; a bound on memory, 1 GiB: images and graphs are large, a longer length is a damaged one."""
CHECKED_BYTES = 1 << 16
"""Bytes up to which the data of a record are compared with their checksum, which takes time: scalars are shorter, what is
longer are images and graphs."""
_HEAD = struct.Struct("<QI")
_DT_FLOAT, _DT_DOUBLE, _DT_INT32, _DT_INT64, _DT_HALF = 1, 2, 3, 9, 19


def is_event_file(head: bytes) -> bool:
    """Whether a file that begins so is one of records: its first length has the right checksum."""
    return len(head) >= _HEAD.size and _HEAD.unpack_from(head)[1] == masked_crc32c(head[:8])


def read_events(rows: Rows, files: Iterable[Path], opened: Callable[[Path], BinaryIO]) -> None:
    """Read event files of one run, in the order of their names."""
    points = LabelledPoints()
    for file in files:
        with opened(file) as stream:
            for tag, step, value in _scalars(stream, file, rows):
                points.add(tag, step, value)
    if not points:
        raise LogError(f"{rows.path}: expected scalars in TensorBoard's event files, found none")
    points.put(rows)


def _scalars(stream: BinaryIO, file: Path, rows: Rows) -> Iterator[tuple[str, int, float]]:
    for at, record in _records(stream, file, rows):
        try:
            yield from _event(record)
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            got = f"{len(record)} other bytes"
            raise LogError(f"{file}: record {at}: expected an event of TensorBoard, got {got}") from error


def _records(stream: BinaryIO, file: Path, rows: Rows) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while True:
        head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size:
            if head:
                rows.notes.append(f"{file.name}: record {at} is half written and was left out")
            return
        length, checksum = _HEAD.unpack(head)
        if masked_crc32c(head[:8]) != checksum or length > MAX_RECORD_BYTES:
            got = "a length with a wrong checksum; the file is damaged"
            raise LogError(f"{file}: record {at}: expected a record of TensorBoard, got {got}")
        data, end = stream.read(length), stream.read(4)
        if len(data) < length or len(end) < 4:
            rows.notes.append(f"{file.name}: record {at} is half written and was left out")
            return
        if length <= CHECKED_BYTES and masked_crc32c(data) != int.from_bytes(end, "little"):
            raise LogError(f"{file}: record {at}: {length} bytes with a wrong checksum; the file is damaged")
        yield at, memoryview(data)
        at += 1


def _event(data: memoryview) -> Iterator[tuple[str, int, float]]:
    step = 0
    summaries = []
    for number, value in fields(data):
        if number == 2 and isinstance(value, int):
            step = signed(value)
        elif number == 5 and isinstance(value, memoryview):
            summaries.append(value)
    for summary in summaries:
        for number, value in fields(summary):
            if number == 1 and isinstance(value, memoryview):
                tag, scalar = _value(value)
                if scalar is not None:
                    yield tag, step, scalar


def _value(data: memoryview) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, value in fields(data):
        if number == 1 and isinstance(value, memoryview):
            tag = bytes(value).decode()
        elif number == 2 and isinstance(value, memoryview):
            scalar = float(struct.unpack("<f", value)[0])
        elif number == 8 and isinstance(value, memoryview):
            scalar = _tensor(value)
    return tag, scalar


def _tensor(data: memoryview) -> float | None:
    """Return the one number of a tensor; None for other tensors: texts, images, histograms."""
    dtype, content = 0, None
    plain: dict[int, memoryview | int] = {}
    for number, value in fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number == 2 and isinstance(value, memoryview):
            for inner, dim in fields(value):
                if inner == 2 and isinstance(dim, memoryview) and any(n == 1 and size != 1 for n, size in fields(dim)):
                    return None
        elif number == 4 and isinstance(value, memoryview):
            content = bytes(value)
        elif number in (5, 6, 7, 10, 13):
            plain[number] = value
    code = {_DT_FLOAT: "<f", _DT_DOUBLE: "<d", _DT_INT32: "<i", _DT_INT64: "<q", _DT_HALF: "<e"}.get(dtype)
    if code is None:
        return None
    if content is not None:
        return float(struct.unpack(code, content)[0]) if len(content) == struct.calcsize(code) else None
    for number, value in plain.items():
        if isinstance(value, int):
            return float(value)
        if number == 5 and len(value) == 4:
            return float(struct.unpack("<f", value)[0])
        if number == 6 and len(value) == 8:
            return float(struct.unpack("<d", value)[0])
        if number in (7, 10):
            return float(varint(value, 0)[0])
    return None
