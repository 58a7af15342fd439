"""LeaseFence: keeps who had a lease once from writing into a journal that its successor has taken over.

A process that was stopped believes what it knew before. So the journal itself keeps the highest epoch under which it was
written, and each transaction looks at it from inside, where no other process can write.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sentinel.errors import StoreError

EPOCH = "epoch"
"""Key of the highest epoch in the journal's table `meta`."""


class FencedOff(StoreError):
    """The journal is another process's by now."""


class LeaseFence:
    """Of one process at one journal. An epoch of 0, which no lease has, is neither checked nor kept."""

    def __init__(self, path: Path, epoch: int) -> None:
        """path: of the journal, for messages."""
        self._path, self._epoch = path, epoch

    def check(self, db: sqlite3.Connection) -> None:
        """Raise FencedOff where the journal knows a higher epoch. Inside a transaction that writes."""
        if self._epoch and self.is_passed(known := _known(db)):
            raise FencedOff(
                f"{self._path}: expected {self._epoch} to be the highest epoch of a lease, got {known}: another process has "
                "taken over; this one writes nothing more. Where no other is at work, start it anew: it begins behind that"
            )

    def raise_to_own(self, db: sqlite3.Connection) -> None:
        """Have the journal know our epoch. Inside the same transaction as `check`."""
        if self._epoch:
            db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (EPOCH, self._epoch))

    def is_passed(self, known: int) -> bool:
        """Return whether another epoch is above ours."""
        return 0 < self._epoch < known


def _known(db: sqlite3.Connection) -> int:
    table = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    row = db.execute("SELECT value FROM meta WHERE key = ?", (EPOCH,)).fetchone() if table else None
    return int(row[0]) if row else 0
