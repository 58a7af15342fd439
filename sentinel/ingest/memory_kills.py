"""MemoryKills: which processes the kernel may have killed for want of memory, by its counters.

Nobody but the kernel's log says which process it was. Its counters say how many there were: of the machine in
`/proc/vmstat`, and of a memory group (a cgroup: a container, a batch job) in that group's files, version 1 and 2 alike.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sentinel.process import PROC, ProcessId

GROUPS = Path("/sys/fs/cgroup")
RECENT_S = 10.0
"""Seconds after a count of kills rose in which a process that is gone may be the one killed. Too small: a large process is
still freeing memory; too large: another end is blamed on memory."""
_UNLIMITED = 2**60


@dataclasses.dataclass(slots=True)
class _MemoryGroup:
    """The memory group of one process."""

    folder: Path
    file: str
    count: int | None = None
    risen_at: float = float("-inf")


class MemoryKills:
    """Looks at the counters. Seconds watched are handed in."""

    def __init__(self, proc: Path = PROC, groups: Path = GROUPS) -> None:
        self._proc, self._groups = proc, groups
        self._count: int | None = None
        self._risen_at = float("-inf")
        self._of: dict[ProcessId, _MemoryGroup | None] = {}

    def look(self, now: float) -> None:
        """Note whether there were kills since the last look."""
        count = self._read(self._proc / "vmstat")
        if count is not None and self._count is not None and count > self._count:
            self._risen_at = now
            for group in self._of.values():
                self._look_at(group, now)
        self._count = count

    def add(self, process: ProcessId) -> None:
        """Read the memory group of a running process, each time anew: a scheduler may move it after its start."""
        group, former = self._group_of(process.pid), self._of.get(process)
        if former is not None and (group is None or group.folder in (former.folder, *former.folder.parents)):
            return  # A process that is being ended is shown in the root already.
        self._of[process] = group
        if group is not None:
            group.count = self._read(group.folder / group.file)

    def near(self, process: ProcessId, now: float) -> bool:
        """Return whether a process that has just gone may be one of those: its group's counter decides where it has one."""
        group = self._of.get(process)
        if group is None or group.count is None:
            return now - self._risen_at <= RECENT_S
        self._look_at(group, now)
        return now - group.risen_at <= RECENT_S

    def denies(self, process: ProcessId, now: float) -> bool:
        """Return whether a process that has just gone was not one of those: no counter of machine or group has risen."""
        is_counted = self._count is not None and process in self._of
        return is_counted and now - self._risen_at > RECENT_S and not self.near(process, now)

    def limit(self, process: ProcessId) -> int | None:
        """Return the bytes that the group of a process may hold, or a group above it; None: no limit is known."""
        group = self._of.get(process)
        if group is None:
            return None
        limits = []
        for folder in (group.folder, *group.folder.parents):
            if not folder.is_relative_to(self._groups):
                break
            for name in ("memory.max", "memory.limit_in_bytes"):
                try:
                    text = (folder / name).read_text("ascii").strip()
                except (OSError, ValueError):
                    continue
                if text.isdigit() and 0 < int(text) < _UNLIMITED:
                    limits.append(int(text))
        return min(limits, default=None)

    def _look_at(self, group: _MemoryGroup | None, now: float) -> None:
        count = None if group is None else self._read(group.folder / group.file)
        if group is not None and count is not None:
            if group.count is not None and count > group.count:
                group.risen_at = now
            group.count = count

    def _group_of(self, pid: int) -> _MemoryGroup | None:
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text("utf-8").splitlines()
        except (OSError, ValueError):
            return None
        paths = {names: path.lstrip("/") for _, names, path in (line.split(":", 2) for line in lines if line.count(":") > 1)}
        for names, path in paths.items():
            if "memory" in names.split(","):
                return _MemoryGroup(self._groups / "memory" / path, "memory.oom_control")
        return _MemoryGroup(self._groups / paths[""], "memory.events") if "" in paths else None

    @staticmethod
    def _read(path: Path) -> int | None:
        try:
            for line in path.read_text("ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            pass
        return None
