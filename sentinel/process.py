"""ProcessId: identifies a process of a machine, and distinguishes it from a later one with the same number."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

PROC = Path("/proc")


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """What names a process for as long as its machine runs; empty fields: not known, then it cannot be found again."""

    host: str = ""
    pid: int = 0
    start: int = 0
    """Clock ticks between the machine's start and the process's."""
    space: str = ""
    """The namespace in which `pid` is a number: that of a container, or of the machine."""
    boot: str = ""
    """Id of the machine's start."""

    @property
    def is_known(self) -> bool:
        """Whether enough fields are known to find the process by."""
        return bool(self.pid and self.start and self.space and self.boot)

    def as_reported(self) -> dict[str, str]:
        """Return the entries of a descriptor's `environment`."""
        return {
            "host": self.host, "pid": str(self.pid), "pid_start": str(self.start), "pid_space": self.space,
            "boot": self.boot,
        }  # fmt: skip

    @staticmethod
    def reported_by(environment: Mapping[str, str]) -> ProcessId:
        """Return the process that a descriptor's `environment` names."""
        return ProcessId(
            host=environment.get("host", ""), pid=_number(environment.get("pid")),
            start=_number(environment.get("pid_start")), space=environment.get("pid_space", ""),
            boot=environment.get("boot", ""),
        )  # fmt: skip


def own_process(proc: Path = PROC) -> ProcessId:
    """Return the calling process; without a process table (`/proc`) only host and pid are known."""
    start, space, boot = 0, "", ""
    try:
        start = stat_fields((proc / "self" / "stat").read_bytes())[START]
        space = str((proc / "self" / "ns" / "pid").readlink())
        boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text("ascii").strip()
    except (OSError, ValueError, IndexError):
        start = 0
    return ProcessId(host=socket.gethostname(), pid=os.getpid(), start=start, space=space, boot=boot)


START, RESIDENT, IGNORED, EXIT = 19, 21, 30, 49
"""Positions in `stat_fields` of the start in clock ticks, of the pages in memory, of the signals that are ignored (bit n - 1
is signal n), and of what `wait` would say of a process that has ended."""


def stat_fields(stat: bytes) -> list[int]:
    """Return the numbers of `/proc/PID/stat` from the fourth field on; ValueError for what is none.

    The third, the state, is a letter; the second, a name, may hold anything.
    """
    return [0, *map(int, stat[stat.rindex(b")") + 1 :].split()[1:])]


def stat_state(stat: bytes) -> str:
    """Return the state's letter of `/proc/PID/stat`: R, S, D, T (stopped), t (traced), Z (ended, not yet waited for), X."""
    return stat[stat.rindex(b")") + 1 :].split()[0].decode("ascii")


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
