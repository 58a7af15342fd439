"""FoundRows: what was found and ordered in a run, out of its journal, as rows of a history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sentinel.history.table_schemas import FOUND, SCHEMAS, Columns
from sentinel.store.journal import Journal

MOST_AT_ONCE = 20_000
"""Rows of a table that are read at once; a bound on memory: 20 MB of anomalies."""
IDENTITY: Mapping[str, tuple[str, ...]] = {
    "anomalies": ("id", "event"),
    "incidents": ("id", "revision"),
    "commands": ("time", "actor", "action"),
}
"""Columns in which no two rows of a table agree."""


class FoundRows:
    """Reads a journal that another thread writes. Opened when it is first asked, by the thread that asks."""

    def __init__(self, journal: Path) -> None:
        self._path = journal
        self._journal: Journal | None = None

    def after(self, positions: Mapping[str, int]) -> dict[str, tuple[int, Columns]]:
        """Return table -> (position of its last row, the rows behind a position, oldest first) of those that have any.

        StoreError where the journal cannot be read.
        """
        journal = self._opened()
        found = {}
        for table in FOUND:
            rows = list(islice(_rows(journal, table, positions.get(table, 0)), MOST_AT_ONCE))
            if rows:
                found[table] = rows[-1][0], _columns(table, [row for _, row in rows])
        return found

    @property
    def journal_id(self) -> str:
        """Id of the journal."""
        return self._opened().id

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _opened(self) -> Journal:
        if self._journal is None:
            self._journal = Journal(self._path, read_only=True)
        return self._journal


def _rows(journal: Journal, table: str, after: int) -> Iterator[tuple[int, dict[str, Any]]]:
    if table == "commands":
        for position, entry in journal.audit.entries(after):
            details = msgspec.json.encode(entry.details).decode()
            yield position, {"time": entry.time, "actor": entry.actor, "action": entry.action, "json": details}
        return
    for position, body in journal.found.bodies(table, after):
        yield position, {**msgspec.json.decode(body), "json": body.decode()}


def _columns(table: str, rows: Iterable[Mapping[str, Any]]) -> Columns:
    rows = list(rows)
    found: Columns = {}
    for field in SCHEMAS[table]:
        found[field.name] = column = np.empty(len(rows), object)
        column[:] = [row.get(field.name) for row in rows]
    return found


def without_known(table: str, columns: Columns, known: Columns) -> Columns:
    """Return the rows that are not among those that are known."""
    keys = set(_keys(table, known))
    kept = np.array([key not in keys for key in _keys(table, columns)], np.bool_)
    return {name: values[kept] for name, values in columns.items()}


def _keys(table: str, columns: Columns) -> Iterator[tuple[Any, ...]]:
    return zip(*(columns[name].tolist() for name in IDENTITY[table]), strict=True)
