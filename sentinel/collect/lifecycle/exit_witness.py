"""ExitWitness: how processes of the same launcher on this machine ended, written down by a rank that was still there.

A rank that is killed says nothing. Its launcher ends the others a moment later, and a daemon that looks when all is over, or
runs on another host, would find several ranks gone without a word. So each rank waits for the launcher's other children,
and notes how the first of them ended before its own end comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sentinel.process import PROC, START, ProcessId, own_process, stat_fields
from sentinel.process_exits import ProcessExits
from sentinel.wire.witness import Witnessed, WitnessWriter


class ExitWitness:
    """Waits for the children of our parent, and writes their ends into an incarnation's folder."""

    def __init__(self, folder: Path, proc: Path = PROC) -> None:
        """folder: made by whoever writes frames."""
        self._file, self._proc = WitnessWriter(folder), proc
        self._own = own_process(proc)
        self._exits = ProcessExits(self._note, "sentinel-witness", rescan=self._siblings)

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
        if status:
            self._file.append(Witnessed(pid=process.pid, start=process.start, status=status, wall_ns=wall_ns))
