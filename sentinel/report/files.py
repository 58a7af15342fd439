"""JSON lines that are appended and never rewritten, each exactly once, kill -9 and full disks included.

The journal is the truth: it numbers every line before the line is appended here. So a file is always a prefix of what
the journal knows, `AppendLog.recover` appends what is missing from it, and a half line left by a crash is completed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly
from sentinel.errors import StoreError
from sentinel.private_files import create_file, make_directory

FILE_BYTES = 64 * 2**20
"""Bytes at which a file of anomalies is cut, about 130,000 anomalies. Too small: thousands of files; too large: they open in
no editor."""

MAX_PENDING_BYTES = 64 * 2**20
"""Most bytes of lines kept in memory while the disk refuses them; past it `recover` brings them from the journal."""


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"expected a value that JSON knows, got {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def json_line(value: object) -> bytes:
    """Return `value` as one line of strict JSON, without its line feed: NaN and infinities become null."""
    return _ENCODER.encode(value)


def anomaly_line(anomaly: Anomaly) -> bytes:
    """Return the public line of an anomaly; a value that JSON cannot say is null beside its `value_text`."""
    value = anomaly.value
    if value is not None and not np.isfinite(value):
        text = "nan" if np.isnan(value) else "inf" if value > 0 else "-inf"
        anomaly = msgspec.structs.replace(anomaly, value=None, value_text=anomaly.value_text or text)
    return json_line(anomaly)


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where the next line goes: behind `num_lines` whole lines. Kept in the journal as JSON (`text`, `parse`)."""

    num_lines: int = 0
    """Lines of the log so far, all files together: the number the journal gave to the last of them."""
    index: int = 1
    """Number of the file, from 1; of a log that is one file, how often it was written (`AppendLog.rewrite`)."""
    offset: int = 0
    """Bytes of that file so far."""

    def text(self) -> str:
        """Return the position as one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str | None) -> LogPosition:
        """Return the position that `text` says; the beginning for None."""
        return cls() if text is None else msgspec.json.decode(text, type=cls)


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What `AppendLog.recover` found and did."""

    num_found: int
    """Lines that were there."""
    num_written: int
    """Lines that were missing, the completed half line among them."""
    is_torn: bool
    """The last line was half there."""
    set_aside: Path | None = None
    """Where bytes went that no line of the journal explains; None: there were none."""


class AppendLog:
    """An append-only log of JSON lines. Not for several threads at once; one process writes.

    path: a directory (files `<index:06d>.jsonl`, cut at `file_bytes`), or a file ending in `.jsonl` (never cut).
    A line is never split over two files. Nothing here raises for a full disk: `append` keeps the lines in memory,
    `problem` says why, and the next `append` or `retry` goes on exactly where the disk stopped.
    """

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self.path = path
        self.is_single = path.suffix == ".jsonl"
        self.problem = ""
        """Why lines wait in memory; empty when none do."""
        self.num_failures = 0
        """Writes that the disk refused, since the log was opened."""
        self.needs_recovery = False
        """More lines waited than memory may hold: call `recover` with what the journal has after `position`."""
        self._file_bytes = file_bytes
        self._max_pending_bytes = max_pending_bytes
        self._position = LogPosition()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._num_begun = 0
        self._fd = -1
        self._open_index = 0
        self._reader: tuple[int, BinaryIO] | None = None

    @property
    def position(self) -> LogPosition:
        """Behind the last line that is whole on disk (in the page cache: `sync` makes it durable)."""
        return self._position

    @property
    def num_pending(self) -> int:
        """Lines that wait for the disk."""
        return len(self._pending)

    def file(self, index: int) -> Path:
        """Return the path of file `index`, from 1."""
        return self.path if self.is_single else self.path / f"{index:06d}.jsonl"

    def append(self, lines: Iterable[bytes]) -> LogPosition:
        """Append lines (without line feeds, none inside) and return `position`. Never raises for the disk."""
        if self.needs_recovery:
            return self._position
        for line in lines:
            assert b"\n" not in line, line[:200]
            self._pending.append(line + b"\n")
            self._pending_bytes += len(line) + 1
        self.retry()
        if self._pending_bytes > self._max_pending_bytes:
            self._forget_pending()
            self.needs_recovery = True
        return self._position

    def retry(self) -> bool:
        """Write what waits; True when nothing waits any more."""
        try:
            while self._pending:
                self._write_some()
        except OSError as error:
            self.num_failures += 1
            reason = error.strerror or str(error)
            waiting = f"{len(self._pending)} lines wait, {self._pending_bytes / 1024:,.1f} KiB"
            self.problem = f"{self.file(self._position.index)}: {reason}; {waiting}"
            # A descriptor that failed may stay bad (a file system mounted read-only and back); open anew next time.
            self._close_file()
            return False
        self.problem = ""
        return not self.needs_recovery

    def sync(self) -> LogPosition:
        """Make `position` survive a power cut and return it. Takes milliseconds: not for every step."""
        if self._fd >= 0:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self.num_failures += 1
                self.problem = f"{self.file(self._position.index)}: {error.strerror or error}"
        return self._position

    def recover(self, expected_tail: Iterable[bytes], since: LogPosition | None = None) -> Recovery:
        """Bring the files to what the journal knows: append the lines that are missing, complete a half one.

        expected_tail: all lines (without line feeds) that follow `since`, in order. since: a position the journal
        kept; None: from the beginning. Bytes that match no expected line are moved to `<file>.foreign-<offset>` (no
        reader of `*.jsonl` sees them) before the log goes on. StoreError when the file is shorter than `since` says:
        somebody cut it; call again with None and all lines.
        """
        since = since or LogPosition()
        self._forget_pending()
        self._close_file()
        self.needs_recovery = False
        self._position = since
        if since.offset and self._size(since.index) < since.offset:
            raise StoreError(
                f"{self.file(since.index)}: expected at least {since.offset} bytes, got {self._size(since.index)}; "
                "recover from the beginning, with all lines of the journal"
            )
        tail = iter(expected_tail)
        num_found, is_torn, missing = 0, False, None
        for line in tail:
            whole = line + b"\n"
            index, offset = self._position.index, self._position.offset
            there = self._read(index, offset, len(whole))
            if not there:
                # Files may have been cut at another size than today's: the disk says where the next line begins.
                index, offset = self._end_position()
                there = self._read(index, offset, len(whole))
            if there == whole:
                self._position = LogPosition(num_lines=self._position.num_lines + 1, index=index, offset=offset + len(whole))
                num_found += 1
                continue
            missing = line
            is_torn = bool(there) and whole.startswith(there) and self._size(index) == offset + len(there)
            if is_torn:
                self._position = LogPosition(num_lines=self._position.num_lines, index=index, offset=offset)
                self._num_begun = len(there)
            break
        set_aside = None if is_torn else self._set_aside()
        self._close_reader()
        before = self._position.num_lines
        if missing is not None:
            self.append([missing])
            for line in tail:
                self.append([line])
        return Recovery(
            num_found=num_found,
            num_written=self._position.num_lines - before,
            is_torn=is_torn,
            set_aside=set_aside,
        )

    def rewrite(self, lines: Iterable[tuple[int, bytes]], index: int) -> None:
        """Replace a log that is one file by these (number, line): readers see the former or the new one, whole.

        index: counts the replacements: a position with another one is of a former file. OSError where the disk refuses;
        the former file stays then.
        """
        assert self.is_single
        self._forget_pending()
        self._close_file()
        self.needs_recovery = False
        make_directory(self.path.parent)
        draft = self.path.with_name(f".{self.path.name}.new")
        offset = num_lines = 0
        try:
            with os.fdopen(create_file(draft, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                for num_lines, line in lines:  # noqa: B007 -- the last one counts
                    offset += file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._position = LogPosition(num_lines=num_lines, index=index, offset=offset)

    def begin_file(self, since: LogPosition) -> None:
        """Go on behind the lines of `since` in a file behind all others that are there."""
        self._forget_pending()
        self._close_file()
        numbers = [int(one.stem) for one in self.path.glob("*.jsonl") if one.stem.isdecimal()]
        self._position = LogPosition(num_lines=since.num_lines, index=max(numbers, default=0) + 1)

    def prunable(self, most_bytes: int, oldest: float, before: int) -> list[Path]:
        """Return the files to go, oldest first: of those past `most_bytes`, and those last written before `oldest`.

        before: files of this number and above stay. oldest: seconds since the epoch.
        """
        files = sorted(one for one in self.path.glob("*.jsonl") if one.stem.isdecimal())
        stats = {one: one.stat() for one in files}
        left = sum(stat.st_size for stat in stats.values())
        found = []
        for one, stat in stats.items():
            if int(one.stem) >= before or not ((most_bytes and left > most_bytes) or stat.st_mtime < oldest):
                break
            found.append(one)
            left -= stat.st_size
        return found

    def close(self) -> None:
        """Write what waits, if the disk takes it, and close the file."""
        self.retry()
        self._close_file()

    def _write_some(self) -> None:
        line = self._pending[0]
        if not self._num_begun:
            self._position = self._cut(self._position, len(line))
        self._open(self._position.index)
        batch, size = [line[self._num_begun :]], len(line)
        for other in self._pending[1:256]:
            if not self.is_single and self._position.offset + size + len(other) > self._file_bytes:
                break
            batch.append(other)
            size += len(other)
        # At its own place, not at the end: a process that was stopped here, and goes on when another has completed the file
        # from the journal, writes the same bytes once more instead of behind them.
        written = self._num_begun + os.pwritev(self._fd, batch, self._position.offset + self._num_begun)
        num_whole = 0
        while num_whole < len(batch) and written >= len(self._pending[num_whole]):
            length = len(self._pending[num_whole])
            written -= length
            num_whole += 1
            self._pending_bytes -= length
            self._position = LogPosition(
                num_lines=self._position.num_lines + 1,
                index=self._position.index,
                offset=self._position.offset + length,
            )
        del self._pending[:num_whole]
        self._num_begun = written

    def _cut(self, at: LogPosition, num_bytes: int) -> LogPosition:
        if self.is_single or not at.offset or at.offset + num_bytes <= self._file_bytes:
            return at
        return LogPosition(num_lines=at.num_lines, index=at.index + 1, offset=0)

    def _end_position(self) -> tuple[int, int]:
        index, offset = self._position.index, self._position.offset
        if not self.is_single and offset and self._size(index) == offset and self.file(index + 1).exists():
            return index + 1, 0
        return index, offset

    def _set_aside(self) -> Path | None:
        index, offset = self._end_position()
        extra = self._read(index, offset, max(self._size(index) - offset, 0))
        if not extra:
            return None
        path = self.file(index)
        aside = path.with_name(f"{path.name}.foreign-{offset}")
        aside.write_bytes(extra)
        os.truncate(path, offset)
        self._position = LogPosition(num_lines=self._position.num_lines, index=index, offset=offset)
        return aside

    def _size(self, index: int) -> int:
        try:
            return self.file(index).stat().st_size
        except FileNotFoundError:
            return 0

    def _read(self, index: int, offset: int, num_bytes: int) -> bytes:
        if self._reader is None or self._reader[0] != index:
            self._close_reader()
            try:
                self._reader = (index, self.file(index).open("rb"))
            except FileNotFoundError:
                return b""
        file = self._reader[1]
        if file.tell() != offset:
            file.seek(offset)
        return file.read(num_bytes)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader[1].close()
        self._reader = None

    def _open(self, index: int) -> None:
        if self._fd >= 0 and self._open_index == index:
            return
        self._close_file()
        path = self.file(index)
        make_directory(path.parent)
        self._fd = create_file(path, os.O_WRONLY)
        self._open_index = index

    def _close_file(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    def _forget_pending(self) -> None:
        self._pending, self._pending_bytes, self._num_begun = [], 0, 0
