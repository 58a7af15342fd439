"""JournalFile: the SQLite file of a journal, shared between threads and written in transactions."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sentinel.errors import StoreError
from sentinel.private_files import create_file, make_directory
from sentinel.store.disk import refuse_network
from sentinel.store.lease_fence import LeaseFence
from sentinel.store.trouble import journal_trouble
from sentinel.store.write_clock import WriteClock

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
_TICKS = "CREATE INDEX IF NOT EXISTS ticks ON decisions(seq) WHERE kind = 'tick'"
"""Ticks are few among many steps; journals from before this index get it when they are opened."""

LOG_BYTES = 64 * 2**20
"""Size to which the write-ahead log is cut back after a large transaction."""


class JournalFile:
    """One connection behind one lock: hold `mutex` over several uses of `db` that belong together."""

    def __init__(self, path: Path, *, read_only: bool = False, epoch: int = 0) -> None:
        """epoch, StoreError: as of `Journal`."""
        self.path = path
        self.fence = LeaseFence(path, epoch)
        self.mutex = threading.RLock()
        self.writes = WriteClock(str(path.parent))
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

    def close(self) -> None:
        """Close the file. What was committed stays."""
        with self.mutex:
            self.db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write what is executed inside whole or not at all. StoreError where the disk refuses it; FencedOff."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            # Inside, where no other process can write: what was believed before may be over by now.
            self.fence.check(self.db)
            yield
            with self.writes.writing():
                self.db.execute("COMMIT")
        except BaseException:
            # A full disk may have ended the transaction already, or left it open under a COMMIT that failed.
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise

    def meta(self, key: str) -> Any:
        """Return the value under a key of the table `meta`; None: there is none."""
        row = self.row("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else row[0]

    def row(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query; None: it has none. values: of its parameters."""
        with self.mutex:
            row: tuple[Any, ...] | None = self.db.execute(query, values).fetchone()
            return row

    def one(self, query: str) -> Any:
        """Return the one value of a query that always has one row of one column."""
        row = self.row(query)
        assert row is not None
        return row[0]

    def _make(self) -> None:
        # Under another name first: whoever asks for the run's status meets a whole journal or none.
        draft = self.path.with_name(f"{self.path.name}.new")
        draft.unlink(missing_ok=True)
        # A log beside a journal that was moved away would be played into the new one.
        for log in (path.with_name(path.name + end) for path in (draft, self.path) for end in ("-wal", "-shm")):
            log.unlink(missing_ok=True)
        os.close(create_file(draft, os.O_WRONLY))
        self._connect(draft, read_only=False)
        self.db.close()
        draft.rename(self.path)

    def _connect(self, path: Path, read_only: bool) -> None:
        uri = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        self.db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)
        try:
            self._open(read_only)
        except BaseException:
            self.db.close()
            raise

    def _open(self, read_only: bool) -> None:
        if not read_only:
            # Of account before the first table alone: what is deleted can be given back to the file system later.
            self.db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            mode = self.db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            if mode != "wal":
                raise StoreError(
                    f"{self.path}: expected write-ahead logging, got {mode}; give --state-dir DIR on a local disk"
                )
            self.db.execute("PRAGMA synchronous=FULL")
            self.db.execute(f"PRAGMA journal_size_limit={LOG_BYTES}").fetchall()
        version = self._version()
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path}: expected journal version {SCHEMA_VERSION} or older, got {version}; use a newer sentinel"
            )
        if version == 0 and read_only:
            raise StoreError(f"{self.path}: expected a journal, got an empty database; has a daemon judged this run?")
        if version == 0:
            other = self.row("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
            if other is not None:
                raise StoreError(
                    f'{self.path}: expected a journal, got a database of something else, with a table "{other[0]}"; '
                    "give another --state-dir"
                )
            with self.transaction():
                for statement in _SCHEMA.split(";"):
                    self.db.execute(statement)
                self.db.execute("INSERT OR IGNORE INTO meta VALUES('schema', ?)", (SCHEMA_VERSION,))
        if not read_only:
            with self.transaction():
                self.fence.raise_to_own(self.db)
                self.db.execute(_TICKS)
                # Journals of before it was kept have one from their next opening on.
                self.db.execute("INSERT OR IGNORE INTO meta VALUES('id', lower(hex(randomblob(16))))")

    def _version(self) -> int:
        row = self.row("SELECT name FROM sqlite_master WHERE name = 'meta'")
        if row is None:
            return 0
        value = self.meta("schema")
        return 0 if value is None else int(value)
