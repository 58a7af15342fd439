"""Audit: who did what, when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sentinel.store.journal_file import JournalFile


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One line of the audit: actor, action, details, and when, in seconds since the epoch."""

    time: float
    actor: str
    action: str
    details: dict[str, Any]


class Audit:
    """The table of commands, reloads and refusals; lines are never removed."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file

    def add(self, time: float, actor: str, action: str, details: dict[str, Any]) -> None:
        """Append a line. time: seconds since the epoch. actor: `policy`, `rank 3`, a user. details: JSON-able."""
        with self._file.mutex, self._file.transaction():
            self._file.db.execute(
                "INSERT INTO audit(time, actor, action, body) VALUES(?, ?, ?, ?)",
                (time, actor, action, json.dumps(details, allow_nan=False)),
            )

    def entries(self, after: int = 0) -> Iterator[tuple[int, AuditEntry]]:
        """Yield (position, entry) behind a position, counted from 1, oldest first."""
        position = after
        while True:
            with self._file.mutex:
                page = self._file.db.execute(
                    "SELECT position, time, actor, action, body FROM audit WHERE position > ? ORDER BY position LIMIT 1000",
                    (position,),
                ).fetchall()
            for position, at, actor, action, body in page:
                yield position, AuditEntry(time=at, actor=actor, action=action, details=json.loads(body))
            if len(page) < 1000:
                return

    def newest(self, limit: int = 200) -> list[AuditEntry]:
        """Return the newest entries of the audit, newest first."""
        with self._file.mutex:
            rows = self._file.db.execute(
                "SELECT time, actor, action, body FROM audit ORDER BY position DESC LIMIT ?", (limit,)
            ).fetchall()
        return [
            AuditEntry(time=at, actor=actor, action=action, details=json.loads(body)) for at, actor, action, body in rows
        ]
