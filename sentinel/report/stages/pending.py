"""Pending: the newest word on an incident, on its way through the stages of one sink; and Turn, in which they are asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from sentinel.report.alert import Alert, reports_end
from sentinel.report.stages.ledger import Ledger, Told, Where, where_of


class Pending(msgspec.Struct, kw_only=True):
    """What a sink may be sent about one incident, or about alike ones of several runs."""

    alert: Alert
    positions: list[int]
    """The rows of the outbox that it settles, the newest first."""
    since: float
    """Seconds since the epoch when the oldest of its rows was judged."""
    told: Told | None = None
    """What the sink was told of it before; None: nothing, or its end."""
    thread: str = ""
    """Which incidents are told together with it."""
    parts: list[Pending] = []
    """Of alike incidents of several runs: each of them; empty: it is one incident."""
    delivery: str = ""
    """The delivery that was begun with it and whose answer never came: its message, and in a second line its thread; empty:
    there is none."""
    is_maybe_received: bool = False
    num_failures: int = 0

    @property
    def where(self) -> Where:
        """Which incident it is about."""
        return where_of(self.alert)

    @property
    def is_end(self) -> bool:
        """It says that the incident is over; what opens with the end of a run does not."""
        return self.alert.is_closed and not reports_end(self.alert.incident)

    @property
    def incidents(self) -> Sequence[Pending]:
        """The incidents that it is about, one by one."""
        return self.parts or [self]


@dataclass(kw_only=True)
class Turn:
    """What the stages of one sink are asked with, and what they decide beside what goes on to the next."""

    now: float
    """Seconds since the epoch."""
    ledger: Ledger
    num_runs: int = 1
    """Runs that the daemon serves."""
    last_sent: float = -math.inf
    """Seconds since the epoch when the sink was sent its last message."""
    is_hurried: bool = False
    """The daemon ends: nothing waits for more to come."""
    settled: list[tuple[list[int], str]] = field(default_factory=list)
    """(positions, outcome) of what is not sent."""
    withheld: set[int] = field(default_factory=set)
    """Positions of what waits for people or for the calendar, and not for the sink."""
    due: float | None = None
    """When the stages want to be asked again, seconds since the epoch; None: when something new waits."""

    def settle(self, pending: Pending, outcome: str) -> None:
        """Say that this is never sent, and why: one of `report.metrics.OUTCOMES`."""
        self.settled.append((pending.positions, outcome))

    def wake_at(self, moment: float) -> None:
        """Ask again at a moment, or sooner."""
        if moment < math.inf:
            self.due = moment if self.due is None else min(self.due, moment)

    def is_due(self, begun: float, wait_s: float) -> bool:
        """Return whether `wait_s` have passed since `begun`; where not, ask again then. A clock set back delays nothing."""
        due = begun + wait_s
        if self.is_hurried or self.now < begun or self.now >= due:
            return True
        self.wake_at(due)
        return False


class AlertStage(Protocol):
    """One decision about what waits for a sink."""

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return what goes on to the next stage; what does not is settled, or waits for another turn."""
        ...
