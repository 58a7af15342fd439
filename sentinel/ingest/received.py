"""Received: up to where each process of a rank was received, the steps it ended, and its health that waits for a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sentinel.ingest.attempts import EndedSteps
from sentinel.ingest.incarnation import Incarnation, SpoolPosition, SpoolRecord
from sentinel.ingest.step_parts import RankPartOfStep, earlier
from sentinel.ingest.waiting_health import WaitingHealth
from sentinel.messages import Health

_NOTHING = (0, (0, 0), 0)


class Received:
    """By process of a rank. What is needed no more may be acknowledged: `positions`."""

    def __init__(self) -> None:
        self.incarnations: dict[bytes, Incarnation] = {}
        self.ended: dict[bytes, EndedSteps] = {}
        self._health = WaitingHealth()
        self._newest: dict[bytes, tuple[int, tuple[int, int], int]] = {}
        """Process -> (seq, place behind, `SpoolRecord.time_ns`) of its last frame taken."""

    def add(self, record: SpoolRecord) -> None:
        """Take note of a frame."""
        incarnation, seq = record.incarnation, record.frame.header.seq
        self.incarnations[incarnation.id] = incarnation
        if seq > self._newest.get(incarnation.id, _NOTHING)[0]:
            behind = record.frame.file_index, record.frame.offset_after
            self._newest[incarnation.id] = (seq, behind, record.time_ns)

    def ended_of(self, incarnation: Incarnation) -> EndedSteps:
        """Return where the steps of a process stand."""
        found = self.ended.get(incarnation.id)
        if found is None:
            found = self.ended[incarnation.id] = EndedSteps()
        return found

    def add_health(self, record: SpoolRecord, health: Health) -> bool:
        """Have a health record wait for the step that it goes with; False: there is no room, it is lost."""
        return self._health.add(record.incarnation.id, record.frame.header.seq, health, record.begin)

    def take_health(self, incarnation: Incarnation, last_seq: int) -> tuple[Health, ...]:
        """Return the health of a process up to a frame's number, and let go of it."""
        ended = self.ended_of(incarnation)
        ended.health_seq = max(ended.health_seq, last_seq)
        return self._health.take(incarnation.id, last_seq)

    def positions(self, parts: Iterable[RankPartOfStep]) -> dict[str, SpoolPosition]:
        """Return, per spool folder, up to where nothing is needed any more. parts: those of open steps."""
        needed: dict[bytes, tuple[int, tuple[int, int]]] = {}
        for part in parts:
            needed[part.incarnation.id] = earlier(part.first, needed.get(part.incarnation.id, part.first))
        for incarnation_id, first in self._health.oldest():
            needed[incarnation_id] = earlier(first, needed.get(incarnation_id, first))
        found = {}
        for incarnation_id, (seq, behind, wall_ns) in self._newest.items():
            incarnation = self.incarnations[incarnation_id]
            if incarnation_id in needed:
                seq, behind, wall_ns = needed[incarnation_id][0] - 1, needed[incarnation_id][1], 0
            bye = incarnation.bye if incarnation.has_left and incarnation_id not in needed else None
            found[incarnation.folder] = SpoolPosition(
                incarnation_id, incarnation.rank, incarnation.attempt, behind[0], behind[1], seq,
                incarnation.described_before(behind), incarnation.last_step, last_wall_ns=wall_ns,
                first_wall_ns=incarnation.first_wall_ns, bye=bye,
            )  # fmt: skip
        return found

    def newest_seqs(self) -> dict[bytes, int]:
        """Return the number of the last frame taken of each process."""
        return {incarnation: seq for incarnation, (seq, _, _) in self._newest.items()}

    def restore(
        self, incarnations: Mapping[bytes, Incarnation], ended: dict[bytes, EndedSteps], positions: Iterable[SpoolPosition]
    ) -> None:
        """Go on from what these were."""
        self.incarnations, self.ended = dict(incarnations), ended
        for position in positions:
            place = position.file_index, position.offset
            self._newest[position.incarnation] = (position.seq, place, position.last_wall_ns)
