"""The outboxes of all runs as one, so that a sink's rate limit and its digests hold for the daemon and not for a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sentinel.store.journal import Journal, Waiting

STRIDE = 1 << 20
"""Most runs that one daemon ever serves; a position here is position in the journal * STRIDE + number of the run."""


class Outboxes:
    """`report.outbox.Outbox` over several journals. Runs join and leave while it is in use."""

    def __init__(self) -> None:
        self._journals: dict[int, Journal] = {}
        self._num_joined = 0
        self._mutex = threading.Lock()

    def join(self, journal: Journal) -> None:
        """Take in a run's journal."""
        with self._mutex:
            self._journals[self._num_joined] = journal
            self._num_joined += 1

    def leave(self, journal: Journal) -> None:
        """Let go of a journal; what waits in it waits until it is served again."""
        with self._mutex:
            self._journals = {number: one for number, one in self._journals.items() if one is not journal}

    def waiting(self, topic: str, now: float, limit: int = 256) -> list[Waiting]:
        """Return what is due, run by run, oldest first in each."""
        found: list[Waiting] = []
        for number, journal in self._all():
            for row in journal.waiting(topic, now, limit - len(found)):
                position = row.position * STRIDE + number
                found.append(Waiting(position=position, key=row.key, body=row.body, tries=row.tries))
            if len(found) >= limit:
                break
        return found

    def num_waiting(self, topic: str) -> int:
        """Return how many rows of all runs have no outcome."""
        return sum(journal.num_waiting(topic) for _, journal in self._all())

    def begin_delivery(self, positions: Sequence[int]) -> None:
        """Count a try, durably."""
        self._each(positions, Journal.begin_delivery)

    def finish_delivery(self, positions: Sequence[int], outcome: str) -> None:
        """Write the outcome."""
        self._each(positions, lambda journal, own: journal.finish_delivery(own, outcome))

    def postpone_delivery(self, positions: Sequence[int], due: float) -> None:
        """Note the next try."""
        self._each(positions, lambda journal, own: journal.postpone_delivery(own, due))

    def _all(self) -> list[tuple[int, Journal]]:
        with self._mutex:
            return list(self._journals.items())

    def _each(self, positions: Sequence[int], act: Callable[[Journal, list[int]], None]) -> None:
        by_run: dict[int, list[int]] = {}
        for position in positions:
            by_run.setdefault(position % STRIDE, []).append(position // STRIDE)
        journals = dict(self._all())
        for number, own in by_run.items():
            # A run that left meanwhile keeps its rows; its journal says what was tried.
            if number in journals:
                act(journals[number], own)
