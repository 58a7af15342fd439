"""The spool of one incarnation: append-only files in one folder, one writer, any number of readers.

<run>/spool/r<rank:05d>-<incarnation, 8 hex digits>/<index:06d>.spool      written here, cut at a size, bounded in total
                                             <last>.<first>-<n>.spool   what is kept of files at the cap
                                             ack                    written by the daemon: "<file index> <offset>\n"
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from sentinel.errors import WireError
from sentinel.messages import Descriptor, Health
from sentinel.private_files import create_file, make_directory
from sentinel.wire.clock import Clock, SystemClock
from sentinel.wire.frame import (
    NO_ATTEMPT,
    NO_STEP,
    Buffer,
    FrameType,
    Header,
    encode_frame,
    encode_message,
)
from sentinel.wire.layouts import Layouts
from sentinel.wire.spool_files import file_name

FILE_BYTES = 64 * 2**20
"""Size at which a spool file is cut, unless said otherwise."""
ROWS_BYTES = 4 * 2**20
"""Most bytes of rows in one frame; more are split."""

_FOLDER_NAME = re.compile(r"r(\d{5}|[1-9]\d{5,8})-([0-9a-f]{8})", re.ASCII)
_NEXT_CHECK_FRAMES = 256


def incarnation_folder(run_dir: Path, rank: int, incarnation: bytes) -> Path:
    """Return the folder in which an incarnation's spool lies."""
    return Path(run_dir) / "spool" / f"r{rank:05d}-{incarnation.hex()[:8]}"


@functools.lru_cache(maxsize=65536)
def parse_incarnation_folder(name: str) -> tuple[int, str] | None:
    """Return (rank, first 8 hex digits of the incarnation) of a spool folder's name; None when it is none."""
    match = _FOLDER_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def read_ack(folder: Path) -> tuple[int, int]:
    """Return (file index, byte offset) up to which the daemon has committed; (0, 0) when it has said nothing."""
    try:
        index, offset = (Path(folder) / "ack").read_text().split()
        return int(index), int(offset)
    except (OSError, ValueError):
        return 0, 0


def write_ack(folder: Path, file_index: int, offset: int) -> None:
    """Tell the writer that all before (file_index, offset) is committed. Daemon only; OSError when it cannot."""
    # Of a large job thousands are written, one after the other.
    fresh = f"{folder}/ack.new"
    with open(create_file(fresh, os.O_WRONLY | os.O_TRUNC), "wb", buffering=0) as file:  # noqa: PTH123
        file.write(b"%d %d\n" % (file_index, offset))
    os.replace(fresh, f"{folder}/ack")  # noqa: PTH105


class ClosedFiles(Protocol):
    """The files of a spool that are written to the end: what may be taken away of them, and what is to be said of it.

    Called by the writer of the spool, in its thread.
    """

    def add(self, index: int, num_bytes: int) -> None:
        """Take in the whole file of this index, which is closed now."""
        ...

    def make_room(self, file_bytes: int) -> None:
        """Have room for one more file of so many bytes below the cap, as far as there is anything that may go."""
        ...

    def drop_committed(self) -> bool:
        """Delete the oldest file if the daemon has committed all of it; True when it did."""
        ...

    def news(self, step: int) -> Health | None:
        """Return what is to be said in the spool of files that were rewritten, as of a step; None: nothing is."""
        ...

    def mark_reported(self, news: Health) -> None:
        """Take note that the news were written."""
        ...


class SpoolWriter:
    """Appends the frames of one incarnation. Never raises for what the disk does: False, counted, said once it works
    again."""

    def __init__(
        self,
        directory: Path,
        incarnation: bytes,
        rank: int,
        run_id: int,
        attempt: int | None = None,
        *,
        file_bytes: int = FILE_BYTES,
        closed_files: ClosedFiles | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`directory` is the incarnation's own folder (`incarnation_folder`), made 0700 at the first append.

        closed_files: keeps the spool below a cap; None: nothing is ever taken away.
        """
        self.directory = Path(directory)
        self.incarnation = incarnation
        self.rank = rank
        self.run_id = run_id
        self.attempt = NO_ATTEMPT if attempt is None else attempt
        self.file_bytes = max(1, file_bytes)
        self.num_failed_frames = 0
        """Frames that the disk did not take, since the beginning."""
        self.num_lost_rows = 0
        """Rows in those frames, since the beginning."""
        self._clock = clock or SystemClock()
        self._seq = 0
        self._fd = -1
        self._index = -1
        self._offset = 0
        self._closed = closed_files
        self._is_in_step = False
        """Rows were written behind the last end of a step."""
        self._layouts = Layouts()
        self._unreported_failures = 0
        self._unreported_unlinked = False
        self._last_error = ""
        self._step = NO_STEP
        self._since_check = 0

    @property
    def position(self) -> tuple[int, int]:
        """(file index, byte offset) behind the last frame; index -1 before the first."""
        return self._index, self._offset

    @property
    def last_error(self) -> str:
        """Why the disk last did not take a frame; empty: it always has."""
        return self._last_error

    def append(self, frame_type: int, payload: Buffer, *, step: int = NO_STEP, row_count: int = 0) -> bool:
        """Append one frame; False when the disk did not take it. A descriptor is kept, to head each new file."""
        if frame_type == FrameType.DESCRIPTOR:
            self._layouts.take_payload(bytes(payload))
            payload = b""
        if step != NO_STEP:
            self._step = step
        is_written = self._append(frame_type, payload, step, row_count)
        if is_written and self._has_unreported:
            self._report_losses()
        return is_written

    @property
    def _has_unreported(self) -> bool:
        has_news = self._closed is not None and self._closed.news(self._step) is not None
        return bool(self._unreported_failures or self._unreported_unlinked or has_news)

    def describe(self, descriptor: Descriptor) -> bool:
        """Put a descriptor in force for what comes, and append what it says otherwise than the last; False as `append`.

        One that the disk does not take is written before the next frame.
        """
        self._layouts.take(descriptor)
        return not self._layouts.is_owed or self.append(FrameType.CHANGE, b"")

    def append_rows(self, rows: np.ndarray, *, step: int) -> int:
        """Append rows, [rows] ROW_DTYPE, contiguous, in frames of at most ROWS_BYTES; returns the rows written."""
        raw = memoryview(np.ascontiguousarray(rows).view(np.uint8).data) if len(rows) else memoryview(b"")
        row_bytes = rows.dtype.itemsize
        most = max(1, ROWS_BYTES // row_bytes)
        num_written = 0
        for first in range(0, len(rows), most):
            count = min(most, len(rows) - first)
            part = raw[first * row_bytes : (first + count) * row_bytes]
            if self.append(FrameType.ROWS, part, step=step, row_count=count):
                num_written += count
        return num_written

    def append_step(self, rows: np.ndarray, end: Buffer, *, step: int) -> bool:
        """Append all rows of a step and its end with one call of the system; False: nothing was written, nothing counted.

        rows: as in `append_rows`, of one frame. end: the payload of the END_STEP. Where this cannot be, append each alone.
        """
        if not 0 < rows.nbytes <= ROWS_BYTES:
            return False
        parts: list[tuple[int, Buffer, int]] = [
            (FrameType.ROWS, memoryview(np.ascontiguousarray(rows).view(np.uint8).data), len(rows)),
            (FrameType.END_STEP, end, 0),
        ]
        try:
            self._get_ready(rows.nbytes + len(end))
            self._write(parts, step)
        except (OSError, WireError):
            return False
        self._step = step
        if self._has_unreported:
            self._report_losses()
        return True

    def close(self) -> None:
        """Close the file; what is written stays. Safe to call twice."""
        self._close_file()

    def disarm(self) -> None:
        """In a forked child: let go of the parent's file without a trace."""
        self._close_file()

    def _append(self, frame_type: int, payload: Buffer, step: int, row_count: int) -> bool:
        payload_bytes = memoryview(payload).nbytes
        error: Exception | None = None
        for _ in range(2):
            try:
                self._get_ready(payload_bytes)
                if frame_type not in (FrameType.DESCRIPTOR, FrameType.CHANGE):
                    self._write([(frame_type, payload, row_count)], step)
                return True
            except (OSError, WireError) as failure:
                error = failure
                # Our own committed files are the one thing here that may make room.
                is_full = isinstance(failure, OSError) and failure.errno == errno.ENOSPC
                if not (is_full and self._closed is not None and self._closed.drop_committed()):
                    break
        self._seq += 1
        self.num_failed_frames += 1
        self.num_lost_rows += row_count
        self._unreported_failures += 1
        self._last_error = str(error)
        return False

    def _get_ready(self, payload_bytes: int) -> None:
        """Have a file with room for a payload, in which the layout in force is described. OSError, WireError."""
        self._check_file()
        described = self._layouts.description() if self._layouts.is_owed else None
        if self._make_file(payload_bytes + (len(described[1]) if described else 0)):
            self._layouts.begin_file()
            described = self._layouts.description() if self._layouts.is_owed else None
        if described is not None:
            offset, (frame_type, payload) = self._offset, described
            self._write([(frame_type, payload, 0)], NO_STEP)
            self._layouts.written(offset)

    def _make_file(self, payload_bytes: int) -> bool:
        """Open a new file where there is none, or where this one is full; True when it is new. OSError."""
        wanted = payload_bytes + 128
        # Never within a step: what is thinned tells each step's losses in its end.
        if self._fd >= 0 and self._offset and self._offset + wanted > self.file_bytes and not self._is_in_step:
            self._cut()
        if self._fd >= 0:
            return self._offset == 0
        make_directory(self.directory)
        if self._closed is not None:
            self._closed.make_room(self.file_bytes)
        index = self._index + 1
        try:
            self._fd = create_file(self.directory / file_name(index), os.O_WRONLY | os.O_APPEND | os.O_EXCL)
        except FileExistsError:
            self._index = index  # not ours to touch: the next attempt takes the next number
            raise
        self._index, self._offset = index, 0
        return True

    def _write(self, parts: Sequence[tuple[int, Buffer, int]], step: int) -> None:
        """Write frames, each (type, payload, rows), with one call; OSError: what was torn is cut off, or its file left."""
        buffers: list[Buffer] = []
        for number, (frame_type, payload, row_count) in enumerate(parts, 1):
            header = Header(
                type=frame_type, incarnation=self.incarnation, run_id=self.run_id, rank=self.rank, seq=self._seq + number,
                attempt=self.attempt, step=step, placement_epoch=self._layouts.epoch, layout_id=self._layouts.id,
                wall_ns=self._clock.wall_ns(), mono_ns=self._clock.mono_ns(), row_count=row_count,
            )  # fmt: skip
            buffers += encode_frame(header, payload)
        wanted = sum(memoryview(one).nbytes for one in buffers)
        done = 0
        try:
            done = os.writev(self._fd, buffers)
            while done < wanted:  # a signal or a full disk in the middle: the next call goes on or says why
                rest = b"".join(buffers)[done:]
                num_more = os.write(self._fd, rest)
                if num_more == 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += num_more
        except OSError as error:
            if done:
                self._undo()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._cut()  # a stale handle or a bad sector never heals: the next frame begins a new file
            raise
        self._seq += len(parts)
        self._offset += wanted
        if (last := parts[-1][0]) in (FrameType.ROWS, FrameType.END_STEP):
            self._is_in_step = last == FrameType.ROWS

    def _undo(self) -> None:
        """Cut a torn frame off; a file that cannot be cut is left as it is, its reader resyncs."""
        try:
            os.ftruncate(self._fd, self._offset)
        except OSError:
            self._cut()

    def _cut(self) -> None:
        if self._fd >= 0 and self._offset:
            if self._closed is not None:
                self._closed.add(self._index, self._offset)
        elif self._fd >= 0:
            # Leave no gap in the numbers: a reader goes from one file to the next.
            with contextlib.suppress(OSError):
                (self.directory / file_name(self._index)).unlink()
                self._index -= 1
        self._close_file()

    def _close_file(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    def _check_file(self) -> None:
        """Now and then see whether somebody deleted the file under us; then go on in a new one."""
        self._since_check += 1
        if self._fd < 0 or self._since_check < _NEXT_CHECK_FRAMES:
            return
        self._since_check = 0
        if os.fstat(self._fd).st_nlink == 0:
            self._close_file()
            self._unreported_unlinked = True

    def _report_losses(self) -> None:
        """Now that the disk takes frames again, say what it did not take."""
        if self._unreported_failures:
            count = self._unreported_failures
            text = f"rank {self.rank}: {count} frames were not written: {self._last_error}"
            if not self._report(Health(code="disk_full", message=text, count=count, step=self._step)):
                return
            self._unreported_failures = 0
        if self._closed is not None and (news := self._closed.news(self._step)) is not None:
            if not self._report(news):
                return
            self._closed.mark_reported(news)
        if self._unreported_unlinked:
            text = f"rank {self.rank}: somebody deleted the spool file that was being written; going on in a new one"
            self._unreported_unlinked = not self._report(Health(code="spool_deleted", message=text, step=self._step))

    def _report(self, health: Health) -> bool:
        return self._append(FrameType.HEALTH, encode_message(health), self._step, 0)
