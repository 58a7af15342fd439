"""Witnesses: what ranks wrote down of the ends of others on their machine, for whoever was not there to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sentinel.ingest.incarnation import Incarnation
from sentinel.process import ProcessId
from sentinel.wire.witness import Witnessed

UNHEARD_S = (2.5, 60.0)
"""Seconds of a rank's silence between which others are asked about it: heartbeats are one apart, and what others saw is on
disk long before a minute is over."""
READ_EVERY_S = 0.5
"""Least seconds between two readings of the files of one machine (chosen)."""

_Machine = tuple[str, str]
"""Boot and space: process ids are numbers within these."""


class Witnesses:
    """Reads the files of those lives alone that were on the same machine as one that is asked about."""

    def __init__(
        self, lives: Callable[[], Mapping[bytes, Incarnation]], read: Callable[[Incarnation], list[Witnessed]]
    ) -> None:
        self._lives, self._read = lives, read
        self._read_at: dict[_Machine, float] = {}
        self._statuses: dict[tuple[_Machine, int, int], int] = {}
        self._has_seen: set[bytes] = set()
        """Lives that saw another rank's end."""

    def status(self, process: ProcessId, now: float) -> int | None:
        """Return what `wait` said of a rank's process, as others saw it; None: nobody did. now: seconds watched."""
        if not process.is_known:
            return None
        machine = (process.boot, process.space)
        self._look(machine, now)
        return self._statuses.get((machine, process.pid, process.start))

    def has_seen(self, life: bytes) -> bool:
        """Return whether a life saw another rank end otherwise than in order."""
        return life in self._has_seen

    def _look(self, machine: _Machine, now: float) -> None:
        if now - self._read_at.get(machine, float("-inf")) < READ_EVERY_S:
            return
        self._read_at[machine] = now
        ranks: set[tuple[int, int]] = set()
        told: dict[bytes, list[Witnessed]] = {}
        for life in self._lives().values():
            process = ProcessId.told_by(life.descriptor.environment) if life.descriptor is not None else ProcessId()
            if (process.boot, process.space) == machine:
                ranks.add((process.pid, process.start))
                told[life.id] = self._read(life)
        for life_id, lines in told.items():
            for one in lines:
                # A launcher has other children too: their ends say nothing of the ranks.
                if (one.pid, one.start) in ranks:
                    self._statuses[machine, one.pid, one.start] = one.status
                    self._has_seen.add(life_id)
