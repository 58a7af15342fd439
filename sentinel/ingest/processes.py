"""ProcessTable: whether a rank's process runs, is stopped or is gone, by the kernel of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.process import EXIT, IGNORED, PROC, RESIDENT, START, ProcessId, own_process, stat_fields, stat_state
from sentinel.process_exits import ProcessExits

RUNNING, STOPPED, GONE, UNSEEN = "lives", "stopped", "gone", "unseen"
"""States of a process in the table. UNSEEN: it runs on another host, in another container, or its id is not known."""


class Seen(msgspec.Struct, frozen=True):
    """One look at one process."""

    state: str
    status: int | None = None
    """Wait status of a process that is gone; None: its parent has waited for it already, and the kernel keeps nothing."""
    letter: str = ""
    """The kernel's state of one that is there: R, S, D, T (stopped), t (stopped by who traces it)."""
    resident_bytes: int = 0
    """Bytes of memory that it holds at the time of the look."""
    ignores_sigterm: bool = False
    """The process ignores SIGTERM."""


class ProcessTable:
    """Reads `/proc`. Processes of other machines and containers are not in it: silence is the only sign of their end."""

    def __init__(self, proc: Path = PROC, *, own: Callable[[Path], ProcessId] = own_process) -> None:
        self._proc = proc
        self._own = own(proc)
        self._ended: dict[ProcessId, int | None] = {}
        """Wait statuses of the processes that were waited for and have ended."""
        self._exits = ProcessExits(self._note_end, "sentinel-exits") if proc == PROC else None

    def sees(self, process: ProcessId) -> bool:
        """Return whether a process would be in this table while it lives."""
        return process.is_known and (process.boot, process.space) == (self._own.boot, self._own.space)

    def look(self, process: ProcessId) -> Seen:
        """Return the state of a process now; a later process with the same number is another one, and this one gone."""
        if not self.sees(process):
            return Seen(UNSEEN)
        try:
            stat = (self._proc / str(process.pid) / "stat").read_bytes()
            fields, state = stat_fields(stat), stat_state(stat)
        except (FileNotFoundError, ProcessLookupError):
            return Seen(GONE, self._ended.get(process))
        except (OSError, ValueError, IndexError):
            return Seen(UNSEEN)
        if fields[START] != process.start:
            return Seen(GONE, self._ended.get(process))
        if state in "ZXx":
            # Nobody but its parent, and who may trace it, reads how: zero may mean that it is hidden from us.
            status = fields[EXIT] if len(fields) > EXIT else 0
            return Seen(GONE, status or self._ended.get(process))
        if self._exits is not None:
            self._exits.add(process)
        resident = fields[RESIDENT] * os.sysconf("SC_PAGESIZE") if len(fields) > RESIDENT else 0
        return Seen(
            STOPPED if state in "Tt" else RUNNING, letter=state, resident_bytes=resident,
            ignores_sigterm=len(fields) > IGNORED and bool(fields[IGNORED] >> (signal.SIGTERM - 1) & 1),
        )  # fmt: skip

    def close(self) -> None:
        """Wait for no process any more."""
        if self._exits is not None:
            self._exits.close()

    def _note_end(self, process: ProcessId, status: int | None, wall_ns: int) -> None:
        self._ended[process] = status


def status_words(status: int) -> tuple[str, int]:
    """Return (name of the signal or empty, exit code) of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name, 0
        except ValueError:
            return f"SIG{number}", 0
    return "", os.WEXITSTATUS(status)
