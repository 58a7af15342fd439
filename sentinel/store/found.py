"""Found: reads the anomalies and incidents of a journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sentinel.store.journal_file import JournalFile

TAKEN_OVER = -1
"""Stands for the decision of what a repair took over from the files."""


@dataclass(frozen=True, kw_only=True)
class FoundAnomaly:
    """One anomaly as the journal keeps it. `body` is its line of JSON, without the line feed."""

    id: str
    attempt: int
    step: int
    severity: str
    body: bytes


@dataclass(frozen=True, kw_only=True)
class FoundIncident:
    """One revision of an incident. `body` is its line of JSON, without the line feed."""

    id: str
    revision: int
    body: bytes


class Found:
    """The read side of both tables; `Journal.commit` writes them."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file

    def count(self, table: str) -> int:
        """Return the number of rows of `anomalies`, `incidents` or `decisions`, those deleted since among them."""
        return int(self._file.one(f"SELECT coalesce(max(rowid), 0) FROM {_known(table)}"))

    def num_onsets(self) -> int:
        """Return the onsets since the run began: neither records of ends nor anomalies left out for their number count."""
        kept = self._file.meta("num_onsets")
        if kept is not None:
            return int(kept)
        return int(self._file.one('SELECT count(*) FROM anomalies WHERE instr(body, CAST(\'"event":"onset"\' AS BLOB)) > 0'))

    def bodies(self, table: str, after: int = 0, *, behind: int = TAKEN_OVER - 1) -> Iterator[tuple[int, bytes]]:
        """Yield (position, body) of `anomalies` or `incidents` after a position, counted from 1.

        behind: those that decisions behind this one brought alone.
        """
        position = after
        while True:
            with self._file.mutex:
                page = self._file.db.execute(
                    f"SELECT position, body FROM {_known(table)} WHERE position > ? AND seq > ? "
                    "ORDER BY position LIMIT 1000",
                    (position, behind),
                ).fetchall()
            for position, body in page:
                yield position, bytes(body)
            if len(page) < 1000:
                return

    def has_anomaly(self, one: str) -> bool:
        """Return whether there is an anomaly of this id."""
        return self._file.row("SELECT 1 FROM anomalies WHERE id = ?", (one,)) is not None

    def has_revision(self, incident: str, revision: int) -> bool:
        """Return whether there is this revision of an incident."""
        return self._file.row("SELECT 1 FROM incidents WHERE id = ? AND revision = ?", (incident, revision)) is not None

    def incident_bodies(self, incident: str) -> list[bytes]:
        """Return the revisions of an incident, oldest first."""
        with self._file.mutex:
            rows = self._file.db.execute("SELECT body FROM incidents WHERE id = ? ORDER BY revision", (incident,)).fetchall()
        return [bytes(row[0]) for row in rows]

    def incident_sizes(self) -> list[tuple[str, int, int]]:
        """Return (id, seq of the newest revision, bytes of all) of each incident, the one that changed last at the end."""
        with self._file.mutex:
            return self._file.db.execute(
                "SELECT id, max(seq), sum(length(body) + 1) FROM incidents GROUP BY id ORDER BY max(position)"
            ).fetchall()

    def forget_incidents(self, incidents: Iterable[str]) -> None:
        """Delete incidents with all their revisions; the newest row of the table stays."""
        with self._file.mutex, self._file.transaction():
            self._file.db.executemany(
                "DELETE FROM incidents WHERE id = ? AND position < (SELECT max(position) FROM incidents)",
                [(one,) for one in incidents],
            )

    def newest_anomalies(self, limit: int, before: int | None = None, step: int | None = None) -> list[tuple[int, bytes]]:
        """Return (position, body) of the newest anomalies, newest first.

        before: positions below this alone, to page backwards. step: anomalies of this step alone.
        """
        where, values = ["position < ?"], [2**62 if before is None else before]
        if step is not None:
            where.append("step = ?")
            values.append(step)
        with self._file.mutex:
            rows = self._file.db.execute(
                f"SELECT position, body FROM anomalies WHERE {' AND '.join(where)} ORDER BY position DESC LIMIT ?",
                (*values, limit),
            ).fetchall()
        return [(position, bytes(body)) for position, body in rows]

    def anomaly_bodies(self, ids: Sequence[str]) -> list[bytes]:
        """Return the anomalies of these ids, in the order in which they were found."""
        marks = ", ".join("?" * len(ids))
        with self._file.mutex:
            rows = self._file.db.execute(
                f"SELECT body FROM anomalies WHERE id IN ({marks}) ORDER BY position", ids
            ).fetchall()
        return [bytes(row[0]) for row in rows]

    def newest_incidents(self, limit: int) -> list[bytes]:
        """Return the newest revision of each incident, the one that changed last first."""
        with self._file.mutex:
            rows = self._file.db.execute(
                "SELECT body FROM incidents WHERE position IN (SELECT max(position) FROM incidents GROUP BY id) "
                "ORDER BY position DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return [bytes(row[0]) for row in rows]

    def incident_revisions(self, incident: str) -> list[bytes]:
        """Return all revisions of an incident, oldest first."""
        with self._file.mutex:
            rows = self._file.db.execute("SELECT body FROM incidents WHERE id = ? ORDER BY position", (incident,)).fetchall()
        return [bytes(row[0]) for row in rows]

    def first_revision(self, incident: str) -> bytes | None:
        """Return the revision with which an incident opened; None: none is committed."""
        row = self._file.row("SELECT body FROM incidents WHERE id = ? ORDER BY position LIMIT 1", (incident,))
        return None if row is None else bytes(row[0])


def _known(table: str) -> str:
    assert table in ("anomalies", "incidents", "decisions"), table
    return table
