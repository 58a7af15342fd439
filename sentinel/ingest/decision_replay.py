"""DecisionReplay: decisions of the journal that are to be made again, from exactly the same frames, before any new one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from sentinel.decision import Decision, Tick
from sentinel.ingest.attempts import Attempts, Session
from sentinel.ingest.received import Received


class DecisionReplay:
    """A queue in the order of the journal; false when it is empty."""

    def __init__(self, attempts: Attempts, received: Received) -> None:
        self._attempts, self._received = attempts, received
        self._waiting: deque[Decision | Tick] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Decision | Tick]:
        return iter(self._waiting)

    def add(self, decisions: Iterable[Decision | Tick]) -> None:
        """Take in decisions, before the frames that they took are received."""
        for decision in decisions:
            self._waiting.append(decision)
            for one in decision.ranks if isinstance(decision, Decision) else ():
                self._attempts.place_as_decided(one.incarnation, one.generation, decision.attempt)

    def next(self) -> Decision | Tick:
        """Return the next one to make again; IndexError: there is none."""
        return self._waiting.popleft()

    def wants(self, attempt: int, step: int, session: Session) -> bool:
        """Whether a decision took this session's frames of a closed step."""
        return any(
            isinstance(one, Decision)
            and (one.attempt, one.step) == (attempt, step)
            and any(
                part.incarnation == session.incarnation.id and part.generation == session.generation for part in one.ranks
            )
            for one in self._waiting
        )

    def is_ready(self) -> bool:
        """Whether all frames that the next decision took have been received."""
        decision = self._waiting[0]
        if isinstance(decision, Tick):
            return True
        attempt = self._attempts.by_number.get(decision.attempt)
        opened = attempt.open.get(decision.step) if attempt is not None else None
        if opened is None:
            return not decision.ranks
        for one in decision.ranks:
            part = opened.parts.get((one.incarnation, one.generation))
            if part is None or (one.is_ended and part.end is None):
                return False
            if sum(count for seq, count, _ in part.rows if seq <= one.last_seq) < one.num_rows:
                return False
        return all(one.incarnation in self._received.incarnations for one in decision.described)
