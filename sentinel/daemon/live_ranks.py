"""LiveRanks: which process of each rank takes commands now, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sentinel.command import ANY_ATTEMPT
from sentinel.control.edits import ConfigInUse
from sentinel.ingest.incarnation import Incarnation, SpoolRecord

LIVE_S = 30.0
"""A process that was silent for so long is not waited for when a command goes out."""


class LiveProcesses(msgspec.Struct, frozen=True):
    """The ranks that write to the spool now."""

    by_rank: dict[int, Incarnation]
    """Of several processes of a rank the one that wrote last."""

    @property
    def ended(self) -> dict[int, int]:
        """Rank -> the newest step that it ended; -1: none yet."""
        return {rank: one.last_step for rank, one in self.by_rank.items()}

    @property
    def attempt(self) -> int:
        """The newest attempt, as they call it."""
        return max((one.attempt for one in self.by_rank.values() if one.attempt is not None), default=ANY_ATTEMPT)

    def in_use(self) -> dict[int, ConfigInUse]:
        """Return rank -> the config that it measures by; of the newest attempt."""
        attempt = self.attempt
        mine = ((rank, one) for rank, one in self.by_rank.items() if one.attempt in (None, attempt))
        return {rank: ConfigInUse.reported_by(one.descriptor, one.last_step) for rank, one in mine}


class StepStart:
    """When the step that runs began: as the end of the one before it was seen."""

    def __init__(self) -> None:
        self._ended_step: int | None = None
        self._seen_at: float | None = None

    def take(self, ended_step: int, mono: float) -> None:
        """Take note of the newest step that a rank has ended. mono: monotonic seconds."""
        if ended_step != self._ended_step:
            # When the first one ended nobody saw.
            self._seen_at = None if self._ended_step is None else mono
            self._ended_step = ended_step

    def begun_s(self, running_step: int, mono: float) -> float | None:
        """Return the seconds since a step began; None: that is not known."""
        is_known = self._ended_step is not None and running_step == self._ended_step + 1
        return mono - self._seen_at if is_known and self._seen_at is not None else None


class LiveRanks:
    """Remembers when each process was received last."""

    def __init__(self) -> None:
        self._received_at: dict[bytes, float] = {}
        """Process -> monotonic seconds."""

    def receive(self, records: Iterable[SpoolRecord], mono: float) -> None:
        """Take note of who wrote. mono: monotonic seconds."""
        for record in records:
            self._received_at[record.incarnation.id] = mono

    def now(self, known: Iterable[Incarnation], mono: float) -> LiveProcesses:
        """Return who of the known processes writes now."""
        newest: dict[int, tuple[float, int]] = {}
        live: dict[int, Incarnation] = {}
        for one in known:
            at = self._received_at.get(one.id, 0.0)
            is_live = one.bye is None and at and mono - at < LIVE_S
            if is_live and (at, one.last_step) >= newest.get(one.rank, (0.0, -1)):
                newest[one.rank], live[one.rank] = (at, one.last_step), one
        return LiveProcesses(live)
