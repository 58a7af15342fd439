"""Tables among plain logs: CSV with any delimiter, JSON lines, JSON arrays, Hugging Face's trainer_state.json."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sentinel.errors import LogError
from sentinel.ingest.log_columns import named_role
from sentinel.ingest.log_rows import Rows, number

DELIMITERS = (",", "\t", ";", "|", " ")
SNIFF_LINES = 24
"""Lines that tell what a file is."""
SUMMARY_KEYS = ("train_runtime", "train_samples_per_second")
"""A record with one of these sums a whole training up (Hugging Face): its loss is a mean and no point."""
_MAX_DEPTH = 4


def delimiter_of(lines: Sequence[str]) -> str | None:
    """Return what cuts these lines into a table of numbers: a delimiter, `` for a single column, None for no table.

    lines: the first ones, comments and blank ones left out; the header among them, or not.
    """
    best: tuple[float, int, str] | None = None
    for delimiter in (*DELIMITERS, ""):
        rows = [cells_of(line, delimiter) for line in lines]
        width = len(rows[0])
        body = rows[1:] or rows
        if (width < 2) != (delimiter == "") or any(abs(len(row) - width) > 1 for row in rows):
            continue
        heads = [(a.strip(), b.strip()) for a, b in zip(rows[0], body[0], strict=False)]
        # Words that come again in the next line are no header: trainers print such lines.
        if any(a and a == b and not _is_number(a, delimiter) for a, b in heads):
            continue
        # Nor is a line of words and numbers: `tok/sec: 1,747,626` is cut into three cells.
        if delimiter and any(_is_number(a, delimiter) for a, _ in heads) and not is_all_numbers(rows[0]):
            continue
        cells = [cell for row in body for cell in row]
        num_numbers = sum(_is_number(cell, delimiter) for cell in cells)
        num_blank = sum(not cell.strip() for cell in cells)
        share = num_numbers / max(len(cells) - num_blank, 1)
        # Of a table with texts in it (a date, a name of a run) numbers are still a good part.
        if num_numbers >= len(body) and share >= 0.3 and (best is None or (share, width) > best[:2]):
            best = share, width, delimiter
    return None if best is None else best[2]


def cells_of(line: str, delimiter: str) -> list[str]:
    """Return the cells of one line."""
    if not delimiter:
        return [line.strip()]
    if delimiter == " ":
        return line.split()
    try:
        cells = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        cells = line.split(delimiter)
    # Lines that end in a delimiter are common.
    return cells[:-1] if len(cells) > 1 and not cells[-1].strip() and line.rstrip("\r\n").endswith(delimiter) else cells


def is_all_numbers(cells: Sequence[str]) -> bool:
    """Whether no cell is a word."""
    return all(_is_number(cell, "") or not cell.strip() for cell in cells)


def read_csv(rows: Rows, lines: Iterable[tuple[int, str]], delimiter: str, header: Sequence[str] | None) -> None:
    """Read a table into `rows`. lines: (number, text), comments and blank ones left out.

    header: names of the columns where the file's own first line is none.
    """
    names: list[str] = list(header or ())
    decimal_comma = delimiter == ";"
    for at, (line, cells, is_torn) in enumerate(_records(rows.path, lines, delimiter)):
        if not names or (at and not is_all_numbers(cells) and _is_header(cells)):
            if not at or cells != names:
                names = _header(rows.path, line, cells)
            continue
        if not at and not header:
            continue
        if len(cells) > len(names) and not any(cell.strip() for cell in cells[len(names) :]):
            cells = cells[: len(names)]
        if len(cells) != len(names):
            if is_torn and len(cells) < len(names):
                rows.notes.append(f"line {line} is half written and was left out")
                return
            if len(cells) > len(names) or not cells:
                raise LogError(
                    f"{rows.path}:{line}: expected {len(names)} cells ({', '.join(names[:6])}), got {len(cells)}; "
                    f"is the delimiter {delimiter!r}?"
                )
        rows.add()
        for name, cell in zip(names, cells, strict=False):
            if cell:
                if decimal_comma and "," in cell:
                    cell = cell.replace(",", ".")
                rows.put_text(name, cell, line)


def _records(path: str, lines: Iterable[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, list[str], bool]]:
    """Yield (line, cells, whether the line has no end)."""
    if delimiter in ("", " "):
        for line, text in lines:
            yield line, cells_of(text, delimiter), not text.endswith("\n")
        return
    at, text = 0, ""

    def texts() -> Iterator[str]:
        nonlocal at, text
        for one in lines:
            at, text = one
            yield text

    reader = csv.reader(texts(), delimiter=delimiter, skipinitialspace=True)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise LogError(f"{path}:{at}: expected cells between {delimiter!r}, {error}") from error
        if cells is None:
            return
        if len(cells) > 1 and not cells[-1].strip() and text.rstrip("\r\n").endswith(delimiter):
            cells = cells[:-1]
        yield at, cells, not text.endswith("\n")


def _is_header(cells: Sequence[str]) -> bool:
    """Whether a line in the middle is a header again: a resumed logger wrote it."""
    return sum(named_role(cell) is not None for cell in cells) >= min(2, len(cells))


def _header(path: str, line: int, cells: Sequence[str]) -> list[str]:
    names = [cell.strip().lstrip("#").strip().strip("\"'") for cell in cells]
    twice = next((name for at, name in enumerate(names) if name and name in names[:at]), None)
    if twice is not None:
        raise LogError(f'{path}:{line}: expected columns of different names, got "{twice}" twice; rename one')
    return names


def _is_number(cell: str, delimiter: str) -> bool:
    try:
        return number(cell.replace(",", ".") if delimiter == ";" else cell) is not None
    except ValueError:
        return False


# -- JSON --------------------------------------------------------------------------------------------------------------


def read_jsonl(rows: Rows, lines: Iterable[tuple[int, str]]) -> None:
    """Read one object a line; a torn last line is left out."""
    decode = msgspec.json.Decoder().decode
    for line, text in lines:
        try:
            record = decode(text)
        except (msgspec.DecodeError, UnicodeError):
            try:
                record = json.loads(text)  # NaN and Infinity stand in it bare
            except (ValueError, RecursionError) as error:
                if not text.endswith("\n"):
                    rows.notes.append(f"line {line} is half written and was left out")
                    return
                raise LogError(f"{rows.path}:{line}: expected a JSON object, got {text.strip()[:60]!r} ({error})") from error
        if not isinstance(record, dict):
            raise LogError(f"{rows.path}:{line}: expected a JSON object, got {type(record).__name__}")
        put_record(rows, record, line)


def read_json(rows: Rows, text: str) -> None:
    """Read a whole JSON document: an array of records, an object of columns, or Hugging Face's trainer_state."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{rows.path}:{error.lineno}"
        raise LogError(f"{where}: expected JSON, {error.msg} at column {error.colno}; is it whole?") from error
    except RecursionError as error:
        raise LogError(f"{rows.path}: expected records, got JSON that is nested too deeply") from error
    if isinstance(document, dict) and isinstance(document.get("log_history"), list):
        rows.form = "trainer_state"
        records: Any = document["log_history"]
    else:
        records = document
        if isinstance(document, dict):
            inner = [one for one in document.values() if isinstance(one, list) and one and isinstance(one[0], dict)]
            records = inner[0] if len(inner) == 1 else records
    if isinstance(records, list):
        for at, record in enumerate(records):
            if not isinstance(record, dict):
                raise LogError(f"{rows.path}: record {at}: expected an object, got {json.dumps(record)[:60]}")
            put_record(rows, record, 0)
        if not records:
            raise LogError(f"{rows.path}: expected records, got an empty list")
        return
    items = document.items() if isinstance(document, dict) else ()
    columns = {name: value for name, value in items if isinstance(value, list)}
    if not columns and isinstance(document, dict) and any(isinstance(one, int | float) for one in document.values()):
        put_record(rows, document, 0)  # JSON lines of one line
        return
    if not columns:
        raise LogError(f'{rows.path}: expected an array of records, or "log_history", got {type(document).__name__}')
    for at in range(max(len(values) for values in columns.values())):
        put_record(rows, {name: values[at] for name, values in columns.items() if at < len(values)}, 0)


def put_record(rows: Rows, record: Mapping[str, Any], line: int) -> None:
    """Put one object in as a row; a record that sums up a training is a row without numbers."""
    rows.add()
    if not any(key in record for key in SUMMARY_KEYS):
        for name, value in _numbers(record, "", 0):
            if isinstance(value, str):
                rows.put_text(name, value, line)
            else:
                rows.put(name, value)


def _numbers(record: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, float | str]]:
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            # An integer of a thousand digits is no float.
            yield name, float(value) if isinstance(value, float) or abs(value) < 2**1023 else math.inf
        elif isinstance(value, str):
            yield name, value
        elif isinstance(value, dict) and "_type" not in value and depth < _MAX_DEPTH:
            yield from _numbers(value, f"{name}/", depth + 1)
        elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], int | float):
            yield name, float(value[0])
