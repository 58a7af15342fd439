"""Reads one spool file by the headers of its frames: those that are wanted are read whole, the others hopped over unread."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from sentinel.wire.frame import HEADER_BYTES, MAGIC, Frame, FrameHead, head_of, scan

WINDOW_BYTES = 16 * 2**10
"""Bytes that are read at once. Too small: many reads of small frames; too large: rows are read that nobody asked for."""
MOST_DAMAGED = 4096
"""Places that look like frames and are none, past which the rest of a file is left out; a bound on time."""


class FoundHead(msgspec.Struct, frozen=True):
    """A frame's header, and where it lies. Of the header the length alone was checked, the rest when the frame is read."""

    head: FrameHead
    offset: int
    """Bytes from the beginning of the file to that of the frame."""


class FrameHops:
    """A spool file, open for reading while it is the context of a `with`. Never raises for what it reads.

    A link, a pipe and a file that is gone hold no frames. What is no frame is passed over up to the next one.
    """

    def __init__(self, path: Path | str, file_index: int = 0) -> None:
        """file_index: that the frames are handed out with."""
        self._path, self._file_index = path, file_index
        self._fd = -1
        self._window, self._begin = b"", 0

    def __enter__(self) -> FrameHops:
        # A pipe or a link has no business here: neither wait for its other end nor follow it.
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                self._close()
        except OSError:
            self._close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def heads(self) -> Iterator[FoundHead]:
        """Yield the headers of the file's frames in order, a torn last one's too; frames may be read in between."""
        offset = num_damaged = 0
        while self._fd >= 0 and num_damaged <= MOST_DAMAGED:
            at = self._at(offset, HEADER_BYTES)
            head = head_of(self._window[at : at + HEADER_BYTES])
            if head is not None:
                yield FoundHead(head, offset)
                offset += head.num_bytes
                continue
            if len(self._window) - at < HEADER_BYTES:
                return
            found = self._window.find(MAGIC, at + 1)
            num_damaged += found >= 0
            # The beginning of a magic may end the window.
            offset = self._begin + (found if found >= 0 else max(at + 1, len(self._window) - len(MAGIC) + 1))

    def frame(self, found: FoundHead) -> Frame | None:
        """Return the frame that a header begins, whole and checked; None where it is torn or damaged."""
        num_bytes = found.head.num_bytes
        at = self._at(found.offset, num_bytes)
        frame = scan(self._window[at : at + num_bytes], 0, found.offset, self._file_index)
        return frame if isinstance(frame, Frame) else None

    def _at(self, offset: int, num_bytes: int) -> int:
        """Return where an offset of the file lies in the window, which then holds so many bytes from there, if they are."""
        at = offset - self._begin
        if at < 0 or at + num_bytes > len(self._window):
            try:
                self._window = os.pread(self._fd, max(num_bytes, WINDOW_BYTES), offset)
            except OSError:
                self._window = b""
            self._begin, at = offset, 0
        return at

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
