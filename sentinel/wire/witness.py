"""The witness file: how processes of the same launcher on this machine ended, as a rank that was still there saw it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

NAME = "witness"
MAX_BYTES = 2**16
"""Most bytes of one file that are written or read: some 700 ends."""


class Witnessed(msgspec.Struct, frozen=True, kw_only=True):
    """One end: a line of the file."""

    pid: int
    start: int
    status: int
    """What `wait` says of it."""
    wall_ns: int = 0


class WitnessWriter:
    """Appends ends to the file in the folder of one rank's process, at most `MAX_BYTES` of them."""

    def __init__(self, folder: Path) -> None:
        """folder: made by whoever writes frames."""
        self._path = folder / NAME
        self._num_bytes = 0

    def append(self, end: Witnessed) -> None:
        """Append one end; where the file is full or cannot be written it is left out."""
        line = msgspec.json.encode(end) + b"\n"
        self._num_bytes += len(line)
        if self._num_bytes > MAX_BYTES:
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)
        except OSError:
            pass  # what the frames and the pulse say is all there is then


def read_witness(folder: Path) -> list[Witnessed]:
    """Return what an incarnation saw of others, oldest first; nothing where it saw nothing, or it cannot be read."""
    try:
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            data = os.read(fd, MAX_BYTES)
        finally:
            os.close(fd)
    except OSError:
        return []
    found = []
    for line in data.splitlines():
        try:
            one = msgspec.json.decode(line, type=Witnessed)
        except (msgspec.DecodeError, RecursionError):
            continue
        found.append(one)
    return found
