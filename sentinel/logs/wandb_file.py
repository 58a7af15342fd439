"""`run-*.wandb`, what Weights & Biases' client writes of an offline run, read without wandb: of its records the history.

A log as LevelDB has it: blocks of 32 KiB, records cut where a block ends, here with zlib's CRC-32 over type and data and a
head of seven bytes. Source: github.com/google/leveldb, doc/log_format.md, and the files that wandb 0.31 writes.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from sentinel.errors import LogError
from sentinel.logs.protobuf_fields import fields, signed
from sentinel.logs.rows import Rows

MAGIC = b":W&B"
_HEAD, _VERSION = struct.Struct("<4sHB"), 0
_MAGIC_NUMBER = 0xBEE1
_BLOCK_BYTES = 1 << 15
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _ITEM, _STEP, _KEY, _NESTED_KEY, _VALUE = 2, 1, 2, 1, 2, 16
"""Numbers of fields. Source: wandb/proto/wandb_internal.proto."""
MAX_RECORD_BYTES = 1 << 28
"""Bytes of a record; a bound on memory, 256 MiB."""
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_wandb(rows: Rows, stream: BinaryIO) -> None:
    """Read the history of a run: a row for each record of it. LogError for damage, and for a run without any."""
    for at, record in enumerate(_records(rows, stream)):
        try:
            for number, value in fields(memoryview(record)):
                if number == _HISTORY and isinstance(value, memoryview):
                    _put_history(rows, value)
        except (IndexError, ValueError) as error:
            got = f"{len(record)} other bytes ({error})"
            raise LogError(f"{rows.path}: record {at}: expected a record of wandb, got {got}") from error
    if not rows.num_rows:
        raise LogError(f"{rows.path}: expected the history of a run in wandb's file, found none")


def _put_history(rows: Rows, history: memoryview) -> None:
    rows.add()
    for number, value in fields(history):
        if number == _ITEM and isinstance(value, memoryview):
            name, said = _item(value)
            if (measured := _number(said)) is not None:
                rows.put(name, measured)
        elif number == _STEP and isinstance(value, memoryview):
            for inner, step in fields(value):
                if inner == 1 and isinstance(step, int):
                    rows.put("_step", float(signed(step)))


def _item(item: memoryview) -> tuple[str, bytes]:
    key, nested, value = "", [], b""
    for number, part in fields(item):
        if isinstance(part, memoryview):
            if number == _KEY:
                key = bytes(part).decode("utf-8", "replace")
            elif number == _NESTED_KEY:
                nested.append(bytes(part).decode("utf-8", "replace"))
            elif number == _VALUE:
                value = bytes(part)
    return key or ".".join(nested), value


def _number(said: bytes) -> float | None:
    """Return the number that a value in JSON is; None for texts, images, tables, booleans."""
    if not said or said[:1] not in b'-0123456789NI"' or len(said) > 64:
        return None
    value = json.loads(said)
    if isinstance(value, str):
        return _WORDS.get(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if isinstance(value, float) or abs(value) < 2**1023 else math.inf
    return None


def _records(rows: Rows, stream: BinaryIO) -> Iterator[bytes]:
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size or _HEAD.unpack(head)[:2] != (MAGIC, _MAGIC_NUMBER):
        raise LogError(f"{rows.path}: expected the head of wandb's file, got {head!r}; it is damaged")
    if (version := _HEAD.unpack(head)[2]) != _VERSION:
        raise LogError(f"{rows.path}: expected version {_VERSION} of wandb's file, got {version}; export its history as CSV")
    at, left, num, parts = _HEAD.size, _BLOCK_BYTES - _HEAD.size, 0, list[bytes]()
    while True:
        if left < _RECORD.size:
            at += len(stream.read(left))
            left = _BLOCK_BYTES
        begun = stream.read(_RECORD.size)
        data = b""
        if len(begun) == _RECORD.size:
            checksum, size, kind = _RECORD.unpack(begun)
            data = stream.read(size)
        if len(begun) < _RECORD.size or len(data) < size or not any(begun):
            # A file that nobody closed ends anywhere; zeros are what a disk had not written yet.
            rest = begun + data
            if (begun and (len(begun) < _RECORD.size or len(data) < size)) or parts:
                rows.notes.append(f"record {num} is half written and was left out")
            elif rest and stream.read().strip(b"\0"):
                raise LogError(f"{rows.path}: byte {at}: expected a record of wandb, got zeros; the file is damaged")
            return
        if zlib.crc32(data, zlib.crc32(begun[6:7])) != checksum:
            raise LogError(f"{rows.path}: byte {at}: record {num} has a wrong checksum; the file is damaged")
        is_whole = kind == _FULL or (kind == _LAST and parts)
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or (kind in (_FULL, _FIRST)) == bool(parts):
            raise LogError(f"{rows.path}: byte {at}: record {num} does not follow from the one before; the file is damaged")
        parts.append(data)
        if sum(map(len, parts)) > MAX_RECORD_BYTES:
            raise LogError(f"{rows.path}: byte {at}: expected a record of at most {MAX_RECORD_BYTES >> 20} MiB")
        at, left = at + _RECORD.size + size, left - _RECORD.size - size
        if is_whole:
            yield b"".join(parts)
            num, parts = num + 1, []
