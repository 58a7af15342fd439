"""IncidentAlerts: which revisions of a run's incidents are news to which sink."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from sentinel.anomaly import Severity
from sentinel.incident import Incident
from sentinel.report.alert import Alert, RouteConfig, alerts_for, open_alerts, topic
from sentinel.report.alert_context import AlertContext
from sentinel.report.escalation import EscalationStep, due_steps
from sentinel.report.stages.ledger import Ledger, Told, thread_of, where_of
from sentinel.store.journal import Journal
from sentinel.store.outbox_table import ToldIncident

log = logging.getLogger("sentinel.daemon")

MAX_INCIDENTS = 10_000
"""Newest incidents among which open ones are looked for after a restart; a bound on memory and on the time to start."""

UNTOLD_FACT = "untold"
"""The journal's word for revisions that a repair made, of which nobody was notified: a JSON list of `Untold`."""

TOLD_FACT = "told"
"""The journal's word for that it notes what sinks were told: one of an earlier version, or one that was rebuilt, did not."""

ESCALATED_FACT = "escalated"
"""The journal's word for the escalations of open incidents that are in the outbox, or were."""

SINKS_FACT = "sinks"
"""The journal's word for the sinks that were notified of this run up to now: a JSON list of names."""

_EVERYTHING = RouteConfig(min_severity=Severity.INFO)
_ESCALATED = msgspec.json.Decoder(dict[str, list[tuple[int, str]]])
_NAMES = msgspec.json.Decoder(list[str])
_INCIDENT = msgspec.json.Decoder(Incident)


class Untold(msgspec.Struct, frozen=True, kw_only=True):
    """A revision that a repair made."""

    before: Incident | None
    """The revision that people were notified of before; None: there is none."""
    now: Incident
    is_maybe_told: bool = False
    """What was sent of it before cannot be read any more: it is sent as a repeat."""


_UNTOLD = msgspec.json.Decoder(list[Untold])


class IncidentAlerts:
    """Knows the newest revision of every open incident, as the journal has it."""

    def __init__(
        self,
        journal: Journal,
        routes: Sequence[tuple[str, RouteConfig]],
        context_of: Callable[[Incident], AlertContext] = lambda incident: AlertContext(),
        steps: Sequence[EscalationStep] = (),
    ) -> None:
        """routes: (sink, what it wants). context_of: what messages say of an incident beside its judgement. steps: who is
        told next of a page."""
        self._journal = journal
        self.steps = steps
        """Who is told next of a page, from now on."""
        self.routes = routes
        """(sink, what it wants), from the next revision on."""
        self._context_of = context_of
        incidents = map(_INCIDENT.decode, journal.found.newest_incidents(MAX_INCIDENTS))
        self._open = {incident.id: incident for incident in incidents if incident.state == "open"}
        self._escalated = _ESCALATED.decode(journal.values.get(ESCALATED_FACT) or "{}")
        """Id of an open incident -> (number of the step, sink) of those that were told."""
        self._paged_at = {name: self._first_page(name) for name, incident in self._open.items() if incident.paged}
        if journal.values.get(TOLD_FACT) is None:
            self._take_over()
            journal.values.put(TOLD_FACT, "yes")
        kept = journal.values.get(SINKS_FACT)
        self._sinks = {name for name, _ in routes} if kept is None else set(_NAMES.decode(kept))
        """Those that were told of what is open, or were not meant to be."""

    def take(self, incident: Incident, now: float) -> list[Alert]:
        """Take in a new revision and return what is to be sent of it. now: seconds since the epoch."""
        previous = self._open.get(incident.id)
        alerts = alerts_for(previous, incident, self.routes, now, self._context_of)
        told = {alert.sink for alert in alerts}
        also = {sink: _EVERYTHING for _, sink in self._escalated.get(incident.id, ()) if sink not in told}
        more = alerts_for(previous, incident, also.items(), now, self._context_of)
        alerts += [msgspec.structs.replace(alert, follows=True, is_page=False) for alert in more]
        if previous is None or incident.state != "open":
            _log_revision(incident, is_first=previous is None)
        if incident.state == "open":
            self._open[incident.id] = incident
            if incident.paged:
                self._paged_at.setdefault(incident.id, now)
        else:
            self._open.pop(incident.id, None)
            self._paged_at.pop(incident.id, None)
        return alerts

    def escalations(self, now: float) -> list[Alert]:
        """Return what is to be sent of pages that nobody acknowledged; `have_escalated` says that it is in the outbox."""
        return [
            Alert(
                key=f"{sink}:{incident.run}:{name}:escalated:{number}", sink=sink, change="escalated", is_page=True,
                incident=msgspec.structs.replace(incident, members=incident.members[:50]), created=now,
                context=self._context_of(incident),
            )
            for name, incident in (self._open.items() if self.steps else ())
            for number, sink in due_steps(self.steps, incident, self._paged_at.get(name, now), now)
            if (number, sink) not in self._escalated.get(name, ())
        ]  # fmt: skip

    def have_escalated(self, alerts: Sequence[Alert]) -> None:
        """Note that escalations are in the outbox: each is sent once, also after a restart."""
        for alert in alerts:
            step = (int(alert.key.rpartition(":")[2]), alert.sink)
            self._escalated.setdefault(alert.incident.id, []).append(step)
        self._escalated = {name: steps for name, steps in self._escalated.items() if name in self._open}
        self._journal.values.put(ESCALATED_FACT, msgspec.json.encode(self._escalated).decode())

    def newcomers(self, now: float) -> list[Alert]:
        """Return what is open, for sinks that were not there when it opened; `have_met` says that it is in the outbox.

        now: seconds since the epoch.
        """
        found: list[Alert] = []
        for sink, route in self.routes:
            if sink in self._sinks:
                continue
            known = Ledger()
            known.load(self._journal.outbox.told(topic(sink)))
            for incident in self._open.values():
                for alert in alerts_for(None, incident, [(sink, route)], now, self._context_of):
                    if known.get(where_of(alert)) is None:
                        is_page = alert.is_page and not incident.acknowledged(now)
                        found.append(msgspec.structs.replace(alert, is_page=is_page))
        return found

    def have_met(self) -> None:
        """Note that every sink of now was told of what is open."""
        names = {name for name, _ in self.routes}
        if names != self._sinks or self._journal.values.get(SINKS_FACT) is None:
            self._sinks = names
            self._journal.values.put(SINKS_FACT, msgspec.json.encode(sorted(names)).decode())

    def _first_page(self, incident: str) -> float:
        revisions = map(_INCIDENT.decode, self._journal.found.incident_revisions(incident))
        return min((one.time for one in revisions if one.paged), default=time.time())

    def untold(self, now: float) -> list[tuple[Alert, bool]]:
        """Return what is to be sent of the revisions that a repair made, and whether it may have been sent before.

        now: seconds since the epoch.
        """
        made = _UNTOLD.decode(self._journal.values.get(UNTOLD_FACT) or "[]")
        return [
            (alert, one.is_maybe_told)
            for one in made
            for alert in alerts_for(one.before, one.now, self.routes, now, self._context_of)
        ]

    def have_told(self) -> None:
        """Forget the revisions that a repair made: what is to be sent of them is in the outbox."""
        self._journal.values.put(UNTOLD_FACT, "[]")

    def _take_over(self) -> None:
        """Note that sinks were told of what is open and waits no more in the outbox, as far as a repair did not make it."""
        now, outbox = time.time(), self._journal.outbox
        made = _UNTOLD.decode(self._journal.values.get(UNTOLD_FACT) or "[]")
        known = self._open | {one.now.id: one.before for one in made}
        known_before = [incident for incident in known.values() if incident is not None]
        for sink, route in self.routes:
            waiting = {row.key for row in outbox.waiting(topic(sink), math.inf, MAX_INCIDENTS)}
            ledger = Ledger()
            ledger.load(outbox.told(topic(sink)))
            for alert in open_alerts(known_before, sink, route, now):
                if alert.key not in waiting and ledger.get(where_of(alert)) is None:
                    where = where_of(alert)
                    told = Told(alert=alert, thread=thread_of(where), first=alert.incident.time, last=now)
                    row = ToldIncident(position=0, topic=topic(sink), incident=where[1], over=0.0, body=told.body)
                    outbox.finish_delivery([], "sent", [row])


def _log_revision(incident: Incident, *, is_first: bool) -> None:
    """Log that an incident opened, or how it closed."""
    event = "opened" if is_first and incident.state == "open" else incident.state
    fields = {
        "event": f"incident.{event}", "run": incident.run, "incident": incident.id, "severity": incident.severity.value,
        "title": incident.title, "step": incident.opened_step,
    }  # fmt: skip
    words = "run %s: incident %s %s: %s: %s"
    log.info(words, incident.run, incident.id, event, incident.severity.value, incident.title, extra={"fields": fields})
