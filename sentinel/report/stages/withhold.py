"""Withhold: what people or the calendar do not want to hear now waits, and is told when that is over."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from sentinel.errors import ConfigError
from sentinel.known_words import nearest
from sentinel.report.alert import Alert, reports_end
from sentinel.report.calendar_hours import Hours
from sentinel.report.matchers import Matchers, check_name, values_of
from sentinel.report.silences import Silences
from sentinel.report.stages.pending import Pending, Turn

PHASES = ("init", "train", "eval", "checkpoint")
"""What a trainer may be at, as its heartbeats say."""
PHASE_S = 1.0
"""Seconds after which it is looked again whether a phase is over."""


class Reason(Protocol):
    """Why something may not be told now."""

    outcome: str
    """What becomes of what ended before it could be told: one of `report.metrics.OUTCOMES`."""

    def until(self, alert: Alert, turn: Turn) -> float | None:
        """Return until when an alert is withheld, seconds since the epoch, infinite: nobody knows. None: it is not."""
        ...


class Withhold:
    """Keeps back what there is a reason for. Whoever was told of an incident is told its end all the same."""

    def __init__(self, reason: Reason) -> None:
        self._reason = reason

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return what may be told."""
        kept = []
        for one in pending:
            until = None if one.is_end and one.told is not None else self._reason.until(one.alert, turn)
            if until is None:
                kept.append(one)
            elif one.is_end or (reports_end(one.alert.incident) and self._reason.outcome != "off_hours"):
                turn.settle(one, self._reason.outcome)
            else:
                turn.withheld.update(one.positions)
                turn.wake_at(until)
        return kept


class Silenced:
    """People silenced it."""

    outcome = "silenced"

    def __init__(self, silences: Silences) -> None:
        self._silences = silences

    def until(self, alert: Alert, turn: Turn) -> float | None:
        """Return when the last silence that means an alert runs out."""
        return self._silences.until(alert, turn.now)


class MaintenanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When something is expected to go wrong: what matches is not told, and is told afterwards where it is still open."""

    matchers: tuple[str, ...] = ()
    """`run=~nightly-.*`, `severity=warning`, `host=node7`: all have to hold, as of a silence; none: everything."""

    hours: str = ""
    """Times of days of the week, `Sat-Sun 02:00-06:00 Europe/Berlin`; without days every day, without a zone UTC."""

    begin: datetime.datetime | None = None
    """Once: from then on, `2026-11-24T02:00:00+01:00`. Without an offset: UTC."""

    end: datetime.datetime | None = None
    """Once: until then."""

    phases: tuple[str, ...] = ()
    """While a rank of the run is at one of these: init, train, eval, checkpoint."""

    def __post_init__(self) -> None:
        path = "notify.maintenance"
        Matchers(self.matchers, f"{path}.matchers")
        if self.hours:
            Hours(self.hours, f"{path}.hours")
        for phase in self.phases:
            if phase not in PHASES:
                raise ConfigError(f'{path}.phases: unknown phase "{phase[:80]}"{nearest(phase, PHASES)}')
        if (self.begin is None) is not (self.end is None):
            raise ConfigError(f"{path} must have begin and end together, got one of them")
        if self.begin is not None and self.end is not None and not _seconds(self.begin) < _seconds(self.end):
            raise ConfigError(f"{path}.end must lie behind begin, got {self.end}")
        if sum((bool(self.hours), self.begin is not None, bool(self.phases))) != 1:
            raise ConfigError(f"{path} must have one of hours, begin and end, or phases")


class Maintained:
    """It is expected, by the calendar or by what the trainer is at."""

    outcome = "maintenance"

    def __init__(self, windows: Sequence[MaintenanceConfig], phases_of: Callable[[str], Collection[str]]) -> None:
        """phases_of: run -> what its ranks are at."""
        self._windows = [
            (one, Matchers(one.matchers, "notify.maintenance.matchers"), Hours(one.hours, "hours") if one.hours else None)
            for one in windows
        ]
        self._phases_of = phases_of

    def until(self, alert: Alert, turn: Turn) -> float | None:
        """Return when the last window that means an alert is over."""
        ends = [self._end(one, hours, alert, turn.now) for one, matchers, hours in self._windows if matchers.match(alert)]
        return max((end for end in ends if end is not None), default=None)

    def _end(self, one: MaintenanceConfig, hours: Hours | None, alert: Alert, now: float) -> float | None:
        if hours is not None:
            return hours.until(now)
        if one.begin is not None and one.end is not None:
            return _seconds(one.end) if _seconds(one.begin) <= now < _seconds(one.end) else None
        return now + PHASE_S if not set(one.phases).isdisjoint(self._phases_of(alert.incident.run)) else None


class OffHours:
    """The route is not told at this time."""

    outcome = "off_hours"

    def __init__(self, hours: Sequence[str], path: str) -> None:
        """path: for errors."""
        self._hours = [Hours(text, path) for text in hours]

    def until(self, alert: Alert, turn: Turn) -> float | None:
        """Return when its next hours begin; None: it is within them, or has none."""
        if not self._hours or any(hours.until(turn.now) is not None for hours in self._hours):
            return None
        return min(hours.next(turn.now) for hours in self._hours)


class InhibitRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What need not be told where something else was told that explains it."""

    source: tuple[str, ...]
    """Matchers of what explains: an incident that the sink was told of and that is open, or the end of a run."""

    target: tuple[str, ...]
    """Matchers of what is withheld as long as that is so."""

    equal: tuple[str, ...] = ("run",)
    """Names under which both have the same: run, attempt, host, label.NAME."""

    def __post_init__(self) -> None:
        for name, texts in (("source", self.source), ("target", self.target)):
            if not texts:
                raise ConfigError(f"notify.inhibit.{name} must have at least one matcher, got none")
            Matchers(texts, f"notify.inhibit.{name}")
        for name in self.equal:
            check_name(name, "notify.inhibit.equal")


RUN_ENDED = InhibitRule(
    source=("detector=RunEnded",), target=("detector=~StaleRank|SlowRank", "severity=warning"), equal=("run", "attempt")
)
"""Ranks of a run that ended are silent, and nobody need be told."""


class Inhibited:
    """Something else was told that explains it."""

    outcome = "inhibited"

    def __init__(self, rules: Sequence[InhibitRule]) -> None:
        self._rules = [
            (Matchers(rule.source, "notify.inhibit.source"), Matchers(rule.target, "notify.inhibit.target"), rule.equal)
            for rule in rules
        ]

    def until(self, alert: Alert, turn: Turn) -> float | None:
        """Return infinity where a rule withholds an alert: until what explains it is over."""
        for source, target, equal in self._rules:
            if target.match(alert) and any(
                told.incident.id != alert.incident.id and source.match(told) and _have_equal(told, alert, equal)
                for told in turn.ledger.standing()
            ):
                return math.inf
        return None


def _have_equal(one: Alert, other: Alert, names: Sequence[str]) -> bool:
    return all(list(values_of(one, name)) == list(values_of(other, name)) for name in names)


def _seconds(moment: datetime.datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
