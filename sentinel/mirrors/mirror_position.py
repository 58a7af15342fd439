"""MirrorPosition: how far a mirror of a run is, on disk, so that a restart neither repeats nor leaves out."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from sentinel.errors import MALFORMED
from sentinel.private_files import make_directory
from sentinel.store.journal import Journal
from sentinel.store.run_paths import write_whole

log = logging.getLogger("sentinel.mirrors")

FOLDER = "mirrors"
"""Of a run's state: a file for each of its mirrors."""


class MirrorPosition(msgspec.Struct, frozen=True, kw_only=True):
    """What a mirror has written."""

    journal: str
    """Id of the journal that the positions are of."""
    decision: int = 0
    """The last decision whose step it has, or for which it came too late."""
    anomalies: int = 0
    """Position in the journal of the last anomaly that it has."""
    incidents: int = 0
    mark: str = ""
    """What the mirror itself said of its place."""


def begun_position(path: Path, journal: Journal, after: int) -> MirrorPosition:
    """Return where a mirror goes on: where it was, or, where nobody knows that, with what is judged from now on.

    after: the last decision that will not be given again. What cannot be read or kept is logged, and harms nobody else.
    """
    was = _read(path)
    if was is not None and was.journal == journal.id:
        return was
    found = journal.found
    begun = MirrorPosition(
        journal=journal.id, decision=after, anomalies=found.count("anomalies"), incidents=found.count("incidents"),
        # A journal that was repaired is another one; what was mirrored of it is still there.
        mark=was.mark if was is not None else "",
    )  # fmt: skip
    try:
        write_position(path, begun)
    except OSError as error:
        log.warning("%s: cannot be written: %s; a restart may mirror again what was mirrored", path, error.strerror)
    return begun


def write_position(path: Path, position: MirrorPosition) -> None:
    """Keep a position in place of the former; OSError."""
    make_directory(path.parent)
    write_whole(path, msgspec.json.encode(position).decode() + "\n")


def _read(path: Path) -> MirrorPosition | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MirrorPosition)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s: cannot be read: %s; the mirror goes on with what is judged from now on", path, error.strerror)
    except MALFORMED as error:
        log.warning("%s: expected a position, got %s; the mirror goes on with what is judged from now on", path, error)
    return None
