"""LogTail: the lines that were appended to an `AppendLog` since the last look."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

WINDOW_BYTES = 2**20
MAX_LINE_BYTES = 64 * 2**20
"""A longer line is passed over; a bound on memory, far above any anomaly or incident."""


class LogTail:
    """Reads a log that another process writes. A half written last line is left until it is whole.

    Where the log became shorter, was replaced or is gone, it is read from its beginning. Never raises for what the disk
    does.
    """

    def __init__(self, path: Path, on_begun_anew: Callable[[], None], *, tail_bytes: int | None = None) -> None:
        """path: as of `AppendLog`: a directory of numbered files, or one file that ends in `.jsonl`.

        on_begun_anew: called before the first line of a log that begins anew: what was read before is not in it.
        tail_bytes: of what is there at the first look, only the lines within so many bytes of the end are read; None: all.
        """
        self._on_begun_anew = on_begun_anew
        self._path, self._tail_bytes = path, tail_bytes
        self._is_single = path.suffix == ".jsonl"
        self._name = ""
        self._file: tuple[int, int] | None = None
        """(device, inode) of the file that is read; None: there was none."""
        self._offset = 0
        self._is_in_line = False
        """What lies at the offset is the rest of a line whose beginning was passed over."""

    def lines(self) -> Iterator[bytes]:
        """Yield what is new, a whole line each, without its line feed."""
        names = self._names()
        if self._name and self._name not in names:
            # Retention removes the oldest files: what follows them is no new log.
            later = next((name for name in names if name > self._name), None)
            if later is None:
                self._begin(names[0] if names else "")
            else:
                self._move_to(later)
        elif not self._name and names:
            self._name = names[-1]
            self._offset = self._tail_offset()
            self._is_in_line = self._offset > 0
        while self._name:
            yield from self._read_file()
            later = next((name for name in names if name > self._name), None)
            if later is None:
                return
            self._move_to(later)

    def _names(self) -> list[str]:
        if self._is_single:
            return [self._path.name] if self._path.is_file() else []
        try:
            names = os.listdir(self._path)  # noqa: PTH208 -- names alone
        except OSError:
            return []
        return sorted(name for name in names if name.endswith(".jsonl") and name.removesuffix(".jsonl").isdecimal())

    def _begin(self, name: str) -> None:
        self._on_begun_anew()
        self._move_to(name)

    def _move_to(self, name: str) -> None:
        self._name, self._file, self._offset, self._is_in_line = name, None, 0, False

    def _tail_offset(self) -> int:
        if self._tail_bytes is None:
            return 0
        try:
            return max(0, self._where(self._name).stat().st_size - self._tail_bytes)
        except OSError:
            return 0

    def _where(self, name: str) -> Path:
        return self._path if self._is_single else self._path / name

    def _read_file(self) -> Iterator[bytes]:
        # A pipe or a link has no business here: neither wait for its other end nor follow it.
        try:
            fd = os.open(self._where(self._name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        with os.fdopen(fd, "rb", buffering=0):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return
            identity = (status.st_dev, status.st_ino)
            if self._file not in (None, identity) or status.st_size < self._offset:
                self._begin(self._name)
            self._file = identity
            rest = b""
            while self._offset + len(rest) < status.st_size:
                try:
                    block = os.pread(fd, WINDOW_BYTES, self._offset + len(rest))
                except OSError:
                    return
                if not block:
                    return
                *whole, rest = (rest + block).split(b"\n")
                self._offset += sum(len(line) + 1 for line in whole)
                if whole and self._is_in_line:
                    del whole[0]
                    self._is_in_line = False
                if len(rest) > MAX_LINE_BYTES:
                    self._offset, rest, self._is_in_line = self._offset + len(rest), b"", True
                yield from whole
