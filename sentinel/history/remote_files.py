"""RemoteFiles: the files of histories in stores as DuckDB opens them, and no other. Imports fsspec.

DuckDB has no network client of its own here: it is shown names under `sentinel://`, and asks for ranges of bytes.
"""

from __future__ import annotations

import datetime
import functools
import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec import AbstractFileSystem

from sentinel.errors import StoreError
from sentinel.history.manifest import Manifest
from sentinel.history.sql_views import Span
from sentinel.history.store_folder import StoreFolder

SCHEME = "sentinel"
MOST_KEPT_BYTES = 2**26
"""Bytes of ranges that are kept for a connection: a question reads the same columns several times."""
WHOLE_BYTES = 2**17
"""Files of at most so many bytes are read whole (chosen): a request takes as long as this much does."""
TAIL_BYTES = 2**14
"""Bytes at the end of a larger file that are read in one (chosen): what a Parquet file holds stands there."""
AT_ONCE = 16
"""Requests that are under way at a time where several can be (chosen)."""
_MODIFIED = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
"""No file of a history is ever written again."""


class RemoteFiles(AbstractFileSystem):
    """Of one connection. Reads only; any of DuckDB's threads may read."""

    protocol = SCHEME
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.failure: StoreError | None = None
        """Why a file could not be read; DuckDB has but the words of it."""
        self._files: dict[str, tuple[StoreFolder, str, int]] = {}
        self._kept: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._kept_bytes = 0
        self._wanted: list[Callable[[], None]] = []
        """What `fetch` asks for."""
        self._lock = threading.Lock()

    def add(self, run: int, folder: StoreFolder, manifest: Manifest, span: Span | None) -> str:
        """Have the files of a run's history opened once they are fetched; return what stands before their names.

        run: a number of its own. span: first and last step that will be asked for; None: all.
        """
        prefix = f"{SCHEME}://{run}"
        for one in manifest.files:
            self._files[f"{prefix}/{one.name}"] = folder, one.name, one.bytes
        if manifest.series:
            self._wanted.append(lambda: self._fetch_series(folder, prefix, manifest.series))
        # Of each table the first file is opened for its columns, and of the moments that are in no bucket yet the first too.
        asked = manifest if span is None else manifest.between(*span)
        firsts = {(one.table, one.table == "moments" and one.level == 0): one.name for one in reversed(asked.files)}
        for path in [f"{prefix}/{name}" for name in firsts.values()]:
            self._wanted.append(functools.partial(self._fetch_end, path))
        return prefix

    def fetch(self) -> None:
        """Ask for what every question reads of the histories that were added, all at once: a request after the other would
        take the store's latency as often as there are tables. StoreError where the store gives it not."""
        wanted, self._wanted = self._wanted, []
        with ThreadPoolExecutor(AT_ONCE, "sentinel-store") as pool:
            for one in [pool.submit(ask) for ask in wanted]:
                one.result()

    def _fetch_series(self, folder: StoreFolder, prefix: str, name: str) -> None:
        # It is read whole by nearly every question, and no manifest says how long it is.
        body = folder.read(name)
        self._files[f"{prefix}/{name}"] = folder, name, len(body)
        self._keep((f"{prefix}/{name}", 0, len(body)), body)

    def _fetch_end(self, path: str) -> None:
        size = self._known(path)[2]
        self.read(path, max(0, size - 1), size)

    def read(self, path: str, start: int, end: int) -> bytes:
        """Return bytes of a file. StoreError, noted as `failure`, where the store does not give as many."""
        folder, name, size = self._known(path)
        if size <= WHOLE_BYTES:
            return self._range(path, folder, name, 0, size)[start:end]
        if start >= (tail := max(0, size - TAIL_BYTES)):
            return self._range(path, folder, name, tail, size)[start - tail : end - tail]
        return self._range(path, folder, name, start, end)

    def _range(self, path: str, folder: StoreFolder, name: str, start: int, end: int) -> bytes:
        key = path, start, end
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        try:
            body = folder.read_range(name, start, end)
            if len(body) != end - start:
                raise StoreError(f"{folder.url}/{name}: expected {end - start} bytes from {start}, got {len(body)}")
        except StoreError as error:
            self.failure = error
            raise
        self._keep(key, body)
        return body

    def _keep(self, key: tuple[str, int, int], body: bytes) -> None:
        with self._lock:
            self._kept_bytes += len(body) - len(self._kept.pop(key, b""))
            self._kept[key] = body
            while self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def _known(self, path: str) -> tuple[StoreFolder, str, int]:
        try:
            return self._files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    # What DuckDB calls.

    def open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> RemoteFile:
        """Return a file, to be read."""
        if mode != "rb":
            raise PermissionError(f"{path}: expected to be read, not to be opened for {mode!r}")
        return RemoteFile(self, path, self._known(path)[2])

    def glob(self, path: str, **options: Any) -> list[str]:
        """Return the file of this name: no name is a pattern."""
        return [path] if path in self._files else []

    def unstrip_protocol(self, name: str) -> str:
        """Return a path as it is given: all have the scheme."""
        return name

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return name, size and type of a file."""
        return {"name": path, "size": self._known(path)[2], "type": "file"}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return what lies under a path that is no file: nothing that anybody asks for."""
        return []

    def size(self, path: str) -> int:
        """Return the bytes of a file."""
        return self._known(path)[2]

    def modified(self, path: str) -> datetime.datetime:
        """Return a time that is the same for all: what DuckDB knows of a file stays right."""
        return _MODIFIED


class RemoteFile(io.RawIOBase):
    """A file that several threads of DuckDB seek and read at once: each has a position of its own."""

    def __init__(self, files: RemoteFiles, path: str, size: int) -> None:
        self._files, self._path, self._size = files, path, size
        self._positions: dict[int, int] = {}
        """Thread -> position. Its own table, for DuckDB's threads keep nothing that is local to a thread in Python."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of this thread."""
        return self._positions.get(threading.get_ident(), 0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of this thread, and return it."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._positions[threading.get_ident()] = begin + offset
        return begin + offset

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the bytes from the position of this thread, and move it."""
        start = self.tell()
        end = self._size if size is None or size < 0 else min(start + size, self._size)
        if start >= end:
            return b""
        body = self._files.read(self._path, start, end)
        self.seek(end)
        return body
