"""The spool of one life: append-only files in one folder, one writer, any number of readers.

<run>/spool/r<rank:05d>-<life, 8 hex digits>/<index:06d>.spool      written here, cut at a size, bounded in total
                                             ack                    written by the daemon: "<file index> <offset>\n"
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

import numpy as np

from sentinel.errors import WireError
from sentinel.messages import Descriptor, Health
from sentinel.private_files import create_file, make_directory
from sentinel.wire.clock import Clock, SystemClock
from sentinel.wire.frame import (
    NO_ATTEMPT,
    NO_STEP,
    Buffer,
    Corrupt,
    Foreign,
    Frame,
    FrameType,
    Header,
    encode_frame,
    encode_message,
    scan,
)
from sentinel.wire.layouts import Layouts

SPOOL_BYTES = 4 * 2**30
"""Most bytes of spool a life keeps, unless said otherwise."""
FILE_BYTES = 64 * 2**20
"""Size at which a spool file is cut, unless said otherwise."""
ROWS_BYTES = 4 * 2**20
"""Most bytes of rows in one frame; more are split."""
READ_BYTES = 16 * 2**20
"""Most bytes of one file that one poll takes in, unless a single frame is longer."""

_FILE_NAME = re.compile(r"(\d{6,})\.spool")
_FOLDER_NAME = re.compile(r"r(\d{5,})-([0-9a-f]{8})")
_NEXT_CHECK_FRAMES = 256


def life_folder(run_dir: Path, rank: int, life: bytes) -> Path:
    """Return the folder in which a life's spool lies."""
    return Path(run_dir) / "spool" / f"r{rank:05d}-{life.hex()[:8]}"


def parse_life_folder(name: str) -> tuple[int, str] | None:
    """Return (rank, first 8 hex digits of the life) of a spool folder's name; None when it is none."""
    match = _FOLDER_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def file_name(index: int) -> str:
    """Return the name of the spool file with this index, 0-based."""
    return f"{index:06d}.spool"


def list_files(folder: Path) -> list[int]:
    """Return the indices of the spool files in a folder, ascending; empty when there is no folder."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 -- names alone; Path objects cost ten times as much per poll
    except OSError:
        return []
    return sorted(int(match[1]) for match in map(_FILE_NAME.fullmatch, names) if match)


def read_ack(folder: Path) -> tuple[int, int]:
    """Return (file index, byte offset) up to which the daemon has committed; (0, 0) when it has said nothing."""
    try:
        index, offset = (Path(folder) / "ack").read_text().split()
        return int(index), int(offset)
    except (OSError, ValueError):
        return 0, 0


def write_ack(folder: Path, file_index: int, offset: int) -> None:
    """Tell the writer that all before (file_index, offset) is committed. Daemon only; OSError when it cannot."""
    path = Path(folder) / "ack"
    fresh = path.with_name("ack.new")
    with os.fdopen(create_file(fresh, os.O_WRONLY | os.O_TRUNC), "w") as file:
        file.write(f"{file_index} {offset}\n")
    fresh.replace(path)


class SpoolWriter:
    """Appends the frames of one life. Never raises for what the disk does: False, counted, said once it works again."""

    def __init__(
        self,
        directory: Path,
        life: bytes,
        rank: int,
        run_id: int,
        attempt: int | None = None,
        *,
        max_bytes: int = SPOOL_BYTES,
        file_bytes: int = FILE_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """`directory` is the life's own folder (`life_folder`), made 0700 at the first append."""
        self.directory = Path(directory)
        self.life = life
        self.rank = rank
        self.run_id = run_id
        self.attempt = NO_ATTEMPT if attempt is None else attempt
        self.max_bytes = max_bytes
        self.file_bytes = max(1, min(file_bytes, max_bytes // 2))
        self.num_failed_frames = 0
        """Frames that the disk did not take, since the beginning."""
        self.num_lost_rows = 0
        """Rows in those frames, since the beginning."""
        self.num_deleted_files = 0
        """Files deleted before the daemon had committed them, since the beginning."""
        self._clock = clock or SystemClock()
        self._seq = 0
        self._fd = -1
        self._index = -1
        self._offset = 0
        self._old: list[tuple[int, int]] = []
        """Closed files, oldest first: (index, bytes)."""
        self._layouts = Layouts()
        self._untold_failures = 0
        self._untold_deleted = 0
        self._untold_unlinked = False
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
        if is_written and (self._untold_failures or self._untold_deleted or self._untold_unlinked):
            self._say_losses()
        return is_written

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
                self._check_file()
                described = self._layouts.description() if self._layouts.is_owed else None
                if self._make_file(payload_bytes + (len(described[1]) if described else 0)):
                    self._layouts.begin_file()
                    described = self._layouts.description() if self._layouts.is_owed else None
                if described is not None:
                    offset = self._offset
                    self._write(*described, NO_STEP, 0)
                    self._layouts.written(offset)
                if frame_type not in (FrameType.DESCRIPTOR, FrameType.CHANGE):
                    self._write(frame_type, payload, step, row_count)
                return True
            except (OSError, WireError) as failure:
                error = failure
                # Our own committed files are the one thing here that may make room.
                if not (isinstance(failure, OSError) and failure.errno == errno.ENOSPC and self._drop_oldest(True)):
                    break
        self._seq += 1
        self.num_failed_frames += 1
        self.num_lost_rows += row_count
        self._untold_failures += 1
        self._last_error = str(error)
        return False

    def _make_file(self, payload_bytes: int) -> bool:
        """Open a new file where there is none, or where this one is full; True when it is new. OSError."""
        wanted = payload_bytes + 128
        if self._fd >= 0 and self._offset and self._offset + wanted > self.file_bytes:
            self._cut()
        if self._fd >= 0:
            return self._offset == 0
        make_directory(self.directory)
        while self._old and self._kept_bytes() + self.file_bytes > self.max_bytes:
            self._drop_oldest(False)
        index = self._index + 1
        try:
            self._fd = create_file(self.directory / file_name(index), os.O_WRONLY | os.O_APPEND | os.O_EXCL)
        except FileExistsError:
            self._index = index  # not ours to touch: the next attempt takes the next number
            raise
        self._index, self._offset = index, 0
        return True

    def _write(self, frame_type: int, payload: Buffer, step: int, row_count: int) -> None:
        """Write one frame with one call; what was torn is cut off again, or its file is left. OSError."""
        header = Header(
            type=frame_type, life=self.life, run_id=self.run_id, rank=self.rank, seq=self._seq + 1,
            attempt=self.attempt, step=step, placement_epoch=self._layouts.epoch, layout_id=self._layouts.id,
            wall_ns=self._clock.wall_ns(), mono_ns=self._clock.mono_ns(), row_count=row_count,
        )  # fmt: skip
        head, body = encode_frame(header, payload)
        wanted = len(head) + memoryview(body).nbytes
        done = 0
        try:
            done = os.writev(self._fd, [head, body])
            while done < wanted:  # a signal or a full disk in the middle: the next call goes on or says why
                rest = (head + bytes(body))[done:]
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
        self._seq += 1
        self._offset += wanted

    def _undo(self) -> None:
        """Cut a torn frame off; a file that cannot be cut is left as it is, its reader resyncs."""
        try:
            os.ftruncate(self._fd, self._offset)
        except OSError:
            self._cut()

    def _cut(self) -> None:
        if self._fd >= 0 and self._offset:
            self._old.append((self._index, self._offset))
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
            self._untold_unlinked = True

    def _kept_bytes(self) -> int:
        return sum(size for _, size in self._old)

    def _drop_oldest(self, committed_only: bool) -> bool:
        """Delete the oldest closed file; True when there was one (that is committed, if only such may go)."""
        if not self._old:
            return False
        index, _ = self._old[0]
        is_committed = index < read_ack(self.directory)[0]
        if committed_only and not is_committed:
            return False
        with contextlib.suppress(OSError):
            (self.directory / file_name(index)).unlink()
        self._old.pop(0)
        if not is_committed:
            self.num_deleted_files += 1
            self._untold_deleted += 1
        return True

    def _say_losses(self) -> None:
        """Now that the disk takes frames again, say what it did not take."""
        if self._untold_failures:
            count = self._untold_failures
            text = f"rank {self.rank}: {count} frames were not written: {self._last_error}"
            if not self._say(Health(code="disk_full", message=text, count=count, step=self._step)):
                return
            self._untold_failures = 0
        if self._untold_deleted:
            count = self._untold_deleted
            text = (
                f"rank {self.rank}: spool.max_bytes {self.max_bytes} is used up: {count} files deleted before they were "
                f"judged; is the daemon running?"
            )
            if not self._say(Health(code="spool_full", message=text, count=count, step=self._step)):
                return
            self._untold_deleted = 0
        if self._untold_unlinked:
            text = f"rank {self.rank}: somebody deleted the spool file that was being written; going on in a new one"
            self._untold_unlinked = not self._say(Health(code="spool_deleted", message=text, step=self._step))

    def _say(self, health: Health) -> bool:
        return self._append(FrameType.HEALTH, encode_message(health), self._step, 0)


class SpoolReader:
    """Reads the frames of one life's folder from a position on, whole and checked; never raises for what it reads.

    A torn tail is waited for while its writer may live, and cut when a newer file exists or the end is said. A region
    that is no frame is skipped up to the next valid one, and counted.
    """

    def __init__(self, directory: Path, *, file_index: int = 0, offset: int = 0) -> None:
        self.directory = Path(directory)
        self._folder = str(self.directory)
        self._wanted = 0
        """Bytes of the frame that the last window ended within."""
        self.file_index = file_index
        self.offset = offset
        self.num_corrupt = 0
        """Regions that were skipped, since the beginning."""
        self.num_corrupt_bytes = 0
        self.num_torn = 0
        """Tails that were cut."""
        self.num_missing_files = 0
        """Files deleted before they were read."""
        self.foreign: dict[int, int] = {}
        """Protocol version -> frames of it that were skipped."""
        self.is_caught_up = True
        """Whether the last poll saw the end of the newest file."""

    @property
    def position(self) -> tuple[int, int]:
        """(file index, byte offset) behind the last frame handed out."""
        return self.file_index, self.offset

    def poll(self, *, final: bool = False, max_bytes: int = READ_BYTES) -> list[Frame]:
        """Return the next frames, in order; empty when there is nothing new. `final`: the writer is gone for good.

        At most about `max_bytes` are read; ask again until it is empty.
        """
        frames: list[Frame] = []
        self.is_caught_up = True
        while not frames:
            # Looked for before reading: a writer begins a new file only when it has done with the last.
            has_newer = self._has_newer()
            data = self._read(max_bytes)
            if data is None:
                later = [index for index in list_files(self.directory) if index > self.file_index]
                if not later:
                    break
                self.num_missing_files += later[0] - self.file_index
                self.file_index, self.offset = later[0], 0
                continue
            is_whole = len(data) < max_bytes
            self.is_caught_up = is_whole and not has_newer
            is_over = is_whole and (has_newer or final)
            if data:
                consumed = self._parse(data, frames, is_over=is_over, is_whole=is_whole)
                if consumed == 0 and not frames and not is_whole:
                    max_bytes = max(2 * max_bytes, self._wanted)  # one frame longer than the window
                    continue
            if is_over and has_newer and not frames:
                self.file_index, self.offset = self.file_index + 1, 0
                continue
            break
        return frames

    def _has_newer(self) -> bool:
        return os.path.exists(f"{self._folder}/{file_name(self.file_index + 1)}")  # noqa: PTH110 -- each poll

    def _read(self, max_bytes: int) -> bytes | None:
        """Return what lies behind the offset, at most max_bytes; None when there is no such file."""
        # Opened each time: that is what makes a network file system look again.
        # A pipe or a link has no business here: neither wait for its other end nor follow it.
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(f"{self._folder}/{file_name(self.file_index)}", flags)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            wanted = min(max_bytes, max(0, status.st_size - self.offset))
            return os.pread(fd, wanted, self.offset) if wanted else b""
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _parse(self, data: bytes, frames: list[Frame], *, is_over: bool, is_whole: bool) -> int:
        """Take the frames out of `data`, which begins at the offset; returns the bytes that are done with."""
        base, at, bad_from = self.offset, 0, -1
        done = self._wanted = 0
        while at < len(data):
            found = scan(data, at, base, self.file_index)
            if isinstance(found, (Frame, Foreign)):
                if bad_from >= 0:
                    self._count_corrupt(at - bad_from)
                    bad_from = -1
                if isinstance(found, Frame):
                    at = found.offset_after - base
                    frames.append(found)
                else:
                    self.foreign[found.protocol] = self.foreign.get(found.protocol, 0) + 1
                    at = found.next_offset
                done = at
            elif isinstance(found, Corrupt):
                bad_from = at if bad_from < 0 else bad_from
                at = found.next_offset
            elif is_over:
                # The rest of a torn frame never comes, but frames may have been written behind it.
                bad_from = at if bad_from < 0 else bad_from
                at = _next_magic(data, at)
            else:
                self._wanted = at + found.num_bytes
                break
        if is_over and done < len(data):
            self.num_torn += 1
            self.num_corrupt_bytes += len(data) - done
            done = len(data)
        elif bad_from == 0 and not is_whole:  # a window that begins with rubbish and holds no frame: go past it
            self._count_corrupt(at)
            done = at
        self.offset = base + done
        return done

    def _count_corrupt(self, num_bytes: int) -> None:
        self.num_corrupt += 1
        self.num_corrupt_bytes += num_bytes


def _next_magic(data: bytes, at: int) -> int:
    found = data.find(b"SNTL", at + 1)
    return found if found >= 0 else len(data)
