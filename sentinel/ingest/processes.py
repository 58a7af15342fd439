"""ProcessTable: whether a rank's process lives, is stopped or is gone, as the kernel of this machine tells it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.process import EXIT, PROC, START, ProcessId, own_process, stat_fields, stat_state

LIVES, STOPPED, GONE, UNSEEN = "lives", "stopped", "gone", "unseen"
"""What the table says of a process. UNSEEN: it runs on another host, in another container, or nobody said which it is."""


class Seen(msgspec.Struct, frozen=True):
    """One look at one process."""

    state: str
    status: int | None = None
    """Of one that is gone: what `wait` says of it; None: its parent has asked already, nobody else can know."""


class ProcessTable:
    """Looks into `/proc`. Processes of other machines and containers are not seen: silence alone tells of those."""

    def __init__(self, proc: Path = PROC, *, own: Callable[[Path], ProcessId] = own_process) -> None:
        self._proc = proc
        self._own = own(proc)

    def sees(self, process: ProcessId) -> bool:
        """Return whether a process would be in this table while it lives."""
        return process.is_known and (process.boot, process.space) == (self._own.boot, self._own.space)

    def look(self, process: ProcessId) -> Seen:
        """Return what the table says of a process now; one that has got its number since is another."""
        if not self.sees(process):
            return Seen(UNSEEN)
        try:
            stat = (self._proc / str(process.pid) / "stat").read_bytes()
            fields, state = stat_fields(stat), stat_state(stat)
        except (FileNotFoundError, ProcessLookupError):
            return Seen(GONE)
        except (OSError, ValueError, IndexError):
            return Seen(UNSEEN)
        if fields[START] != process.start:
            return Seen(GONE)
        if state in "ZXx":
            # Nobody but its parent, and who may trace it, reads how: zero may mean that it is hidden from us.
            status = fields[EXIT] if len(fields) > EXIT else 0
            return Seen(GONE, status or None)
        return Seen(STOPPED if state in "Tt" else LIVES)

    def memory_kills(self) -> int | None:
        """Return how many processes the kernel has killed for want of memory since the machine started; None: not told.

        Those that went past the limit of their group (a container) are among them.
        """
        try:
            for line in (self._proc / "vmstat").read_text("ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            pass
        return None


def status_words(status: int) -> tuple[str, int]:
    """Return (name of the signal or empty, exit code) of what `wait` says."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name, 0
        except ValueError:
            return f"SIG{number}", 0
    return "", os.WEXITSTATUS(status)

