"""ExitWitness: how processes of the same launcher on this machine ended, written down by a rank that was still there.

A rank that is killed says nothing. Its launcher ends the others a moment later, and a daemon that looks when all is over, or
runs on another host, would find several ranks gone without a word. So each rank waits for the launcher's other children,
and notes how the first of them ended before its own end comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sentinel.process import PROC, START, ProcessId, own_process, stat_fields
from sentinel.process_exits import ProcessExits

NAME = "witness"
MAX_BYTES = 2**16
"""Most of one file that is written or read: some 700 ends."""


class Witnessed(msgspec.Struct, frozen=True, kw_only=True):
    """One end: a line of the file."""

    pid: int
    start: int
    status: int
    """What `wait` says of it."""
    wall_ns: int = 0


class ExitWitness:
    """Waits for the children of our parent, and writes their ends into a life's folder."""

    def __init__(self, folder: Path, proc: Path = PROC) -> None:
        """folder: made by whoever writes frames."""
        self._path, self._proc = folder / NAME, proc
        self._own = own_process(proc)
        self._exits = ProcessExits(self._note, "sentinel-witness", rescan=self._siblings)
        self._num_bytes = 0

    def start(self) -> None:
        """Begin to wait; safe to call twice."""
        if self._own.is_known:
            self._exits.start()

    def close(self) -> None:
        """Wait no more; the file stays. Safe to call twice, and in a forked child."""
        self._exits.close()

    def _siblings(self) -> Iterable[ProcessId]:
        """Return the other children of our parent; none where the kernel does not list them."""
        found = []
        try:
            parent = os.getppid()
            for pid in map(int, (self._proc / str(parent) / "task" / str(parent) / "children").read_text("ascii").split()):
                if pid != self._own.pid:
                    start = stat_fields((self._proc / str(pid) / "stat").read_bytes())[START]
                    found.append(ProcessId(pid=pid, start=start, space=self._own.space, boot=self._own.boot))
        except (OSError, ValueError, IndexError):
            pass
        return found

    def _note(self, process: ProcessId, status: int | None, wall_ns: int) -> None:
        if not status:
            return
        line = msgspec.json.encode(Witnessed(pid=process.pid, start=process.start, status=status, wall_ns=wall_ns)) + b"\n"
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
    """Return what a life saw of others, oldest first; nothing where it saw nothing, or it cannot be read."""
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
