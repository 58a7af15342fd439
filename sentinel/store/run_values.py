"""RunValues: small values of a run that its journal keeps, each under a name; a new one replaces the former."""

from __future__ import annotations

from sentinel.store.journal_file import JournalFile


class RunValues:
    """What the daemon keeps of a run for `sentinel status`, and for its own restart."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file

    def put(self, key: str, value: str) -> None:
        """Keep a value under a name, in place of the former."""
        with self._file.mutex, self._file.transaction():
            self._file.db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", ("fact:" + key, value))

    def get(self, key: str) -> str | None:
        """Return the value under a name; None: there is none."""
        value = self._file.meta("fact:" + key)
        return None if value is None else str(value)
