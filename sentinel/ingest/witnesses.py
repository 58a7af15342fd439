"""Witnesses: what ranks recorded of the ends of other ranks on their machine, for a daemon that did not see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sentinel.ingest.incarnation import Incarnation
from sentinel.process import ProcessId
from sentinel.wire.witness import Witnessed

LONG_SILENT_S = (2.5, 60.0)
"""Seconds of a rank's silence between which others are asked about it: heartbeats are one apart, and what others saw is on
disk long before a minute is over."""
READ_EVERY_S = 0.5
"""Least seconds between two readings of the files of one machine; a bound on time, half of a heartbeat's interval."""

_Machine = tuple[str, str]
"""Boot and space: process ids are numbers within these."""


class Witnesses:
    """Reads the files of the incarnations on the same machine as the rank in question, and no others."""

    def __init__(
        self, incarnations: Callable[[], Mapping[bytes, Incarnation]], read: Callable[[Incarnation], list[Witnessed]]
    ) -> None:
        self._incarnations, self._read = incarnations, read
        self._read_at: dict[_Machine, float] = {}
        self._statuses: dict[tuple[_Machine, int, int], int] = {}
        self._has_seen: set[bytes] = set()
        """Incarnations that saw another rank's end."""

    def status(self, process: ProcessId, now: float) -> int | None:
        """Return the wait status of a rank's process as another rank recorded it; None: none did. now: seconds watched."""
        if not process.is_known:
            return None
        machine = (process.boot, process.space)
        self._look(machine, now)
        return self._statuses.get((machine, process.pid, process.start))

    def has_seen(self, incarnation: bytes) -> bool:
        """Return whether an incarnation saw another rank end otherwise than in order."""
        return incarnation in self._has_seen

    def _look(self, machine: _Machine, now: float) -> None:
        if now - self._read_at.get(machine, float("-inf")) < READ_EVERY_S:
            return
        self._read_at[machine] = now
        ranks: set[tuple[int, int]] = set()
        reported: dict[bytes, list[Witnessed]] = {}
        for incarnation in self._incarnations().values():
            process = (
                ProcessId.reported_by(incarnation.descriptor.environment)
                if incarnation.descriptor is not None
                else ProcessId()
            )
            if (process.boot, process.space) == machine:
                ranks.add((process.pid, process.start))
                reported[incarnation.id] = self._read(incarnation)
        for incarnation_id, lines in reported.items():
            for one in lines:
                # A launcher has other children too: their ends say nothing of the ranks.
                if (one.pid, one.start) in ranks:
                    self._statuses[machine, one.pid, one.start] = one.status
                    self._has_seen.add(incarnation_id)
