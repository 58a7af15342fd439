"""Alert: a message about one incident revision to one sink; and the rule that says which revisions are worth one."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incident import CLOSED_STATES, Incident
from sentinel.known_words import near
from sentinel.report.alert_context import AlertContext
from sentinel.report.calendar_hours import Hours

CHANGES: tuple[str, ...] = (
    "opened", "raised", "worse", "refined", "acknowledged", "reopened", "resolved", "settled", "ended", "closed", "merged",
    "escalated",
)  # fmt: skip
"""What may have happened to an incident that people may be notified of."""


class AlikeRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The runs whose incidents are told as one, since they are alike and opened together."""

    runs: tuple[str, ...]
    """Their names, that of the alert's incident first; not all of many."""
    num_runs: int
    num_incidents: int
    num_open: int
    """Incidents that are not over."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What one sink is sent about one revision of one incident."""

    key: str
    """Names this message for ever, `<sink>:<run>:<incident>:<revision>`: the idempotency key."""
    sink: str
    change: str
    """One of CHANGES."""
    incident: Incident
    is_page: bool = False
    """Somebody should get up: said once per incident and sink."""
    was_severity: Severity | None = None
    """Severity that this sink was sent before; None: it was sent nothing yet."""
    was_paged: bool = False
    created: float = 0.0
    """Seconds since the epoch of the judgement."""
    context: AlertContext = AlertContext()
    """What a message says of the incident beside its judgement."""
    follows: bool = False
    """Told only to a sink that was told of the incident before, though its route does not want it."""
    alike: AlikeRuns | None = None
    """The runs that the alert is about; None: that of its incident alone."""
    repeated: bool = False
    """The sink may have received this before: a crash or a lost answer lies between two tries."""

    @property
    def topic(self) -> str:
        """The queue of the outbox that it waits in."""
        return topic(self.sink)

    @property
    def body(self) -> bytes:
        """JSON for the outbox; `Alert.read` takes it back."""
        return msgspec.json.encode(self)

    @staticmethod
    def read(body: bytes) -> Alert:
        """Return the alert that `body` says."""
        return _DECODER.decode(body)

    @property
    def is_closed(self) -> bool:
        """The incident is over."""
        return self.incident.state in CLOSED_STATES


_DECODER = msgspec.json.Decoder(Alert)


def topic(sink: str) -> str:
    """Return the queue of the outbox that alerts to `sink` wait in."""
    return f"alert:{sink}"


class RouteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which incidents and which of their changes a sink is sent."""

    min_severity: Severity = Severity.WARNING
    """Incidents of this severity and above are sent: info, warning, critical."""

    detectors: tuple[str, ...] = ()
    """Incidents that one of these detectors takes part in are sent from `warning` on, whatever min_severity says."""

    changes: tuple[str, ...] = CHANGES
    """Changes that are sent: opened, raised (severity, or a page became due), worse (several times what was sent),
    refined (root, module or diagnosis became known), acknowledged and reopened (by a person), resolved (quiet), settled,
    ended (the run is over), closed (by a person), merged. `escalated` (nobody acknowledged it) goes to the sinks that
    `notify.escalate` names."""

    runs: tuple[str, ...] = ()
    """Globs of the runs that are sent, `nightly-*`; empty: all."""

    labels: dict[str, str] = {}
    """Labels that the run must have -> a glob of the value: `team: nlp`. A label that it has not is the empty text."""

    hours: tuple[str, ...] = ()
    """When it is sent, `Mon-Fri 09:00-18:00 Europe/Berlin`; what opens at other times waits until then, and is sent where it
    is still open. Without days: every day; without a zone: UTC. Empty: always."""

    def __post_init__(self) -> None:
        for text in self.hours:
            Hours(text, "notify.sinks.route.hours")
        for change in self.changes:
            if change not in CHANGES:
                hint = near(change, CHANGES)
                raise ConfigError(f"notify.sinks.route.changes must be among {', '.join(CHANGES)}, got {change!r}{hint}")

    def matches(self, incident: Incident) -> bool:
        """Return whether incidents like this one are sent at all."""
        level = incident.severity.level
        if self.runs and not any(fnmatch.fnmatchcase(incident.run, glob) for glob in self.runs):
            return False
        if level >= self.min_severity.level:
            return True
        return level >= Severity.WARNING.level and not set(self.detectors).isdisjoint(incident.detectors)

    def takes(self, labels: Mapping[str, str]) -> bool:
        """Return whether runs with these labels are sent."""
        return all(fnmatch.fnmatchcase(labels.get(name, ""), glob) for name, glob in self.labels.items())


def change_of(previous: Incident | None, current: Incident, route: RouteConfig) -> str | None:
    """Return what `route` sends about `current`, or None. previous: the revision before; None: it is the first."""
    was_received = previous is not None and previous.state not in CLOSED_STATES and route.matches(previous)
    if previous is None and current.state == "ended":
        # The end of the run is what it tells of: it opens and is over in one revision.
        change = "opened" if route.matches(current) else None
    elif current.state in CLOSED_STATES:
        change = current.state if was_received else None
    elif not route.matches(current):
        change = None
    elif (previous is None or previous.state in CLOSED_STATES) and current.acts and current.acts[-1].act == "reopen":
        change = "reopened"
    elif previous is None or not was_received:
        change = "opened"
    elif current.severity.level > previous.severity.level or (current.paged and not previous.paged):
        change = "raised"
    elif current.num_worse > previous.num_worse:
        change = "worse"
    elif len(current.acts) > len(previous.acts):
        change = "acknowledged"
    elif (current.root, current.module, current.suspected) != (previous.root, previous.module, previous.suspected):
        # Whoever works on it reads the page; the others need not be notified of each step of it.
        change = None if current.acknowledged(current.time) else "refined"
    else:
        change = None
    if change in route.changes:
        return change
    # A sink that is not sent the opening still has to learn of a page.
    return "raised" if change == "opened" and "raised" in route.changes and current.paged else None


def alerts_for(
    previous: Incident | None,
    current: Incident,
    routes: Iterable[tuple[str, RouteConfig]],
    now: float,
    context_of: Callable[[Incident], AlertContext] = lambda incident: AlertContext(),
) -> list[Alert]:
    """Return the alerts that a new revision of an incident is worth, in the order of `routes`.

    Pure: called while judging, so that the alerts are committed with the revision itself. routes: (sink's name, its
    route). now: seconds since the epoch. context_of: returns what messages say beside the judgement; asked where one is
    due.
    """
    alerts: list[Alert] = []
    for sink, route in routes:
        change = change_of(previous, current, route)
        if change is None:
            continue
        context = alerts[0].context if alerts else context_of(current)
        if not route.takes(context.labels):
            continue
        was_received = previous is not None and route.matches(previous)
        was_paged = was_received and previous is not None and previous.paged
        alerts.append(
            Alert(
                key=f"{sink}:{current.run}:{current.id}:{current.revision}",
                sink=sink,
                change=change,
                # Members may be thousands, and no message names them all.
                incident=msgspec.structs.replace(current, members=current.members[:50]),
                is_page=current.paged and not was_paged and (change == "opened" or current.state not in CLOSED_STATES),
                was_severity=previous.severity if was_received and previous is not None else None,
                was_paged=was_paged,
                created=now,
                context=context,
            )
        )
    return alerts


def reports_end(incident: Incident) -> bool:
    """Return whether an incident is over because it is the end of the run that it tells of: that is no resolution."""
    return incident.state == "ended" and "RunEnded" in incident.detectors


def open_alerts(
    incidents: Iterable[Incident],
    sink: str,
    route: RouteConfig,
    now: float,
    context_of: Callable[[Incident], AlertContext] = lambda incident: AlertContext(),
) -> list[Alert]:
    """Return the open incidents that `sink` was notified of, as alerts: what a keep-alive repeats after a restart."""
    return [
        Alert(
            key=f"{sink}:{one.run}:{one.id}:{one.revision}", sink=sink, change="opened", incident=one,
            was_severity=one.severity, was_paged=one.paged, created=now, context=context_of(one),
        )
        for one in incidents
        if one.state not in CLOSED_STATES and route.matches(one)
    ]  # fmt: skip
