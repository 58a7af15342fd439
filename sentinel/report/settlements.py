"""Settlements: rows of an outbox that are done, until the outbox has written that down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sentinel.report.outbox import Outbox


@dataclass(frozen=True, kw_only=True)
class ToldRow:
    """A `ToldAlert`."""

    position: int
    topic: str
    incident: str
    over: float
    body: bytes


@dataclass(frozen=True, kw_only=True)
class _Settlement:
    positions: list[int]
    outcome: str
    told: list[ToldRow]


class Settlements:
    """Of one sink. What the outbox could not yet write down stays here, and is never sent again meanwhile."""

    def __init__(self, outbox: Outbox, counts: Counter[str]) -> None:
        """counts: outcome -> rows, which this adds to."""
        self._outbox, self._counts = outbox, counts
        self._unwritten: list[_Settlement] = []

    @property
    def positions(self) -> set[int]:
        """The rows that are done and not written down."""
        return {position for one in self._unwritten for position in one.positions}

    def add(self, positions: list[int], outcome: str, told: Sequence[ToldRow]) -> None:
        """Settle rows with an outcome. told: what the sink was told by them."""
        if not positions:
            return
        self._counts[outcome] += len(positions)
        self._unwritten.append(_Settlement(positions=positions, outcome=outcome, told=list(told)))

    def write(self) -> None:
        """Have the outbox write all of it down; raises what the outbox raises, and what is left is written the next time."""
        while self._unwritten:
            one = self._unwritten[0]
            self._outbox.finish_delivery(one.positions, one.outcome, one.told)
            del self._unwritten[0]
