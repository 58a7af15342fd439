"""Facts: small values of a run, each under its name, the newest alone."""

from __future__ import annotations

from sentinel.store.journal_file import JournalFile


class Facts:
    """What `sentinel status` and a restart ask for."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file

    def remember(self, key: str, value: str) -> None:
        """Keep a small fact under a name."""
        with self._file.mutex, self._file.transaction():
            self._file.db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", ("fact:" + key, value))

    def recall(self, key: str) -> str | None:
        """Return what `remember` kept, or None."""
        value = self._file.meta("fact:" + key)
        return None if value is None else str(value)
