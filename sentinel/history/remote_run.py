"""RemoteRun: a run whose history lies in an object store. Read only, through its manifest, as one on a disk is."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from sentinel.errors import StoreError
from sentinel.history.config import FOLDER
from sentinel.history.manifest import MANIFEST, Manifest, decoded_manifest, read_manifest
from sentinel.history.store_folder import FileVanished, StoreFolder, checked_url

Answer = TypeVar("Answer")


class RemoteRun:
    """A run of which `<url>/history/` is there, as `sentinel history push` leaves it. Named by the last part of the URL."""

    def __init__(self, url: str) -> None:
        """ConfigError for a URL with credentials in it, a scheme that nobody knows, or a package that is missing."""
        self.url = checked_url(url)
        self.name = self.url.rpartition("/")[2]
        self.folder = StoreFolder(f"{self.url}/{FOLDER}")

    def __str__(self) -> str:
        return self.url

    def manifest(self) -> Manifest:
        """Return what is published there now. StoreError where nothing is, or it cannot be read."""
        try:
            body = self.folder.read(MANIFEST)
        except FileVanished as error:
            raise StoreError(
                f"{self.url}: expected a run with a history, there is no {FOLDER}/{MANIFEST} ({error}); "
                "sentinel history push RUN puts one there"
            ) from error
        return decoded_manifest(body, f"{self.url}/{FOLDER}")

    def found(self, table: str) -> list[bytes]:
        """Return the records of anomalies, incidents or commands, as their files have them, in the order of the journal."""
        records: list[bytes] = []
        for one in self.manifest().of(table):
            try:
                rows = pq.read_table(io.BytesIO(self.folder.read(one.name)), columns=["json"])
            except pa.ArrowException as error:
                raise StoreError(f"{self.folder.url}/{one.name}: expected a Parquet file, got: {error}") from error
            records += [str(record).encode() for record in rows.column("json").to_pylist()]
        return records


RunPlace: TypeAlias = Path | RemoteRun
"""Where a run lies: its directory, or what a URL leads to."""


def manifest_of(place: RunPlace) -> Manifest:
    """Return what is published of a run's history; of a directory without one an empty manifest. StoreError as it says."""
    return place.manifest() if isinstance(place, RemoteRun) else read_manifest(place / FOLDER)


def once_more_if_vanished(ask: Callable[[], Answer]) -> Answer:
    """Return an answer, asked once more where a file went meanwhile: whoever asks reads the manifest first, and it names
    others by now. StoreError where that one names a file that is not there either."""
    try:
        return ask()
    except FileVanished:
        pass
    try:
        return ask()
    except FileVanished as error:
        raise StoreError(f"{error}; the manifest there names it: sentinel history push RUN puts it there") from error
