"""The outbox as the pipeline needs it; `store.outbox_table` is one, one in memory is here for tests and `--no-state`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
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
        """Deliveries of it that may have been received: above 0, it is sent as a repeat."""
        ...

    @property
    def delivery(self) -> str:
        """The delivery that was begun with it, and of which nobody knows whether it was received; empty: there is none, or
        nobody knows which."""
        ...


class ToldAlert(Protocol):
    """What one sink was told of one incident."""

    @property
    def position(self) -> int:
        """Position of a row of the incident's run."""
        ...

    @property
    def topic(self) -> str:
        """The sink's queue."""
        ...

    @property
    def incident(self) -> str:
        """Id of the incident."""
        ...

    @property
    def over(self) -> float:
        """Seconds since the epoch when the sink was told its end; 0.0: it is open."""
        ...

    @property
    def body(self) -> bytes:
        """JSON of a `stages.ledger.Told`."""
        ...


class Outbox(Protocol):
    """A durable queue by topic, safe to use from several threads. `store.outbox_table.OutboxTable` is one."""

    @property
    def generation(self) -> int:
        """Changes when a run joins or leaves: what was told has to be read again."""
        ...

    def waiting(self, topic: str, now: float, limit: int = 256) -> Sequence[WaitingAlert]:
        """Return rows of `topic` without an outcome that are due at `now`, oldest first."""
        ...

    def num_waiting(self, topic: str) -> int:
        """Return how many rows of `topic` have no outcome."""
        ...

    def begin_delivery(self, deliveries: Mapping[int, str]) -> None:
        """Note, durably and before the message leaves, which delivery each position is part of."""
        ...

    def finish_delivery(self, positions: Sequence[int], outcome: str, told: Sequence[ToldAlert] = ()) -> None:
        """Write the outcome, and what the sink knows now: these rows are done for ever."""
        ...

    def postpone_delivery(self, positions: Sequence[int], due: float, *, is_unknown: bool = False) -> None:
        """Note that these are tried again from `due` on, seconds since the epoch. is_unknown: they may be known already."""
        ...

    def told(self, topic: str) -> Sequence[bytes]:
        """Return what the sink of a topic was told of each incident that it was told of."""
        ...

    def was_sent(self, message: str) -> bool:
        """Return whether a row of a message has the outcome of one that was received."""
        ...


class MemoryRow(msgspec.Struct, kw_only=True):
    """A row of MemoryOutbox."""

    position: int
    key: str
    topic: str
    body: bytes
    due: float = 0.0
    tries: int = 0
    delivery: str = ""
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

    generation = 0
    """Never changes: runs neither join nor leave."""

    def __init__(self) -> None:
        self.rows: dict[int, MemoryRow] = {}
        self._keys: set[str] = set()
        self._told: dict[tuple[str, str, str], bytes] = {}
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

    def begin_delivery(self, deliveries: Mapping[int, str]) -> None:
        """Note which delivery each position is part of."""
        with self._mutex:
            for position, delivery in deliveries.items():
                row = self.rows[position]
                row.delivery, row.tries = delivery, row.tries + 1

    def finish_delivery(self, positions: Sequence[int], outcome: str, told: Sequence[ToldAlert] = ()) -> None:
        """Write the outcome, and what the sink knows now."""
        with self._mutex:
            for position in positions:
                self.rows[position].outcome = outcome
            for one in told:
                self._told[one.topic, one.incident, self._run_of(one.position)] = one.body

    def postpone_delivery(self, positions: Sequence[int], due: float, *, is_unknown: bool = False) -> None:
        """Note the next try."""
        with self._mutex:
            for position in positions:
                row = self.rows[position]
                row.due = due
                if not is_unknown:
                    row.delivery, row.tries = "", 0

    def told(self, topic: str) -> list[bytes]:
        """Return what the sink was told."""
        with self._mutex:
            return [body for (of, _, _), body in self._told.items() if of == topic]

    def was_sent(self, message: str) -> bool:
        """Return whether a message was received as a whole, though not all of its rows say so."""
        with self._mutex:
            outcomes = {row.outcome for row in self.rows.values() if row.delivery.startswith(f"{message}\n")}
            return not outcomes.isdisjoint({"sent", "repeated", "digested", "correlated"})

    def _run_of(self, position: int) -> str:
        # The key of an alert is `<sink>:<run>:<incident>:<revision>`.
        return self.rows[position].key.rsplit(":", 2)[0]
