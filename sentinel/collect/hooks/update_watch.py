"""Around the step of an optimizer: learning rates are noted, and the probes that measure updates are called."""

from __future__ import annotations

from typing import Any

from sentinel.collect.probes.context import Events
from sentinel.collect.rows.running_step import RunningStep
from sentinel.collect.rows.scalars import Scalars
from sentinel.collect.schedule.plan import Plan


class UpdateWatch:
    """Called by the boundary when an optimizer is about to step, and when it has."""

    def __init__(self, running: RunningStep, plan: Plan, events: Events, scalars: Scalars) -> None:
        self._running = running
        self._plan = plan
        self._events = events
        self._scalars = scalars

    def stepping(self, optimizer: Any) -> None:
        """Called before an optimizer writes weights and state."""
        if self._running.is_measuring and self._plan.is_due:
            self._events.updating(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """Called after an optimizer has written weights and state."""
        if not self._running.is_measuring:
            return
        self._scalars.note_rates(optimizer)
        if self._plan.is_due:
            self._events.updated(optimizer)
