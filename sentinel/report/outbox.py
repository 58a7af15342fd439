"""The outbox as the pipeline needs it; `store.outbox_table` is one, one in memory is here for tests and `--no-state`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec


class WaitingAlert(Protocol):
    """One row without an outcome."""

    @property
    def position(self) -> int:
        """Order of arrival, unique."""
        ...

    @property
    def key(self) -> str:
        """The idempotency key."""
        ...

    @property
    def body(self) -> bytes:
        """JSON of an Alert."""
        ...

    @property
    def tries(self) -> int:
        """Deliveries begun so far. Above 0 on a row this process never tried: a crash lies in between."""
        ...


class Outbox(Protocol):
    """A durable queue by topic, safe to use from several threads. `store.outbox_table.OutboxTable` is one."""

    def waiting(self, topic: str, now: float, limit: int = 256) -> Sequence[WaitingAlert]:
        """Return rows of `topic` without an outcome that are due at `now`, oldest first."""
        ...

    def num_waiting(self, topic: str) -> int:
        """Return how many rows of `topic` have no outcome."""
        ...

    def begin_delivery(self, positions: Sequence[int]) -> None:
        """Count a try, durably, before the message leaves."""
        ...

    def finish_delivery(self, positions: Sequence[int], outcome: str) -> None:
        """Write the outcome: these rows are done for ever."""
        ...

    def postpone_delivery(self, positions: Sequence[int], due: float) -> None:
        """Note that these are tried again from `due` on, seconds since the epoch."""
        ...


class MemoryRow(msgspec.Struct, kw_only=True):
    """A row of MemoryOutbox."""

    position: int
    key: str
    topic: str
    body: bytes
    tries: int = 0
    due: float = 0.0
    outcome: str = ""


class Postable(Protocol):
    """What goes into an outbox: an Alert is one."""

    @property
    def key(self) -> str:
        """The idempotency key: the same key is queued once."""
        ...

    @property
    def topic(self) -> str:
        """The queue."""
        ...

    @property
    def body(self) -> bytes:
        """The message."""
        ...


class MemoryOutbox:
    """An outbox that dies with the process."""

    def __init__(self) -> None:
        self.rows: dict[int, MemoryRow] = {}
        self._keys: set[str] = set()
        self._mutex = threading.Lock()

    def add(self, messages: Iterable[Postable]) -> None:
        """Queue what was not queued before."""
        with self._mutex:
            for one in messages:
                if one.key not in self._keys:
                    self._keys.add(one.key)
                    position = len(self._keys)
                    self.rows[position] = MemoryRow(position=position, key=one.key, topic=one.topic, body=one.body)

    def waiting(self, topic: str, now: float, limit: int = 256) -> list[MemoryRow]:
        """Return copies of the open rows of `topic`, oldest first."""
        with self._mutex:
            rows = [row for row in self.rows.values() if row.topic == topic and not row.outcome and row.due <= now]
            return [msgspec.structs.replace(row) for row in rows[:limit]]

    def num_waiting(self, topic: str) -> int:
        """Return how many rows of `topic` are open."""
        with self._mutex:
            return sum(row.topic == topic and not row.outcome for row in self.rows.values())

    def begin_delivery(self, positions: Sequence[int]) -> None:
        """Count a try."""
        with self._mutex:
            for position in positions:
                self.rows[position].tries += 1

    def finish_delivery(self, positions: Sequence[int], outcome: str) -> None:
        """Write the outcome."""
        with self._mutex:
            for position in positions:
                self.rows[position].outcome = outcome

    def postpone_delivery(self, positions: Sequence[int], due: float) -> None:
        """Note the next try."""
        with self._mutex:
            for position in positions:
                self.rows[position].due = due
