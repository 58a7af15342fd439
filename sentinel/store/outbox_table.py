"""OutboxTable: alerts and escalations that wait to be sent or done, in the order in which they were found, and what sinks
were told of which incidents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sentinel.store.journal_file import JournalFile

KEEP_OVER_S = 7 * 86400.0
"""Seconds for which it is remembered that a sink was told of an incident that is over; a bound on the table."""
_SENT = ("sent", "repeated", "digested", "correlated")
"""Outcomes of a row whose message a sink has received."""

_TOLD = """
CREATE TABLE IF NOT EXISTS told(
    topic TEXT NOT NULL, incident TEXT NOT NULL, over REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY(topic, incident))
"""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One message to send or command to issue. `key` identifies it for ever: a key is never queued twice."""

    key: str
    topic: str
    """Which worker takes it: `alert` or `escalation`."""
    body: bytes
    tries: int = 0
    """Deliveries that may have been received before it was queued: above 0, it is sent as a repeat."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An outgoing message or command that has no outcome yet."""

    position: int
    key: str
    body: bytes
    tries: int
    """Deliveries begun of which nobody knows whether they were received: above 0, it is sent as a repeat."""
    delivery: str = ""
    """The delivery that was begun with it, and of which nobody knows whether it was received; empty: there is none."""


@dataclass(frozen=True, kw_only=True)
class ToldIncident:
    """What one sink was told of one incident; replaces what was noted of the two before."""

    position: int
    """Of a row of the same run."""
    topic: str
    incident: str
    over: float
    """Seconds since the epoch when the sink was told its end; 0.0: it is open."""
    body: bytes


class OutboxTable:
    """A `report.outbox.Outbox`. `Journal.commit` fills it; the worker that delivers writes the outcome."""

    generation = 0
    """Never changes: this is one run's."""

    def __init__(self, file: JournalFile, *, read_only: bool = False) -> None:
        self._file = file
        if not read_only:
            self._complete()

    def waiting(self, topic: str, now: float, limit: int = 256) -> list[Waiting]:
        """Return those of `topic` that are due and have no outcome, oldest first. now: seconds since the epoch."""
        with self._file.mutex:
            rows = self._file.db.execute(
                "SELECT position, key, body, tries, delivery FROM outbox WHERE outcome = '' AND topic = ? AND due <= ? "
                "ORDER BY position LIMIT ?",
                (topic, now, limit),
            ).fetchall()
        return [Waiting(position=row[0], key=row[1], body=bytes(row[2]), tries=row[3], delivery=row[4]) for row in rows]

    def num_waiting(self, topic: str) -> int:
        """Return the number of those of `topic` without outcome, due or not."""
        row = self._file.row("SELECT count(*) FROM outbox WHERE outcome = '' AND topic = ?", (topic,))
        return int(row[0]) if row else 0

    def outcomes(self, topics: str) -> dict[str, dict[str, int]]:
        """Return topic -> outcome -> rows, of the topics that begin so; the outcome of what waits is empty."""
        found: dict[str, dict[str, int]] = {}
        with self._file.mutex:
            rows = self._file.db.execute("SELECT topic, outcome, count(*) FROM outbox GROUP BY topic, outcome").fetchall()
        for name, outcome, number in rows:
            if name.startswith(topics):
                found.setdefault(name, {})[outcome] = number
        return found

    def begin_delivery(self, deliveries: Mapping[int, str]) -> None:
        """Note, durably and before the message leaves, which delivery each position is part of, and count the try."""
        with self._file.mutex, self._file.transaction():
            self._file.db.executemany(
                "UPDATE outbox SET tries = tries + 1, delivery = ? WHERE position = ?",
                [(delivery, at) for at, delivery in deliveries.items()],
            )

    def finish_delivery(self, positions: Sequence[int], outcome: str, told: Sequence[ToldIncident] = ()) -> None:
        """Write the outcome (`sent`, `refused: ...`): these are never delivered again. told: what the sink knows now."""
        with self._file.mutex, self._file.transaction():
            self._file.db.executemany(
                "UPDATE outbox SET outcome = ? WHERE position = ?", [(outcome, at) for at in positions]
            )
            for one in told:
                self._file.db.execute(
                    "INSERT OR REPLACE INTO told VALUES(?, ?, ?, ?)", (one.topic, one.incident, one.over, one.body)
                )
                if one.over:
                    self._file.db.execute("DELETE FROM told WHERE over > 0 AND over < ?", (one.over - KEEP_OVER_S,))

    def postpone_delivery(self, positions: Sequence[int], due: float, *, is_unknown: bool = False) -> None:
        """Try these again from `due` on, seconds since the epoch. is_unknown: they may have been received."""
        forget = "" if is_unknown else ", delivery = '', tries = 0"
        with self._file.mutex, self._file.transaction():
            self._file.db.executemany(
                f"UPDATE outbox SET due = ?{forget} WHERE position = ?", [(due, at) for at in positions]
            )

    def told(self, topic: str) -> list[bytes]:
        """Return what the sink of a topic was told of each incident that it was told of."""
        with self._file.mutex:
            rows = self._file.db.execute("SELECT body FROM told WHERE topic = ? ORDER BY rowid", (topic,)).fetchall()
        return [bytes(row[0]) for row in rows]

    def was_sent(self, message: str) -> bool:
        """Return whether a row whose delivery is part of a message, as its first line says, has the outcome of one that was
        received."""
        line = f"{message}\n"
        row = self._file.row(
            f"SELECT 1 FROM outbox WHERE substr(delivery, 1, ?) = ? AND outcome IN ({', '.join('?' * len(_SENT))}) LIMIT 1",
            (len(line), line, *_SENT),
        )
        return row is not None

    def _complete(self) -> None:
        """Add what the journal of an earlier version has not."""
        with self._file.mutex, self._file.transaction():
            self._file.db.execute(_TOLD)
            columns = {row[1] for row in self._file.db.execute("PRAGMA table_info(outbox)")}
            if "delivery" not in columns:
                self._file.db.execute("ALTER TABLE outbox ADD COLUMN delivery TEXT NOT NULL DEFAULT ''")
