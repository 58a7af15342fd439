"""Pulse: eight bytes in an incarnation's folder that its writer sets to the time many times a second, and that outlive a
kill.

Frames are a second apart while nothing is trained: too coarse to say which of several ranks was killed first. The bytes lie
in a shared mapping of a file: setting them is no system call, and on a network file system nothing is sent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path

NAME = "pulse"
_TIME = struct.Struct("<q")


class PulseWriter:
    """The pulse of one incarnation. Where the folder cannot be written there is none, and frames alone tell."""

    def __init__(self, folder: Path) -> None:
        """folder: made by whoever writes frames; until then a beat does nothing."""
        self._path = folder / NAME
        self._map: mmap.mmap | None = None
        self._has_failed = False

    def beat(self, wall_ns: int) -> None:
        """Write that the process is still running at this time, nanoseconds since the epoch."""
        if self._map is None:
            self._open()
        if self._map is not None:
            _TIME.pack_into(self._map, 0, wall_ns)

    def close(self) -> None:
        """Let go of the file; it stays. Safe to call twice."""
        if self._map is not None:
            self._map.close()
        self._map, self._has_failed = None, True

    def _open(self) -> None:
        if self._has_failed or not self._path.parent.is_dir():
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(fd, _TIME.size)
                self._map = mmap.mmap(fd, _TIME.size)
            finally:
                os.close(fd)
        except (OSError, ValueError):
            self._has_failed = True


def read_pulse(folder: Path) -> int:
    """Return when an incarnation said last that it lives, nanoseconds since the epoch; 0: it never did, or it cannot be
    read."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            data = os.read(fd, _TIME.size)
        finally:
            os.close(fd)
        if len(data) == _TIME.size:
            return max(0, int(_TIME.unpack(data)[0]))
    return 0
