"""RunNotes: what sinks have to know again after a restart, kept in the journals of the runs that it is about."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable

import msgspec

from sentinel.store.run_values import RunValues

log = logging.getLogger("sentinel.daemon")

MAX_NOTES = 1000
"""Newest incidents of a run that are noted of a sink; a bound on the journal. News of older ones is a message of its own."""


class RunNotes:
    """A `report.sinks.delivery.DeliveryNotes`. One thread a sink calls it."""

    def __init__(self, values_of: Callable[[str], RunValues | None]) -> None:
        """values_of: returns what the journal of a run keeps; None: it is not served here."""
        self._values_of = values_of
        self._notes: dict[tuple[str, str], dict[str, str]] = {}
        self._mutex = threading.Lock()

    def read(self, sink: str, run: str, incident: str) -> str:
        """Return what was noted of an incident; empty: nothing."""
        return self._of(sink, run).get(incident, "")

    def write(self, sink: str, run: str, incident: str, note: str) -> None:
        """Keep a note in place of the former; what the disk does not take is known until a restart."""
        notes = self._of(sink, run)
        notes.pop(incident, None)
        notes[incident] = note
        while len(notes) > MAX_NOTES:
            del notes[next(iter(notes))]
        values = self._values_of(run)
        try:
            if values is not None:
                values.put(_name(sink), msgspec.json.encode(notes).decode())
        except sqlite3.Error as error:
            log.warning("run %s: where sink %s left a message cannot be noted: %s", run, sink, error)

    def release(self, run: str) -> None:
        """Forget the notes of a run that is served no more: another daemon may write others."""
        with self._mutex:
            self._notes = {where: notes for where, notes in self._notes.items() if where[1] != run}

    def _of(self, sink: str, run: str) -> dict[str, str]:
        with self._mutex:
            known = self._notes.get((sink, run))
        if known is not None:
            return known
        values = self._values_of(run)
        found: dict[str, str] = {}
        try:
            text = values.get(_name(sink)) if values is not None else None
            found = msgspec.json.decode(text, type=dict[str, str]) if text else {}
        except (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("run %s: where sink %s left its messages cannot be read: %s", run, sink, error)
        with self._mutex:
            return self._notes.setdefault((sink, run), found)


def _name(sink: str) -> str:
    return f"sink:{sink}"
