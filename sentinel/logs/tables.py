"""Tables among plain logs: CSV with any delimiter, JSON lines, JSON arrays, Hugging Face's trainer_state.json."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sentinel.csv_text import unguarded
from sentinel.errors import LogError
from sentinel.logs.columns import channels, named_role
from sentinel.logs.labels import LabelledPoints, RowLabels, label_of, labelled, long_columns
from sentinel.logs.rows import CANONICAL, Rows, number

DELIMITERS = (",", "\t", ";", "|", " ")
SNIFF_LINES = 24
"""Lines that tell what a file is."""
SUMMARY_KEYS = ("train_runtime", "train_samples_per_second")
"""A record with one of these sums a whole training up (Hugging Face): its loss is a mean and no point."""
PRINTED = ("log", "message", "msg", "MESSAGE", "textPayload", "text", "line")
"""Where containers and collectors of logs (Docker, Kubernetes, journald, Google Cloud, Loki) put what was printed."""
_MAX_DEPTH = 4
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+\.\d*|(?:,\d{3}){2,})")
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+(?:[eE][-+]?\d+)?")
_BLANK = re.compile(r"\s*")
_EITHER = re.compile(r"[-+]?[1-9]\d{0,2},\d{3}")
"""3,125: three, or three thousand."""


def delimiter_of(lines: Sequence[str]) -> str | None:
    """Return what cuts these lines into a table of numbers: a delimiter, `` for a single column, None for no table.

    lines: the first ones, comments and blank ones left out; the header among them, or not.
    """
    best: tuple[bool, float, int, str] | None = None
    for delimiter in (*DELIMITERS, ""):
        rows = [cells_of(line, delimiter) for line in lines]
        width = len(rows[0])
        body = rows[1:] or rows
        is_cut = any(one in lines[0] for one in DELIMITERS[:-1])
        if (width < 2) != (delimiter == "") or (is_cut and not delimiter) or any(abs(len(row) - width) > 1 for row in rows):
            continue
        heads = [(a.strip(), b.strip()) for a, b in zip(rows[0], body[0], strict=False)]
        # Words that come again in the next line are no header: trainers print such lines.
        if any(a and a == b and not _is_number(a) for a, b in heads):
            continue
        # Nor is a line of words and numbers: `tok/sec: 1,747,626` is cut into three cells.
        if delimiter and any(_is_number(a) for a, _ in heads) and not is_all_numbers(rows[0]):
            continue
        cells = [cell for row in body for cell in row]
        num_numbers = sum(_is_number(cell) for cell in cells)
        num_blank = sum(not cell.strip() for cell in cells)
        share = num_numbers / max(len(cells) - num_blank, 1)
        # A header of two words, `Training Loss`, is no header of two columns.
        is_exact = 2 * sum(len(row) == width for row in body) > len(body)
        # Of a table with texts in it (a date, a name of a run) numbers are still a good part.
        if num_numbers >= len(body) and share >= 0.3 and (best is None or (is_exact, share, width) > best[:3]):
            best = is_exact, share, width, delimiter
    return None if best is None else best[3]


def whole_records(lines: Sequence[str]) -> list[str]:
    """Return lines with those joined that a quoted cell goes over; as they are where quotes have another meaning."""
    joined: list[str] = []
    is_open = False
    for line in lines:
        if is_open:
            joined[-1] += line
        else:
            joined.append(line)
        is_open ^= line.count('"') % 2 == 1
    return list(lines) if is_open else joined


def is_decimal_comma(lines: Sequence[str], delimiter: str) -> bool:
    """Whether a table writes 3,25 for three and a quarter."""
    cells = (cell.strip() for line in lines for cell in cells_of(line, delimiter))
    return delimiter == ";" or any(_DECIMAL_COMMA.fullmatch(cell) and not _EITHER.fullmatch(cell) for cell in cells)


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
    return all(_is_number(cell) or not cell.strip() for cell in cells)


def read_csv(
    rows: Rows, lines: Iterable[tuple[int, str]], delimiter: str, header: Sequence[str] | None, *, is_decimal: bool = False
) -> None:
    """Read a table into `rows`. lines: (number, text), comments and blank ones left out.

    header: names of the columns where the file's own first line is none. is_decimal: 3,125 is three and an eighth.
    """
    names: list[str] = list(header or ())
    labels, points = RowLabels(), LabelledPoints()
    given = [at for at, name in enumerate(names) if label_of(name)]
    """Columns that say whose numbers a row has."""
    long = _long(names)
    for at, (line, cells, is_torn) in enumerate(_records(rows.path, lines, delimiter)):
        if not names or (at and not is_all_numbers(cells) and _is_header(cells)):
            if not at or cells != names:
                names = _header(rows.path, line, cells)
                given = [at for at, name in enumerate(names) if label_of(name)]
                long = _long(names)
            continue
        if not at and (not header or not any(_is_number(cell) for cell in cells if cell.strip())):
            continue  # the file's own header
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
        if long is not None and not _is_number(cells[names.index(long[0])]):
            points.add_text(dict(zip(names, map(unguarded, cells), strict=False)), long)
            continue
        rows.add(line)
        prefix = labels.prefix((names[at], cells[at]) for at in given if at < len(cells)) if given else ""
        for name, cell in zip(names, cells, strict=False):
            if cell:
                if "," in cell:
                    cell = _thousands(name, _with_point(cell, is_decimal))
                rows.put_text(labelled(prefix, name) if prefix else name, cell, line)
    rows.notes += labels.notes
    if points:
        points.put(rows)


def _long(names: Sequence[str]) -> tuple[str, str, str] | None:
    """Return (tag, value, step) of a table with one number a row, `step,tag,value`; None where it has a loss of its own."""
    found = long_columns(names)
    roles = [named_role(name) for name in names if found and name != found[1]]
    return None if any(role and role[0] in CANONICAL for role in roles) else found


def _thousands(name: str, cell: str) -> str:
    """Steps are whole: 3,125 of them are three thousand."""
    role = named_role(name)
    return cell.replace(",", "") if role is not None and role[0] == "step" and _EITHER.fullmatch(cell.strip()) else cell


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


def _is_number(cell: str) -> bool:
    try:
        return number(_with_point(cell, True)) is not None
    except ValueError:
        return False


def _with_point(cell: str, is_decimal: bool) -> str:
    """Return a number with commas as one without: 1,234.5 and 1,234,567 are thousands, 0,5 is a half.

    is_decimal: what of 3,125, which may be either: three and an eighth, or left to be refused.
    """
    text = cell.strip()
    if _THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) and (is_decimal or not _EITHER.fullmatch(text)) else cell


# -- JSON --------------------------------------------------------------------------------------------------------------


def read_jsonl(rows: Rows, lines: Iterable[tuple[int, str]]) -> None:
    """Read one object a line. A torn last line is left out, and what was printed between the objects."""
    decode = msgspec.json.Decoder().decode
    records = _Records(rows)
    num_other = 0
    for line, text in lines:
        try:
            record = decode(text)
        except (msgspec.DecodeError, UnicodeError):
            if not text.lstrip().startswith(("{", "[", '"')):
                num_other += 1
                continue
            try:
                record = json.loads(text)  # NaN and Infinity stand in it bare
            except (ValueError, RecursionError) as error:
                if not text.endswith("\n"):
                    rows.notes.append(f"line {line} is half written and was left out")
                    break
                record = _after_torn(text)
                if record is None:
                    got = f"got {text.strip()[:60]!r} ({error})"
                    raise LogError(f"{rows.path}:{line}: expected a JSON object, {got}") from error
                rows.notes.append(f"line {line} begins half written: a process died there; what follows in it was read")
        if not isinstance(record, dict):
            raise LogError(f"{rows.path}:{line}: expected a JSON object, got {type(record).__name__}")
        records.put(record, line)
    if num_other:
        rows.notes.append(f"{num_other} lines are no JSON and were left out")
    records.end()


def _after_torn(text: str) -> Any:
    """Return the object behind a torn one in its line, as a process that was killed and started again leaves it."""
    at = text.rfind('{"')
    try:
        record = json.loads(text[at:]) if at > 0 else None
    except (ValueError, RecursionError):
        return None
    # The inner object of a line that is broken elsewhere is none.
    return record if isinstance(record, dict) and len(record) > 1 and text.count('{"') == 2 else None


def read_json(rows: Rows, text: str) -> None:
    """Read a whole JSON document: an array of records, an object of columns, or Hugging Face's trainer_state."""
    try:
        document = _documents(text)
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
    if (
        isinstance(document, dict)
        and document
        and all(key.isdigit() and isinstance(document[key], dict) for key in document)
    ):
        records = [{"step": int(key), **one} for key, one in document.items()]  # {"10": {"loss": 2.5}, ...}
    into = _Records(rows)
    if isinstance(records, list):
        if records and all(_is_event(one) for one in records):
            records = [{"step": step, "loss": value} for _, step, value in records]  # TensorBoard's own export
        for at, record in enumerate(records):
            if not isinstance(record, dict):
                raise LogError(f"{rows.path}: record {at}: expected an object, got {json.dumps(record)[:60]}")
            into.put(record, 0)
        if not records:
            raise LogError(f"{rows.path}: expected records, got an empty list")
        into.end()
        return
    columns = _lists_of(document)
    if not columns and isinstance(document, dict):
        beside = [found for one in document.values() if (found := _lists_of(one))]
        columns = beside[0] if len(beside) == 1 else {}  # {"config": {...}, "history": {"loss": [...]}}
    if not columns and isinstance(document, dict) and any(isinstance(one, int | float) for one in document.values()):
        into.put(document, 0)  # JSON lines of one line
        return
    if not columns:
        raise LogError(f'{rows.path}: expected an array of records, or "log_history", got {type(document).__name__}')
    for at in range(max(len(values) for values in columns.values())):
        into.put({name: values[at] for name, values in columns.items() if at < len(values)}, 0)


def _documents(text: str) -> Any:
    """Return a document; of several in a row, each over many lines, an array of them."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise
    found, at, decode = [], 0, json.JSONDecoder().raw_decode
    while at < len(text):
        one, end = decode(text, at)
        found.append(one)
        at = _BLANK.match(text, end).end()  # type: ignore[union-attr]
    return found


def wrapping_of(lines: Iterable[str]) -> str:
    """Return under what name JSON lines hold the line that was printed, as containers' logs do; empty: they are records."""
    found = ""
    for text in itertools.islice((line for line in lines if line.strip()), SNIFF_LINES):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            return ""
        if set(CANONICAL).intersection(channels([name for name, _ in _numbers(record, "", 0)]).values()):
            return ""
        found = found or next((name for name in PRINTED if isinstance(record.get(name), str)), "")
    return found


def unwrapped(lines: Iterable[tuple[int, str]], name: str) -> Iterator[tuple[int, str]]:
    """Yield the printed lines that JSON lines hold under a name; others are passed over."""
    for at, text in lines:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get(name), str):
            yield at, record[name]


def _lists_of(document: Any) -> dict[str, list[Any]]:
    items = document.items() if isinstance(document, dict) else ()
    return {name: value for name, value in items if isinstance(value, list)}


def _is_event(record: Any) -> bool:
    """Whether a record is (wall time, step, value)."""
    return isinstance(record, list) and len(record) == 3 and all(isinstance(one, int | float) for one in record)


class _Records:
    """Puts objects in as rows; one that sums up a training is a row without numbers."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._labels, self._points = RowLabels(), LabelledPoints()
        self._long: dict[tuple[str, ...], tuple[str, str, str] | None] = {}

    def put(self, record: Mapping[str, Any], line: int) -> None:
        rows, keys = self._rows, tuple(record)
        if keys not in self._long:
            self._long = {**self._long, keys: _long(keys)} if len(self._long) < 64 else {}
        long = self._long.get(keys)
        if long is not None and isinstance(record[long[0]], str) and self._points.add_text(record, long):
            return
        rows.add(line)
        if any(key in record for key in SUMMARY_KEYS):
            return
        prefix = self._labels.prefix((key, record[key]) for key in keys if label_of(key))
        for name, value in _numbers(record, "", 0):
            if prefix:
                name = labelled(prefix, name)
            if isinstance(value, str):
                rows.put_text(name, value, line)
            else:
                rows.put(name, value)

    def end(self) -> None:
        self._rows.notes += self._labels.notes
        if self._points:
            self._points.put(self._rows)


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
