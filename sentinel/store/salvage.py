"""What can still be read of a journal that is damaged, or of another version, table by table; and what is wrong with it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sentinel.errors import StoreError
from sentinel.store.journal_file import JournalFile
from sentinel.store.trouble import journal_trouble, repair_words

TABLES = ("outbox", "audit", "packs", "meta", "told")
"""What a repair takes over; decisions and judgements are made anew, or come from the files."""
_OF_FILES = "'fact:incidents_written', 'fact:told'"
"""What a new journal finds out by itself."""


@dataclass(kw_only=True)
class Salvage:
    """Rows of a journal, in the order in which they were read."""

    outbox: list[tuple[Any, ...]] = field(default_factory=list)
    """(key, topic, body, tries, due, delivery, outcome); what was sent too, so that no key is queued twice, and what may
    have been received, so that it is sent again as a repeat."""
    audit: list[tuple[Any, ...]] = field(default_factory=list)
    """(time, actor, action, body)"""
    packs: list[tuple[Any, ...]] = field(default_factory=list)
    """(hash, body)"""
    facts: list[tuple[Any, ...]] = field(default_factory=list)
    """(key, value) of `RunValues`."""
    told: list[tuple[Any, ...]] = field(default_factory=list)
    """(topic, incident, over, body) of what sinks were told."""
    unread: list[str] = field(default_factory=list)
    """Names of the tables that could not be read to their end."""

    @property
    def num_waiting(self) -> int:
        """Messages that have no outcome."""
        return sum(not row[-1] for row in self.outbox)

    @property
    def inserts(self) -> list[tuple[str, list[tuple[Any, ...]]]]:
        """The statements that write all of it into a new journal, each with its rows."""
        return [
            (
                "INSERT OR IGNORE INTO outbox(key, topic, body, tries, due, delivery, outcome) VALUES(?, ?, ?, ?, ?, ?, ?)",
                self.outbox,
            ),
            ("INSERT INTO audit(time, actor, action, body) VALUES(?, ?, ?, ?)", self.audit),
            ("INSERT OR IGNORE INTO packs VALUES(?, ?)", self.packs),
            ("INSERT OR REPLACE INTO meta VALUES(?, ?)", self.facts),
            ("INSERT OR REPLACE INTO told VALUES(?, ?, ?, ?)", self.told),
        ]


def what_is_wrong(path: Path) -> str:
    """Return in words what is wrong with a journal; empty: it is whole, as far as the file itself can tell."""
    if not path.exists():
        return "there is no journal"
    try:
        with closing(JournalFile(path, read_only=True)) as file:
            said = file.one("PRAGMA integrity_check(1)")
            if said != "ok":
                return f"the journal is damaged ({said.splitlines()[-1]})"
            for table in ("decisions", "anomalies", "incidents", "snapshots"):
                file.one(f"SELECT count(*) FROM {table}")
    except StoreError as error:
        return _without_advice(path, error)
    except sqlite3.Error as error:
        return _without_advice(path, journal_trouble(path, error, read_only=True))
    return ""


def _without_advice(path: Path, error: StoreError) -> str:
    return str(error).removeprefix(f"{path}: ").removesuffix(f"; {repair_words(path)}")


def salvaged(path: Path) -> Salvage:
    """Return what can be read of a journal, whatever its state; nothing of it is interpreted."""
    found = Salvage()
    queries = {
        "outbox": (
            f"SELECT key, topic, body, tries, due, {_delivery_of(path)}, outcome FROM outbox ORDER BY position",
            found.outbox,
        ),
        "audit": ("SELECT time, actor, action, body FROM audit ORDER BY position", found.audit),
        "packs": ("SELECT hash, body FROM packs", found.packs),
        "meta": (f"SELECT key, value FROM meta WHERE key LIKE 'fact:%' AND key NOT IN ({_OF_FILES})", found.facts),
        "told": ("SELECT topic, incident, over, body FROM told ORDER BY rowid", found.told),
    }
    if not path.exists():
        found.unread = list(TABLES)
        return found
    for table, (query, rows) in queries.items():
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
                # Row by row: what stands before the damage is kept.
                for row in db.execute(query):
                    rows.append(row)
        except sqlite3.Error:
            found.unread.append(table)
    return found


def _delivery_of(path: Path) -> str:
    """Return what to select as the delivery of a row: a journal of an earlier version has no such column."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            columns = {row[1] for row in db.execute("PRAGMA table_info(outbox)")}
    except sqlite3.Error:
        return "delivery"  # nothing of the table can be read, which the query is to find out
    return "delivery" if "delivery" in columns else "''"


def set_aside(path: Path, suffix: str) -> list[Path]:
    """Give a journal and its log another name, so that nothing of it is lost; return the new names."""
    moved = []
    # The log first: beside a new journal it would be played into that.
    for end in ("-wal", "-shm", ""):
        one = path.with_name(path.name + end)
        if one.exists():
            moved.append(one.replace(path.with_name(f"{path.name}.{suffix}{end}")))
    return moved
