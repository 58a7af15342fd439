"""The manifest of a history: which files it is made of. Replaced as a whole, so that a reader sees each step once.

A file that the manifest no longer names stays for `GRACE_S`: who has read the former manifest still reads its files.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from sentinel.errors import StoreError
from sentinel.history.table_schemas import VERSION
from sentinel.private_files import create_file

MANIFEST = "manifest.json"
PART = ".part-"
"""What the name of a file begins with that is not whole yet; no pattern of a reader meets it."""
GRACE_S = 600.0
"""Seconds that a file stays behind the manifest that last named it (chosen): longer than any question takes."""


class HistoryFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a table."""

    name: str
    table: str
    level: int
    """How often its rows were merged from smaller files; 0: written while the run went on."""
    rows: int
    bytes: int
    attempt: int
    """Of its first row."""
    first_step: int
    last_step: int


class Retired(msgspec.Struct, frozen=True):
    """A file that is no longer of the history."""

    name: str
    at: float
    """Seconds since the epoch."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a history holds."""

    version: int = VERSION
    decision: int = 0
    """The last decision whose step is in the files; what comes up to it again is there already."""
    missing: int = 0
    """Steps that could not be written, for want of disk."""
    serial: int = 0
    """Files of what was found that were written so far: each has a number of its own."""
    journal: str = ""
    """Id of the journal that `positions` are of."""
    positions: dict[str, int] = {}
    """Table -> position in the journal of the last row of what was found that is in the files."""
    attempts: tuple[tuple[int, int], ...] = ()
    """(attempt, its first step), rising: a step of an attempt stands until a later attempt begins at or before it."""
    series: str = ""
    """File of the table of series; it is written anew when there are more."""
    full_from: int = 0
    """First step from which every step is there; before it there are buckets, and what lies about anomalies."""
    files: tuple[HistoryFile, ...] = ()
    retired: tuple[Retired, ...] = ()
    id: str = ""
    """Of this history, whatever its folder is called: drawn when it begins, and the same wherever it is copied to. Empty: it
    was begun by a Sentinel that drew none, and has one from its next write on."""

    def of(self, table: str) -> tuple[HistoryFile, ...]:
        """Return the files of a table, oldest first."""
        return tuple(one for one in self.files if one.table == table)

    def between(self, first: int, last: int) -> Manifest:
        """Return it without the files that have steps, and none from `first` to `last`."""
        return msgspec.structs.replace(
            self,
            files=tuple(
                one
                for one in self.files
                if one.last_step < one.first_step or (one.first_step <= last and first <= one.last_step)
            ),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that it names."""
        return sum(one.bytes for one in self.files)


def read_manifest(folder: Path) -> Manifest:
    """Return what is published in a folder; an empty manifest where there is none. StoreError when it cannot be read."""
    path = folder / MANIFEST
    try:
        body = path.read_bytes()
    except FileNotFoundError:
        return Manifest()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    return decoded_manifest(body, str(folder))


def decoded_manifest(body: bytes, folder: str) -> Manifest:
    """Return what the text of a manifest says. StoreError where it is none; folder: where it lies, for the words."""
    path = f"{folder}/{MANIFEST}"
    try:
        found = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{path}: expected a manifest of a history, got: {error}; move {folder} away to begin anew"
        ) from error
    if found.version != VERSION:
        raise StoreError(f"{path}: expected version {VERSION}, got {found.version}; read it with the Sentinel that wrote it")
    for name in (found.series, *(one.name for one in found.files), *(one.name for one in found.retired)):
        # Nothing that a foreign manifest names leads out of its folder.
        if "/" in name or "\0" in name or name.startswith("."):
            raise StoreError(f"{path}: expected names of files in {folder}, got {name[:80]!r}")
    return found


def publish(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest; on disk when this returns. OSError where that fails: the former one stands."""
    part = folder / f"{PART}{MANIFEST}"
    fd = create_file(part, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / MANIFEST)
    sync(folder)


def sync(folder: Path) -> None:
    """Have the names of a folder on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(folder: Path, manifest: Manifest, now: float) -> tuple[Retired, ...]:
    """Delete what was retired long ago; return what stays. now: seconds since the epoch."""
    stays = []
    for one in manifest.retired:
        # A clock that was set back makes nothing stay for ever, nor go before its time by more than that once.
        if 0 <= now - one.at < GRACE_S:
            stays.append(one)
        else:
            with contextlib.suppress(FileNotFoundError):
                (folder / one.name).unlink()
    return tuple(stays)


def delete_unnamed(folder: Path, manifest: Manifest) -> None:
    """Delete what a writer left that was killed before it published: nobody has read it."""
    named = {MANIFEST, manifest.series, *(one.name for one in manifest.files), *(one.name for one in manifest.retired)}
    for one in folder.iterdir():
        if one.name not in named and (one.name.startswith(PART) or one.suffix == ".parquet"):
            with contextlib.suppress(FileNotFoundError):
                one.unlink()
