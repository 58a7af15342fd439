"""Tables as text: CSV and JSON lines that lose no digit and are strict."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence

import msgspec

from sentinel.csv_text import guarded
from sentinel.printable import printable

FORMATS = ("csv", "jsonl")


class TableText:
    """Turns the rows of a table into the lines of a format.

    Numbers have all their digits (1e-07 stays 1e-07). What is undefined is null in JSON and an empty field in CSV; an
    infinity, which JSON does not have, is null there and `inf` or `-inf` in CSV. Truth is `true` or `false`. Names in CSV
    that spreadsheets would take for formulas are guarded.
    """

    def __init__(self, form: str, columns: Sequence[str]) -> None:
        """form: one of FORMATS."""
        self._is_csv = form == "csv"
        self._columns = tuple(columns)
        self._buffer = io.StringIO()
        self._csv = csv.writer(self._buffer, lineterminator="\n")

    def head(self) -> str:
        """Return the line before the first row: column names of CSV; empty for JSON lines."""
        return self._line(self._columns) if self._is_csv else ""

    def row(self, values: Sequence[object]) -> str:
        """Return the line of one row, its line feed included."""
        if not self._is_csv:
            return msgspec.json.encode(dict(zip(self._columns, values, strict=True))).decode() + "\n"
        return self._line([_csv_text(value) for value in values])

    def rows(self, rows: Iterable[Sequence[object]]) -> str:
        """Return the lines of many rows, as `row` has them."""
        if not self._is_csv:
            return "".join(map(self.row, rows))
        # What is not a number is not equal to itself; only truth is of type bool.
        self._csv.writerows(
            [_csv_text(value) if value != value or type(value) in _WORDS else value for value in row] for row in rows
        )
        return self._taken()

    def _line(self, values: Sequence[object]) -> str:
        self._csv.writerow(values)
        return self._taken()

    def _taken(self) -> str:
        text = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return text


_WORDS = (bool, str)


def _csv_text(value: object) -> object:
    if isinstance(value, str):
        return guarded(printable(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and math.isnan(value):
        return ""
    return value
