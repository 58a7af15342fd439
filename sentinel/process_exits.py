"""ProcessExits: waits for other processes of this machine to end, and tells at once how they did.

Whoever asks the process table now and then comes late: a launcher asks for its dead workers ten times a second, and after
that the table says nothing of them. A descriptor of the process (pidfd, Linux 5.3) wakes the thread that waits within a
millisecond; from Linux 6.15 on it tells the status even of a process that was asked for already.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable

from sentinel.process import EXIT, PROC, START, ProcessId, stat_fields, stat_state

MAX_WATCHED = 256
"""Most processes that are waited for; a bound on file descriptors, one each, of which a process mostly has 1,024."""
RESCAN_S = 5.0
"""Seconds between two looks for new processes; a bound on time. Too large: a rank that dies young is not waited for."""

_INFO = struct.Struct("<QQ11Ii")
"""`struct pidfd_info`, first version: mask, group, eleven ids, exit status."""
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_HAS_EXIT = 1 << 3

OnExit = Callable[[ProcessId, int | None, int], None]
"""Called with the process, what `wait` says of it (None: nobody may know), and nanoseconds since the epoch."""


class ProcessExits:
    """A thread that waits, from the first process on; none where the kernel has no descriptors of processes."""

    def __init__(self, on_exit: OnExit, name: str, *, rescan: Callable[[], Iterable[ProcessId]] | None = None) -> None:
        """on_exit: called in the thread. rescan: asked there every `RESCAN_S` for processes to wait for."""
        self._on_exit, self._name, self._rescan = on_exit, name, rescan
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._watched: dict[int, ProcessId] = {}
        """Descriptor -> process."""
        self._known: set[ProcessId] = set()
        self._is_closed = not hasattr(os, "pidfd_open")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to wait; safe to call twice."""
        if self._is_closed or self._thread is not None:
            return
        try:
            self._epoll = select.epoll()
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        except (OSError, RuntimeError):
            self.close()

    def add(self, process: ProcessId) -> None:
        """Wait for one more; of one that is gone already, or is not of this machine, nothing will be reported."""
        if self._is_closed or process in self._known or len(self._watched) >= MAX_WATCHED:
            return
        self._known.add(process)
        self.start()
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:
            return
        if self._epoll is None or _start_of(process.pid) != process.start:
            os.close(fd)  # somebody else has got its number
            return
        self._watched[fd] = process
        with contextlib.suppress(OSError, ValueError):
            self._epoll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        """End the thread and let go of everything; safe to call twice, and in a forked child."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)
            thread.join(1.0)
        for fd in (*self._watched, self._wake):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._watched, self._wake = {}, -1
        if self._epoll is not None:
            self._epoll.close()

    def _run(self) -> None:
        due = 0.0
        while not self._is_closed:
            if self._rescan is not None and time.monotonic() >= due:
                due = time.monotonic() + RESCAN_S
                for process in self._rescan():
                    self.add(process)
            assert self._epoll is not None
            try:
                ready = self._epoll.poll(-1 if self._rescan is None else max(0.0, due - time.monotonic()))
            except (OSError, ValueError):
                return  # closed
            wall_ns = time.time_ns()
            for fd, _ in ready:
                ended = self._watched.pop(fd, None)
                if ended is not None:
                    status = _status(ended, fd)
                    self._epoll.unregister(fd)
                    os.close(fd)
                    self._on_exit(ended, status, wall_ns)


def _start_of(pid: int) -> int:
    try:
        return stat_fields((PROC / str(pid) / "stat").read_bytes())[START]
    except (OSError, ValueError, IndexError):
        return -1


def _status(process: ProcessId, fd: int) -> int | None:
    """Return what `wait` says of a process that has just ended; None: its parent has asked, and the kernel keeps nothing."""
    try:
        stat = (PROC / str(process.pid) / "stat").read_bytes()
        fields = stat_fields(stat)
        # Zero may mean that it is hidden from us.
        if fields[START] == process.start and stat_state(stat) in "ZXx" and len(fields) > EXIT and fields[EXIT]:
            return fields[EXIT]
    except (OSError, ValueError, IndexError):
        pass
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _HAS_EXIT, *[0] * 13)
    try:
        fcntl.ioctl(fd, _GET_INFO, info, True)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return int(status) if mask & _HAS_EXIT else None
