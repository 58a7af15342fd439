"""Received: up to where each process of a rank was received, the steps it ended, and its health that waits for a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sentinel.ingest.attempts import EndedSteps
from sentinel.ingest.incarnation import Incarnation, SpoolPosition, SpoolRecord
from sentinel.ingest.parts import RankPartOfStep, earlier
from sentinel.ingest.waiting_health import WaitingHealth
from sentinel.messages import Health


class Received:
    """By process of a rank. What is needed no more may be acknowledged: `positions`."""

    def __init__(self) -> None:
        self.lives: dict[bytes, Incarnation] = {}
        self.ended: dict[bytes, EndedSteps] = {}
        self._health = WaitingHealth()
        self._newest: dict[bytes, tuple[int, tuple[int, int]]] = {}
        """Process -> (seq, place behind) of its last frame taken."""

    def add(self, record: SpoolRecord) -> None:
        """Take note of a frame."""
        life, seq = record.life, record.frame.header.seq
        self.lives[life.id] = life
        if seq > self._newest.get(life.id, (0, (0, 0)))[0]:
            self._newest[life.id] = (seq, (record.frame.file_index, record.frame.offset_after))

    def ended_of(self, life: Incarnation) -> EndedSteps:
        """Return where the steps of a process stand."""
        found = self.ended.get(life.id)
        if found is None:
            found = self.ended[life.id] = EndedSteps()
        return found

    def add_health(self, record: SpoolRecord, health: Health) -> bool:
        """Have a health record wait for the step that it goes with; False: there is no room, it is lost."""
        return self._health.add(record.life.id, record.frame.header.seq, health, record.begin)

    def take_health(self, life: Incarnation, last_seq: int) -> tuple[Health, ...]:
        """Return the health of a process up to a frame's number, and let go of it."""
        ended = self.ended_of(life)
        ended.health_seq = max(ended.health_seq, last_seq)
        return self._health.take(life.id, last_seq)

    def positions(self, parts: Iterable[RankPartOfStep]) -> dict[str, SpoolPosition]:
        """Return, per spool folder, up to where nothing is needed any more. parts: those of open steps."""
        needed: dict[bytes, tuple[int, tuple[int, int]]] = {}
        for part in parts:
            needed[part.life.id] = earlier(part.first, needed.get(part.life.id, part.first))
        for life_id, first in self._health.oldest():
            needed[life_id] = earlier(first, needed.get(life_id, first))
        found = {}
        for life_id, (seq, behind) in self._newest.items():
            life = self.lives[life_id]
            if life_id in needed:
                seq, behind = needed[life_id][0] - 1, needed[life_id][1]
            found[life.folder] = SpoolPosition(
                life_id, life.rank, life.attempt, behind[0], behind[1], seq, life.described_before(behind), life.last_step,
                life.bye.reason if life.bye is not None and life.has_left and life_id not in needed else None,
            )  # fmt: skip
        return found

    def newest_seqs(self) -> dict[bytes, int]:
        """Return the number of the last frame taken of each process."""
        return {life: seq for life, (seq, _) in self._newest.items()}

    def restore(
        self, lives: Mapping[bytes, Incarnation], ended: dict[bytes, EndedSteps], positions: Iterable[SpoolPosition]
    ) -> None:
        """Go on from what these were."""
        self.lives, self.ended = dict(lives), ended
        for position in positions:
            self._newest[position.life] = (position.seq, (position.file_index, position.offset))
