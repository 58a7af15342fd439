"""The outboxes of all runs as one, so that a sink's rate limit and its digests hold for the daemon and not for a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sentinel.errors import StoreError
from sentinel.report.outbox import ToldAlert
from sentinel.store.outbox_table import OutboxTable, ToldIncident, Waiting

STRIDE = 1 << 20
"""Most runs that one daemon ever serves; a position here is position in the outbox * STRIDE + number of the run."""


class Outboxes:
    """`report.outbox.Outbox` over several runs. Runs join and leave while it is in use."""

    def __init__(self) -> None:
        self.generation = 0
        """Changes when a run joins or leaves."""
        self._outboxes: dict[int, OutboxTable] = {}
        self._num_joined = 0
        self._mutex = threading.Lock()

    def join(self, outbox: OutboxTable) -> None:
        """Take in a run's outbox."""
        with self._mutex:
            self._outboxes[self._num_joined] = outbox
            self._num_joined += 1
            self.generation += 1

    def leave(self, outbox: OutboxTable) -> None:
        """Let go of an outbox; what waits in it waits until it is served again."""
        with self._mutex:
            self._outboxes = {number: one for number, one in self._outboxes.items() if one is not outbox}
            self.generation += 1

    def num_runs(self) -> int:
        """Return how many runs are served."""
        with self._mutex:
            return len(self._outboxes)

    def waiting(self, topic: str, now: float, limit: int = 256) -> list[Waiting]:
        """Return what is due, run by run, oldest first in each."""
        found: list[Waiting] = []
        for number, outbox in self._all():
            for row in outbox.waiting(topic, now, limit - len(found)):
                found.append(replace(row, position=row.position * STRIDE + number))
            if len(found) >= limit:
                break
        return found

    def num_waiting(self, topic: str) -> int:
        """Return how many rows of all runs have no outcome."""
        return sum(outbox.num_waiting(topic) for _, outbox in self._all())

    def begin_delivery(self, deliveries: Mapping[int, str]) -> None:
        """Note which delivery each position is part of, durably. StoreError: a run of them is served no more, by us."""
        known = dict(self._all())
        if any(position % STRIDE not in known for position in deliveries):
            raise StoreError("a run with something to send is not served here any more; who serves it sends it")
        self._each(
            list(deliveries),
            lambda outbox, number, own: outbox.begin_delivery({at: deliveries[at * STRIDE + number] for at in own}),
        )

    def finish_delivery(self, positions: Sequence[int], outcome: str, told: Sequence[ToldAlert] = ()) -> None:
        """Write the outcome, and what the sink knows now."""

        def finish(outbox: OutboxTable, number: int, own: list[int]) -> None:
            known = [
                ToldIncident(
                    position=one.position // STRIDE, topic=one.topic, incident=one.incident, over=one.over, body=one.body
                )
                for one in told
                if one.position % STRIDE == number
            ]
            outbox.finish_delivery(own, outcome, known)

        self._each(positions, finish)

    def postpone_delivery(self, positions: Sequence[int], due: float, *, is_unknown: bool = False) -> None:
        """Note the next try."""
        self._each(positions, lambda outbox, _, own: outbox.postpone_delivery(own, due, is_unknown=is_unknown))

    def told(self, topic: str) -> list[bytes]:
        """Return what the sink of a topic was told of the incidents of all runs."""
        return [body for _, outbox in self._all() for body in outbox.told(topic)]

    def was_sent(self, message: str) -> bool:
        """Return whether a message was received, as the outbox of one of its runs says."""
        return any(outbox.was_sent(message) for _, outbox in self._all())

    def _all(self) -> list[tuple[int, OutboxTable]]:
        with self._mutex:
            return list(self._outboxes.items())

    def _each(self, positions: Sequence[int], act: Callable[[OutboxTable, int, list[int]], None]) -> None:
        by_run: dict[int, list[int]] = {}
        for position in positions:
            by_run.setdefault(position % STRIDE, []).append(position // STRIDE)
        outboxes = dict(self._all())
        for number, own in by_run.items():
            # A run that left meanwhile keeps its rows; its outbox says what was tried.
            if number in outboxes:
                act(outboxes[number], number, own)
