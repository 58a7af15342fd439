"""StepIntake: puts each frame into the open step that it is of, and counts what comes after its step was closed."""

from __future__ import annotations

from collections.abc import Iterable

from sentinel.ingest.attempts import Attempts, AttemptState
from sentinel.ingest.blindness import Blindness
from sentinel.ingest.decision_replay import DecisionReplay
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.ingest.received import Received
from sentinel.ingest.run_losses import silent
from sentinel.ingest.step_parts import OpenStep
from sentinel.messages import Bye, Descriptor, EndStep, Health
from sentinel.wire.frame import FrameType

_ROWS = int(FrameType.ROWS)


class StepIntake:
    """Fills the open steps of `Attempts`. No clock: `now` is handed in."""

    def __init__(self, attempts: Attempts, received: Received, replay: DecisionReplay, blindness: Blindness) -> None:
        self._attempts, self._received, self._replay, self._blindness = attempts, received, replay, blindness
        self._counted: dict[int, int] = {}
        """Attempt -> newest step that was closed at the snapshot, and process -> newest frame then: counted already."""
        self._counted_seq: dict[bytes, int] = {}

    def take(self, record: SpoolRecord, now: float) -> None:
        """Take in one frame. now: monotonic seconds."""
        incarnation, header = record.incarnation, record.frame.header
        self._received.add(record)
        if header.type == _ROWS or isinstance(record.message, EndStep):
            self._take_step(record, now)
        elif isinstance(record.message, Descriptor):
            self._attempts.arrive(incarnation)
        elif isinstance(record.message, Health):
            self._take_health(record, record.message)
        elif isinstance(record.message, Bye):
            incarnation.has_left = True
            self._attempts.newcomers.pop(incarnation.id, None)

    def restore(self, attempts: Iterable[AttemptState], newest_seqs: dict[bytes, int]) -> None:
        """Go on from a snapshot: what was closed, and which frames were taken, is counted already."""
        self._counted = {one.number: one.closed_step for one in attempts}
        self._counted_seq = newest_seqs

    def _take_health(self, record: SpoolRecord, health: Health) -> None:
        incarnation = record.incarnation
        if record.frame.header.seq <= self._received.ended_of(incarnation).health_seq:
            return
        message: Health | None = health
        if health.code == "steps_dropped":
            message = silent(health, *self._attempts.received_of(incarnation, self._replay))
        if message is not None and not self._received.add_health(record, message):
            self._blindness.add("lost_health", 1)

    def _take_step(self, record: SpoolRecord, now: float) -> None:
        incarnation, header = record.incarnation, record.frame.header
        step, seq = header.step, header.seq
        if record.descriptor is None and incarnation.descriptor is None:
            if seq > self._counted_seq.get(incarnation.id, 0):
                self._blindness.add("unplaced_rows", header.row_count)
            return
        generation = self._received.ended_of(incarnation).receive(step, seq, is_end=isinstance(record.message, EndStep))
        session = self._attempts.place(incarnation, generation, step)
        if session is None:
            if seq > self._counted_seq.get(incarnation.id, 0):
                self._blindness.add_late(incarnation.rank, header.row_count, 0 if header.row_count else 1)
            return
        attempt = self._attempts.by_number[session.attempt]
        descriptor = record.descriptor or incarnation.descriptor
        if descriptor is not None and attempt.sessions.get(session.incarnation.rank) is session:
            attempt.take_world_size(incarnation.rank, descriptor.place.world_size)
        if step <= attempt.state.closed_step and not self._replay.wants(attempt.number, step, session):
            closed_before, received_before = self._counted.get(attempt.number, -1), self._counted_seq.get(incarnation.id, 0)
            if step > closed_before or seq > received_before:
                self._blindness.add_late(incarnation.rank, header.row_count, 0 if header.row_count else 1)
            return
        attempt.newest_step = max(attempt.newest_step, step)
        opened = attempt.open.get(step)
        if opened is None:
            opened = attempt.open[step] = OpenStep(now)
        opened.add(record, generation)
