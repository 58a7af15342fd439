"""A sink that is there only since an incident opened: it is told of what is open, once."""

from __future__ import annotations

from sentinel.anomaly import Severity
from sentinel.daemon.incident_alerts import SINKS_FACT, IncidentAlerts
from sentinel.incident import Incident, IncidentAct
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.files import json_line
from sentinel.store.found import FoundIncident
from sentinel.store.journal import Commit, Journal
from sentinel.store.outbox_table import Outgoing

from ..support.anomalies import an_incident

OLD, NEW = ("old", RouteConfig()), ("new", RouteConfig())
PAGE = {"severity": Severity.CRITICAL, "paged": True}


def opened(journal: Journal, *incidents: Incident) -> IncidentAlerts:
    """Return what a daemon with one sink knows that had these incidents."""
    alerts = IncidentAlerts(journal, [OLD])
    for seq, incident in enumerate(incidents, 1):
        found = FoundIncident(id=incident.id, revision=incident.revision, body=json_line(incident))
        journal.commit(Commit(judged=seq, incidents=[(seq, found)]))
        alerts.take(incident, 1000.0)
    alerts.have_met()
    return alerts


def met(alerts: IncidentAlerts, now: float = 2000.0) -> list[tuple[str, str, str]]:
    """Return (sink, incident, change) of what newcomers are told now."""
    found = alerts.newcomers(now)
    alerts.have_met()
    return [(one.sink, one.incident.id, one.change) for one in found]


def test_it_is_told_of_what_is_open_once_and_those_before_it_of_nothing(journal: Journal) -> None:
    alerts = opened(
        journal, an_incident(1, **PAGE), an_incident(2, **PAGE), an_incident(2, revision=2, state="resolved", **PAGE)
    )
    alerts.routes = [OLD, NEW]

    assert met(alerts) == [("new", "i1", "opened")]
    assert met(alerts) == []


def test_a_daemon_that_starts_with_it_says_so_too(journal: Journal) -> None:
    opened(journal, an_incident(1, **PAGE))

    assert met(IncidentAlerts(journal, [OLD, NEW])) == [("new", "i1", "opened")]
    assert met(IncidentAlerts(journal, [OLD, NEW])) == []


def test_what_its_route_does_not_take_it_is_not_told(journal: Journal) -> None:
    alerts = opened(journal, an_incident(1, severity=Severity.WARNING))
    quiet, elsewhere = RouteConfig(changes=()), RouteConfig(runs=("nightly-*",))
    alerts.routes = [OLD, ("new", RouteConfig(min_severity=Severity.CRITICAL)), ("second", quiet), ("third", elsewhere)]

    assert met(alerts) == []


def test_somebody_works_on_it_already_so_nobody_is_paged(journal: Journal) -> None:
    ack = IncidentAct(incident="i1", act="ack", who="ana", until=0.0)
    alerts = opened(journal, an_incident(1, **PAGE), an_incident(1, revision=2, acts=(ack,), **PAGE), an_incident(2, **PAGE))
    alerts.routes = [OLD, NEW]

    assert {one.incident.id: one.is_page for one in alerts.newcomers(2000.0)} == {"i1": False, "i2": True}


def test_one_that_was_away_hears_what_it_does_not_know(journal: Journal) -> None:
    alerts = opened(journal, an_incident(1, **PAGE))
    alerts.routes = [OLD, NEW]
    told: list[Alert] = alerts.newcomers(2000.0)
    journal.commit(Commit(judged=1, outbox=[Outgoing(key=one.key, topic=one.topic, body=one.body) for one in told]))
    alerts.have_met()
    alerts.routes = [OLD]
    assert met(alerts) == []
    alerts.take(an_incident(2, **PAGE), 1500.0)
    alerts.routes = [OLD, NEW]

    again = alerts.newcomers(2500.0)

    assert "i2" in [one.incident.id for one in again]
    # What it was sent before has the same key, and is queued once.
    assert {one.key for one in again if one.incident.id == "i1"} <= {one.key for one in told}


def test_a_journal_that_never_noted_its_sinks_repeats_nothing(journal: Journal) -> None:
    found = FoundIncident(id="i1", revision=1, body=json_line(an_incident(1, **PAGE)))
    journal.commit(Commit(judged=1, incidents=[(1, found)]))
    assert journal.values.get(SINKS_FACT) is None

    assert met(IncidentAlerts(journal, [OLD, NEW])) == []
    assert met(IncidentAlerts(journal, [OLD, NEW, ("third", RouteConfig())])) == [("third", "i1", "opened")]
