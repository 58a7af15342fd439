"""TimeOrder: hands out the frames of many spools in the order of their wall clocks, each process's own order kept."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from sentinel.ingest.incarnation import SpoolRecord

_NEVER_NS = 2**63


class TimeOrder:
    """What was read and is ahead of a spool of which more is on disk waits until that one has been read."""

    def __init__(self) -> None:
        self.behind: set[str] = set()
        """Folders of spools of which more is on disk than was read."""
        self._wall_ns: dict[str, int] = {}
        """Folder -> the newest wall clock that was read of it, nanoseconds since the epoch."""
        self._waiting: list[SpoolRecord] = []
        self._oldest_ns = _NEVER_NS
        """The oldest wall clock of these."""
        self._by_time: list[tuple[int, str]] = []
        """A heap of (newest wall clock, folder) of all that are behind, and of what was so before."""

    @property
    def waiting(self) -> Sequence[SpoolRecord]:
        """What was read, and is ahead of somebody who is behind."""
        return self._waiting

    def begin(self, folder: str) -> None:
        """Take in a spool of which nothing was read."""
        self._wall_ns[folder] = 0

    def note(self, folder: str, *, is_caught_up: bool) -> None:
        """Take note of whether a spool was read to its end."""
        if is_caught_up:
            self.behind.discard(folder)
        elif folder not in self.behind:
            self.behind.add(folder)
            heapq.heappush(self._by_time, (self._wall_ns[folder], folder))

    def add(self, folder: str, records: Sequence[SpoolRecord]) -> None:
        """Take in what was read of a spool."""
        self._waiting += records
        if records:
            self._oldest_ns = min(self._oldest_ns, records[0].time_ns)
            self._wall_ns[folder] = records[-1].time_ns
            if folder in self.behind:
                heapq.heappush(self._by_time, (self._wall_ns[folder], folder))

    def due(self) -> list[SpoolRecord]:
        """Take out what is not ahead of anybody who is still behind, in the order of time."""
        frontier = self._wall_ns[self.furthest_behind()] if self.behind else None
        if frontier is not None and frontier < self._oldest_ns:
            # Whoever is behind was read a little further: thousands wait, and none of them is looked at.
            return []
        # Sorting is stable, and the key of an incarnation never falls: its own order is kept.
        self._waiting.sort(key=_time)
        at = len(self._waiting) if frontier is None else bisect.bisect_right(self._waiting, frontier, key=_time)
        due, self._waiting = self._waiting[:at], self._waiting[at:]
        self._oldest_ns = _time(self._waiting[0]) if self._waiting else _NEVER_NS
        return due

    def furthest_behind(self) -> str:
        """Return the folder whose newest frame is the oldest of those that are behind; IndexError: none is."""
        while (folder := self._by_time[0][1]) not in self.behind or self._by_time[0][0] != self._wall_ns[folder]:
            heapq.heappop(self._by_time)
        return folder

    def ahead(self, folders: Iterable[str]) -> deque[str]:
        """Return which of these folders, none of them behind, are ahead of one that is; the furthest ahead last."""
        found = (folder for folder in folders if folder not in self.behind and self.is_ahead(folder))
        return deque(sorted(found, key=self._wall_ns.__getitem__))

    def is_ahead(self, folder: str) -> bool:
        """Return whether a spool was read further than one that is behind."""
        return bool(self.behind) and self._wall_ns[folder] > self._wall_ns[self.furthest_behind()]


def _time(record: SpoolRecord) -> int:
    return record.time_ns
