"""The journal: what was decided, judged, found, told and commanded, in one SQLite file that survives kill -9.

The order of events for every step, which makes "never twice, never lost" hold at any instant:

1. the decision is written (`record`) before anything judges it;
2. one transaction (`commit`) moves the judged offset, the anomalies, the incidents and the outbox together;
3. only then do lines reach `anomalies/*.jsonl` and `incidents.jsonl`, messages the sinks, and commands the ranks.

So the files are always a prefix of the journal, and what is missing from them after a crash is appended from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sentinel.errors import StoreError
from sentinel.private_files import create_file, make_directory
from sentinel.store.disk import refuse_network
from sentinel.store.trouble import journal_trouble

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decisions(seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS packs(hash TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS anomalies(
    position INTEGER PRIMARY KEY, seq INTEGER NOT NULL, id TEXT NOT NULL, attempt INTEGER NOT NULL,
    step INTEGER NOT NULL, severity TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS anomalies_by_id ON anomalies(id);
CREATE TABLE IF NOT EXISTS incidents(
    position INTEGER PRIMARY KEY, seq INTEGER NOT NULL, id TEXT NOT NULL, revision INTEGER NOT NULL,
    body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS incidents_by_id ON incidents(id, revision);
CREATE TABLE IF NOT EXISTS outbox(
    position INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, topic TEXT NOT NULL, body BLOB NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL DEFAULT 0,
    outcome TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS outbox_open ON outbox(topic, position) WHERE outcome = '';
CREATE TABLE IF NOT EXISTS audit(
    position INTEGER PRIMARY KEY, time REAL NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots(seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""


@dataclass(frozen=True, kw_only=True)
class FoundAnomaly:
    """One anomaly as the journal keeps it: `body` is the line of JSON, without its line feed."""

    id: str
    attempt: int
    step: int
    severity: str
    body: bytes


@dataclass(frozen=True, kw_only=True)
class FoundIncident:
    """One revision of an incident; `body` is the line of JSON, without its line feed."""

    id: str
    revision: int
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One thing to tell or to do. `key` names it for ever: the same key is never queued twice."""

    key: str
    topic: str
    """Who takes it from the outbox: `alert` or `escalation`."""
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An outgoing thing that has no outcome yet."""

    position: int
    key: str
    body: bytes
    tries: int
    """Deliveries begun so far. Above 0, a crash or a failure lies in between: a sink may hear it again."""


@dataclass(kw_only=True)
class Commit:
    """All that judging up to one decision brought; `Journal.commit` writes it whole or not at all."""

    judged: int
    """Seq of the last decision that this covers."""
    anomalies: list[tuple[int, FoundAnomaly]] = field(default_factory=list)
    """(seq of the decision, anomaly) in total order."""
    incidents: list[tuple[int, FoundIncident]] = field(default_factory=list)
    outbox: list[Outgoing] = field(default_factory=list)
    snapshot: bytes | None = None
    """State after the decision `judged`; None: no snapshot this time."""


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One line of the audit: who did what, when."""

    time: float
    actor: str
    action: str
    details: dict[str, Any]


class Journal:
    """One run's journal. Safe to share between threads; one process at a time writes (the run's lock sees to that).

    path: `<state-dir>/journal.sqlite`, made 0600 with its directory 0700. Raises StoreError on a network file system,
    for a journal of a newer version, for a file that is no journal, and for what the disk did (`journal_trouble`).
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._mutex = threading.RLock()
        refuse_network(path)
        if read_only and not path.exists():
            raise StoreError(f"{path}: expected a journal, got nothing; has a daemon judged this run?")
        try:
            if not read_only:
                make_directory(path.parent)
                if not path.exists():
                    self._make()
            self._connect(path, read_only)
        except (sqlite3.Error, OSError) as error:
            raise journal_trouble(path, error, read_only=read_only) from error
        self._last_seq = int(self._one("SELECT coalesce(max(seq), 0) FROM decisions"))

    def _make(self) -> None:
        # Under another name first: whoever asks for the run's status meets a whole journal or none.
        draft = self.path.with_name(f"{self.path.name}.new")
        draft.unlink(missing_ok=True)
        # A log beside a journal that was moved away would be played into the new one.
        for log in (path.with_name(path.name + end) for path in (draft, self.path) for end in ("-wal", "-shm")):
            log.unlink(missing_ok=True)
        os.close(create_file(draft, os.O_WRONLY))
        self._connect(draft, read_only=False)
        self._db.close()
        draft.rename(self.path)

    def _connect(self, path: Path, read_only: bool) -> None:
        uri = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)
        try:
            self._open(read_only)
        except BaseException:
            self._db.close()
            raise

    def _open(self, read_only: bool) -> None:
        if not read_only:
            mode = self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            if mode != "wal":
                raise StoreError(
                    f"{self.path}: expected write-ahead logging, got {mode}; give --state-dir DIR on a local disk"
                )
            self._db.execute("PRAGMA synchronous=FULL")
        version = self._version()
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path}: expected journal version {SCHEMA_VERSION} or older, got {version}; use a newer sentinel"
            )
        if version == 0 and read_only:
            raise StoreError(f"{self.path}: expected a journal, got an empty database; has a daemon judged this run?")
        if version == 0:
            other = self._row("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
            if other is not None:
                raise StoreError(
                    f'{self.path}: expected a journal, got a database of something else, with a table "{other[0]}"; '
                    "give another --state-dir"
                )
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT OR IGNORE INTO meta VALUES('schema', ?)", (SCHEMA_VERSION,))

    def close(self) -> None:
        """Close the file. What was committed stays."""
        with self._mutex:
            self._db.close()

    # Decisions and packs: written before anything judges them.

    @property
    def last_seq(self) -> int:
        """Seq of the newest decision; 0 when there is none."""
        return self._last_seq

    @property
    def judged(self) -> int:
        """Seq of the last decision whose verdict was committed; 0 when there is none."""
        value = self._meta("judged")
        return int(value) if value is not None else 0

    def record(self, decisions: Sequence[tuple[int, str, bytes]]) -> None:
        """Write (seq, kind, body), in one transaction. Seqs go on from `last_seq` without a gap.

        Kill -9 cannot undo it from here on. A power cut can until the next `commit`, which syncs it to the disk before
        anybody outside sees a judgement on it: what nobody saw may be decided anew. That saves a sync a step.
        """
        if not decisions:
            return
        with self._mutex:
            self._db.execute("PRAGMA synchronous=NORMAL")
            try:
                with self._transaction():
                    self._db.executemany("INSERT INTO decisions VALUES(?, ?, ?)", decisions)
            finally:
                self._db.execute("PRAGMA synchronous=FULL")
            self._last_seq = decisions[-1][0]

    def decisions(self, after: int = 0, until: int | None = None) -> Iterator[tuple[int, str, bytes]]:
        """Yield (seq, kind, body) of decisions after `after` and up to `until`, in order."""
        position = after
        while True:
            with self._mutex:
                page = self._db.execute(
                    "SELECT seq, kind, body FROM decisions WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT 256",
                    (position, 2**62 if until is None else until),
                ).fetchall()
            yield from page
            if len(page) < 256:
                return
            position = page[-1][0]

    def newest_decisions(self, kind: str, limit: int) -> list[bytes]:
        """Return the newest decisions of a kind, newest first."""
        with self._mutex:
            rows = self._db.execute(
                "SELECT body FROM decisions WHERE kind = ? ORDER BY seq DESC LIMIT ?", (kind, limit)
            ).fetchall()
        return [bytes(row[0]) for row in rows]

    def num_decisions(self, kind: str) -> int:
        """Return how many decisions of a kind there are."""
        with self._mutex:
            return int(self._db.execute("SELECT count(*) FROM decisions WHERE kind = ?", (kind,)).fetchone()[0])

    def keep_pack(self, pack_hash: str, body: bytes) -> None:
        """Keep the text of a rule pack, so that a replay judges with the rules of the day."""
        with self._mutex, self._transaction():
            self._db.execute("INSERT OR IGNORE INTO packs VALUES(?, ?)", (pack_hash, body))

    def pack(self, pack_hash: str) -> bytes | None:
        """Return the text kept for `pack_hash`, or None."""
        row = self._row("SELECT body FROM packs WHERE hash = ?", (pack_hash,))
        return None if row is None else bytes(row[0])

    # Judgements.

    def commit(self, commit: Commit) -> None:
        """Move the judged offset, the anomalies, the incidents and the outbox together; StoreError going backwards."""
        with self._mutex, self._transaction():
            before = self.judged
            if commit.judged < before:
                raise StoreError(
                    f"{self.path}: expected a verdict after decision {before}, got {commit.judged}; a second daemon?"
                )
            self._db.execute("INSERT OR REPLACE INTO meta VALUES('judged', ?)", (commit.judged,))
            self._db.executemany(
                "INSERT INTO anomalies(seq, id, attempt, step, severity, body) VALUES(?, ?, ?, ?, ?, ?)",
                [(seq, one.id, one.attempt, one.step, one.severity, one.body) for seq, one in commit.anomalies],
            )
            self._db.executemany(
                "INSERT INTO incidents(seq, id, revision, body) VALUES(?, ?, ?, ?)",
                [(seq, one.id, one.revision, one.body) for seq, one in commit.incidents],
            )
            self._db.executemany(
                "INSERT OR IGNORE INTO outbox(key, topic, body) VALUES(?, ?, ?)",
                [(one.key, one.topic, one.body) for one in commit.outbox],
            )
            if commit.snapshot is not None:
                self._db.execute("INSERT OR REPLACE INTO snapshots VALUES(?, ?)", (commit.judged, commit.snapshot))
                # Two are kept: the newest may have been written by a version that cannot be read back.
                self._db.execute(
                    "DELETE FROM snapshots WHERE seq NOT IN (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT 2)"
                )

    def snapshots(self) -> list[tuple[int, bytes]]:
        """Return (seq, state) of the kept snapshots, newest first."""
        with self._mutex:
            return [
                (seq, bytes(body)) for seq, body in self._db.execute("SELECT seq, body FROM snapshots ORDER BY seq DESC")
            ]

    def drop_snapshot(self, seq: int) -> None:
        """Forget a snapshot that could not be restored."""
        with self._mutex, self._transaction():
            self._db.execute("DELETE FROM snapshots WHERE seq = ?", (seq,))

    def count(self, table: str) -> int:
        """Return the number of rows of `anomalies`, `incidents` or `decisions`."""
        return int(self._one(f"SELECT coalesce(max(rowid), 0) FROM {_known(table)}"))

    def num_onsets(self) -> int:
        """Return the number of anomalies: onsets alone, neither the records of their ends nor of what was not written."""
        return int(self._one('SELECT count(*) FROM anomalies WHERE instr(body, CAST(\'"event":"onset"\' AS BLOB)) > 0'))

    def bodies(self, table: str, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (position, body) of `anomalies` or `incidents` after a position, counted from 1."""
        position = after
        while True:
            with self._mutex:
                page = self._db.execute(
                    f"SELECT position, body FROM {_known(table)} WHERE position > ? ORDER BY position LIMIT 1000",
                    (position,),
                ).fetchall()
            for position, body in page:
                yield position, bytes(body)
            if len(page) < 1000:
                return

    def newest_anomalies(self, limit: int, before: int | None = None, step: int | None = None) -> list[tuple[int, bytes]]:
        """Return (position, body) of the newest anomalies, newest first; `before` pages backwards."""
        where, values = ["position < ?"], [2**62 if before is None else before]
        if step is not None:
            where.append("step = ?")
            values.append(step)
        with self._mutex:
            rows = self._db.execute(
                f"SELECT position, body FROM anomalies WHERE {' AND '.join(where)} ORDER BY position DESC LIMIT ?",
                (*values, limit),
            ).fetchall()
        return [(position, bytes(body)) for position, body in rows]

    def newest_incidents(self, limit: int) -> list[bytes]:
        """Return the newest revision of each incident, the one that changed last first."""
        with self._mutex:
            rows = self._db.execute(
                "SELECT body FROM incidents WHERE position IN (SELECT max(position) FROM incidents GROUP BY id) "
                "ORDER BY position DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return [bytes(row[0]) for row in rows]

    # The outbox.

    def waiting(self, topic: str, now: float, limit: int = 256) -> list[Waiting]:
        """Return what is due of `topic` and has no outcome, oldest first. now: seconds since the epoch."""
        with self._mutex:
            rows = self._db.execute(
                "SELECT position, key, body, tries FROM outbox WHERE outcome = '' AND topic = ? AND due <= ? "
                "ORDER BY position LIMIT ?",
                (topic, now, limit),
            ).fetchall()
        return [Waiting(position=row[0], key=row[1], body=bytes(row[2]), tries=row[3]) for row in rows]

    def num_waiting(self, topic: str) -> int:
        """Return how many of `topic` have no outcome."""
        row = self._row("SELECT count(*) FROM outbox WHERE outcome = '' AND topic = ?", (topic,))
        return int(row[0]) if row else 0

    def begin_delivery(self, positions: Sequence[int]) -> None:
        """Count a try, durably, before the message leaves: after a crash its repeat can be marked as one."""
        with self._mutex, self._transaction():
            self._db.executemany("UPDATE outbox SET tries = tries + 1 WHERE position = ?", [(at,) for at in positions])

    def finish_delivery(self, positions: Sequence[int], outcome: str) -> None:
        """Write the outcome (`sent`, `refused: ...`): these are done for ever."""
        with self._mutex, self._transaction():
            self._db.executemany("UPDATE outbox SET outcome = ? WHERE position = ?", [(outcome, at) for at in positions])

    def postpone_delivery(self, positions: Sequence[int], due: float) -> None:
        """Try these again from `due` on, seconds since the epoch."""
        with self._mutex, self._transaction():
            self._db.executemany("UPDATE outbox SET due = ? WHERE position = ?", [(due, at) for at in positions])

    # The audit, and small facts.

    def audit(self, time: float, actor: str, action: str, details: dict[str, Any]) -> None:
        """Write down a command, a reload, a refusal."""
        with self._mutex, self._transaction():
            self._db.execute(
                "INSERT INTO audit(time, actor, action, body) VALUES(?, ?, ?, ?)",
                (time, actor, action, json.dumps(details, allow_nan=False)),
            )

    def audited(self, limit: int = 200) -> list[AuditEntry]:
        """Return the newest entries of the audit, newest first."""
        with self._mutex:
            rows = self._db.execute(
                "SELECT time, actor, action, body FROM audit ORDER BY position DESC LIMIT ?", (limit,)
            ).fetchall()
        return [
            AuditEntry(time=at, actor=actor, action=action, details=json.loads(body)) for at, actor, action, body in rows
        ]

    def remember(self, key: str, value: str) -> None:
        """Keep a small fact under a name."""
        with self._mutex, self._transaction():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", ("fact:" + key, value))

    def recall(self, key: str) -> str | None:
        """Return what `remember` kept, or None."""
        value = self._meta("fact:" + key)
        return None if value is None else str(value)

    # Inside.

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk may have ended the transaction already, or left it open under a COMMIT that failed.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _version(self) -> int:
        row = self._row("SELECT name FROM sqlite_master WHERE name = 'meta'")
        if row is None:
            return 0
        value = self._meta("schema")
        return 0 if value is None else int(value)

    def _meta(self, key: str) -> Any:
        row = self._row("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else row[0]

    def _row(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        with self._mutex:
            row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
            return row

    def _one(self, query: str) -> Any:
        row = self._row(query)
        assert row is not None
        return row[0]


def _known(table: str) -> str:
    assert table in ("anomalies", "incidents", "decisions"), table
    return table
