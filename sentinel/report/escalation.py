"""Escalation: who is told next of a page that nobody has acknowledged."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incident import Incident

MAX_AFTER_S = 7 * 86400.0
"""Longest wait; a bound against a typing error that would have nobody told."""


class EscalationStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is told when nobody has acknowledged a page for so long."""

    after_s: float
    """Seconds after the incident paged."""

    sinks: tuple[str, ...]
    """Names of sinks, each told once, whatever its route says. One that hears nothing else has `route: {changes: []}`."""

    min_severity: Severity = Severity.CRITICAL
    """Incidents of this severity and above."""

    def __post_init__(self) -> None:
        if not 0 < self.after_s <= MAX_AFTER_S:
            raise ConfigError(f"notify.escalate.after_s must be in (0, {MAX_AFTER_S:g}], got {self.after_s:g}")
        if not self.sinks:
            raise ConfigError("notify.escalate.sinks must name at least one sink, got none")


def due_steps(steps: Sequence[EscalationStep], incident: Incident, paged_at: float, now: float) -> list[tuple[int, str]]:
    """Return (number of the step, sink) of all that are due, from 1 on; none once a person acknowledged the incident."""
    if not incident.paged or incident.acknowledged(now) is not None:
        return []
    return [
        (number, sink)
        for number, step in enumerate(steps, 1)
        if now - paged_at >= step.after_s and incident.severity.level >= step.min_severity.level
        for sink in step.sinks
    ]
