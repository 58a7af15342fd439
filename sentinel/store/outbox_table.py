"""OutboxTable: alerts and escalations that wait to be sent or done, in the order in which they were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sentinel.store.journal_file import JournalFile


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One message to send or command to issue. `key` identifies it for ever: a key is never queued twice."""

    key: str
    topic: str
    """Which worker takes it: `alert` or `escalation`."""
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An outgoing message or command that has no outcome yet."""

    position: int
    key: str
    body: bytes
    tries: int
    """Deliveries begun so far. Above 0, a crash or a failure lies in between: a sink may receive it again."""


class OutboxTable:
    """A `report.outbox.Outbox`. `Journal.commit` fills it; the worker that delivers writes the outcome."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file

    def waiting(self, topic: str, now: float, limit: int = 256) -> list[Waiting]:
        """Return those of `topic` that are due and have no outcome, oldest first. now: seconds since the epoch."""
        with self._file.mutex:
            rows = self._file.db.execute(
                "SELECT position, key, body, tries FROM outbox WHERE outcome = '' AND topic = ? AND due <= ? "
                "ORDER BY position LIMIT ?",
                (topic, now, limit),
            ).fetchall()
        return [Waiting(position=row[0], key=row[1], body=bytes(row[2]), tries=row[3]) for row in rows]

    def num_waiting(self, topic: str) -> int:
        """Return the number of those of `topic` without outcome, due or not."""
        row = self._file.row("SELECT count(*) FROM outbox WHERE outcome = '' AND topic = ?", (topic,))
        return int(row[0]) if row else 0

    def begin_delivery(self, positions: Sequence[int]) -> None:
        """Count a try, durably, before the message leaves: after a crash its repeat can be marked as one."""
        with self._file.mutex, self._file.transaction():
            self._file.db.executemany("UPDATE outbox SET tries = tries + 1 WHERE position = ?", [(at,) for at in positions])

    def finish_delivery(self, positions: Sequence[int], outcome: str) -> None:
        """Write the outcome (`sent`, `refused: ...`): these are never delivered again."""
        with self._file.mutex, self._file.transaction():
            self._file.db.executemany(
                "UPDATE outbox SET outcome = ? WHERE position = ?", [(outcome, at) for at in positions]
            )

    def postpone_delivery(self, positions: Sequence[int], due: float) -> None:
        """Try these again from `due` on, seconds since the epoch."""
        with self._file.mutex, self._file.transaction():
            self._file.db.executemany("UPDATE outbox SET due = ? WHERE position = ?", [(due, at) for at in positions])
