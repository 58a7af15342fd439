"""Skims the spool of one incarnation: the frames of some types are read, those of the others passed over unread."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from sentinel.wire.frame import Corrupt, Foreign, Frame, Incomplete, peek, scan
from sentinel.wire.spool_files import file_name, list_files

WINDOW_BYTES = 64 * 2**10
"""Bytes that are read at once. Too small: many reads of small frames; too large: rows are read that nobody asked for."""
MAX_FRAME_BYTES = 4 * 2**20
"""A longer frame is passed over whatever its type; a bound on time and memory: a descriptor of 20,000 tensors is shorter."""


class SpoolSkim:
    """Reads what is new in one incarnation's folder in bounded time; never raises for what it reads.

    It begins at the last two files. Where more waits than it may read it leaps towards the end, and what lies between is
    left out. A torn tail is waited for until a newer file is there, what is no frame is skipped, and a file that became
    shorter is read from its beginning.
    """

    def __init__(self, directory: Path, types: Collection[int]) -> None:
        """types: of `FrameType`, those that are read."""
        self.types = frozenset(types)
        self.written_at = 0.0
        """When the file that was read last was written to, in seconds since the epoch by its disk; 0: none was."""
        self._directory = directory
        self._index = -1
        self._offset = 0
        self._wanted = 0
        """Bytes of the frame that the last window ended within."""

    def read(self, max_bytes: int) -> list[Frame]:
        """Return the new frames of the types, in order, having read about `max_bytes` at most."""
        frames: list[Frame] = []
        indices = list_files(self._directory)
        if not indices:
            return frames
        if self._index < 0:
            self._index = indices[-2:][0]
        if not self._go_on(frames, indices, max_bytes // 2):
            self._leap(indices[-1], max_bytes // 2)
            self._go_on(frames, indices, max_bytes // 2)
        return frames

    def _go_on(self, frames: list[Frame], indices: list[int], budget: int) -> bool:
        """Read until the end of the newest file; False: the budget was used up before."""
        while budget > 0:
            wanted = max(WINDOW_BYTES, self._wanted)
            window, size = self._window(wanted)
            budget -= len(window) + 1
            before = self._offset
            is_cut = self._take(window, size, frames)
            if not is_cut and (self._offset != before or len(window) == wanted):
                continue
            later = next((one for one in indices if one > self._index), None)
            if later is None:
                return True
            self._index, self._offset, self._wanted = later, 0, 0
        return False

    def _leap(self, newest: int, num_bytes: int) -> None:
        """Go on so many bytes before the end of the newest file, if that is further on."""
        if newest != self._index:
            self._index, self._offset = newest, 0
        _, size = self._window(0)
        self._offset, self._wanted = max(self._offset, size - num_bytes), 0

    def _window(self, num_bytes: int) -> tuple[bytes, int]:
        """Return (what lies behind the offset, size of the file); nothing of a file that is gone, or is none."""
        # A pipe or a link has no business here: neither wait for its other end nor follow it.
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self._directory / file_name(self._index), flags)
        except OSError:
            return b"", 0
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return b"", 0
            self.written_at = status.st_mtime
            if status.st_size < self._offset:
                self._offset = 0
            return os.pread(fd, num_bytes, self._offset), status.st_size
        except OSError:
            return b"", 0
        finally:
            os.close(fd)

    def _take(self, window: bytes, size: int, frames: list[Frame]) -> bool:
        """Take the frames out of a window that begins at the offset, and put the offset behind them; True: the next one is
        passed over, and the file ends within it. size: of the file."""
        at = self._wanted = 0
        is_cut = False
        while at < len(window) and not is_cut:
            head = peek(window, at)
            if head is not None and (head[0] not in self.types or head[1] > MAX_FRAME_BYTES):
                is_cut = self._offset + at + head[1] > size
                at += 0 if is_cut else head[1]
                continue
            found = scan(window, at, self._offset, self._index)
            if isinstance(found, Frame):
                frames.append(found)
                at = found.offset_after - self._offset
            elif isinstance(found, Corrupt | Foreign):
                at = found.next_offset
            else:
                assert isinstance(found, Incomplete)
                self._wanted = found.num_bytes
                break
        self._offset += at
        return is_cut
