"""Hold: a short window before an incident is told at first, in which what belongs together comes together."""

from __future__ import annotations

import math

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.report.stages.pending import Pending, Turn

MAX_HOLD_S = 3600.0
"""Longest hold; a bound against a typing error that would keep alarms back."""


class HoldConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds for which what opens is held before it is told, by severity; 0: not at all."""

    critical: float = 2.0
    """Of critical incidents, where the daemon serves several runs, or the sink was sent something less than so long ago: the
    first alarm of the only run is told at once."""

    warning: float = 10.0
    """Of warnings. What ends within it is told to nobody, unless it is critical or pages."""

    info: float = 10.0
    """Of everything else."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value <= MAX_HOLD_S:
                raise ConfigError(f"notify.hold_s.{name} must be in [0, {MAX_HOLD_S:g}], got {value:g}")

    def of(self, severity: Severity) -> float:
        """Return the seconds for which an incident of a severity is held."""
        return {Severity.CRITICAL: self.critical, Severity.WARNING: self.warning}.get(severity, self.info)


class Hold:
    """Holds what opens. Where more than `storm` are held, all go with the first of them, since they go as one message."""

    def __init__(self, config: HoldConfig, storm: int) -> None:
        """storm: the sink's `digest_after`; 0: what is held never goes together."""
        self._config = config
        self._storm = storm

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return what was held for long enough, and what needs no hold: changes and ends of what was told."""
        released: list[Pending] = []
        held: list[Pending] = []
        for one in pending:
            (released if one.told is not None or one.is_end or self._is_over(one, turn) else held).append(one)
        is_storm = 0 < self._storm < len(released) + len(held)
        if is_storm and any(one.told is None for one in released):
            return pending
        return released

    def _is_over(self, one: Pending, turn: Turn) -> bool:
        severity = one.alert.incident.severity
        begun = one.since
        if severity is Severity.CRITICAL and turn.num_runs <= 1:
            begun = turn.last_sent if turn.last_sent <= turn.now else -math.inf
        return turn.is_due(begun, self._config.of(severity))
