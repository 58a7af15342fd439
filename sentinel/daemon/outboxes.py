"""The outboxes of all runs as one, so that a sink's rate limit and its digests hold for the daemon and not for a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sentinel.store.outbox_table import OutboxTable, Waiting

STRIDE = 1 << 20
"""Most runs that one daemon ever serves; a position here is position in the outbox * STRIDE + number of the run."""


class Outboxes:
    """`report.outbox.Outbox` over several runs. Runs join and leave while it is in use."""

    def __init__(self) -> None:
        self._outboxes: dict[int, OutboxTable] = {}
        self._num_joined = 0
        self._mutex = threading.Lock()

    def join(self, outbox: OutboxTable) -> None:
        """Take in a run's outbox."""
        with self._mutex:
            self._outboxes[self._num_joined] = outbox
            self._num_joined += 1

    def leave(self, outbox: OutboxTable) -> None:
        """Let go of an outbox; what waits in it waits until it is served again."""
        with self._mutex:
            self._outboxes = {number: one for number, one in self._outboxes.items() if one is not outbox}

    def waiting(self, topic: str, now: float, limit: int = 256) -> list[Waiting]:
        """Return what is due, run by run, oldest first in each."""
        found: list[Waiting] = []
        for number, outbox in self._all():
            for row in outbox.waiting(topic, now, limit - len(found)):
                position = row.position * STRIDE + number
                found.append(Waiting(position=position, key=row.key, body=row.body, tries=row.tries))
            if len(found) >= limit:
                break
        return found

    def num_waiting(self, topic: str) -> int:
        """Return how many rows of all runs have no outcome."""
        return sum(outbox.num_waiting(topic) for _, outbox in self._all())

    def begin_delivery(self, positions: Sequence[int]) -> None:
        """Count a try, durably."""
        self._each(positions, OutboxTable.begin_delivery)

    def finish_delivery(self, positions: Sequence[int], outcome: str) -> None:
        """Write the outcome."""
        self._each(positions, lambda outbox, own: outbox.finish_delivery(own, outcome))

    def postpone_delivery(self, positions: Sequence[int], due: float) -> None:
        """Note the next try."""
        self._each(positions, lambda outbox, own: outbox.postpone_delivery(own, due))

    def _all(self) -> list[tuple[int, OutboxTable]]:
        with self._mutex:
            return list(self._outboxes.items())

    def _each(self, positions: Sequence[int], act: Callable[[OutboxTable, list[int]], None]) -> None:
        by_run: dict[int, list[int]] = {}
        for position in positions:
            by_run.setdefault(position % STRIDE, []).append(position // STRIDE)
        outboxes = dict(self._all())
        for number, own in by_run.items():
            # A run that left meanwhile keeps its rows; its outbox says what was tried.
            if number in outboxes:
                act(outboxes[number], own)
