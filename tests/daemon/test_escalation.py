"""Pages that nobody has acknowledged: who is told next, once, and who hears the end."""

from __future__ import annotations

import pytest

from sentinel.anomaly import Severity
from sentinel.daemon.incident_alerts import IncidentAlerts
from sentinel.errors import ConfigError
from sentinel.incident import Incident, IncidentAct
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.escalation import EscalationStep
from sentinel.report.outbox import MemoryOutbox
from sentinel.report.sinks.sink_table import NotifyConfig
from sentinel.report.sinks.webhook import WebhookConfig
from sentinel.store.journal import Journal

from ..support.anomalies import an_incident
from ..support.sink_bench import FakeSink, SinkBench

STEPS = (EscalationStep(after_s=60.0, sinks=("second",)), EscalationStep(after_s=600.0, sinks=("second", "third")))
ROUTES = [("first", RouteConfig()), ("second", RouteConfig(changes=())), ("third", RouteConfig(changes=()))]
PAGE = {"severity": Severity.CRITICAL, "paged": True}


def alerts_of(journal: Journal) -> IncidentAlerts:
    return IncidentAlerts(journal, ROUTES, steps=STEPS)


def escalated(alerts: IncidentAlerts, now: float) -> list[str]:
    found = alerts.escalations(now)
    alerts.have_escalated(found)
    return [alert.key for alert in found]


def test_each_step_is_due_once(journal: Journal) -> None:
    alerts = alerts_of(journal)
    alerts.take(an_incident(**PAGE), 1000.0)

    assert escalated(alerts, 1059.0) == []
    assert escalated(alerts, 1060.0) == ["second:r:i1:escalated:1"]
    assert escalated(alerts, 1100.0) == []
    assert escalated(alerts, 1600.0) == ["second:r:i1:escalated:2", "third:r:i1:escalated:2"]
    assert escalated(alerts, 9000.0) == []


def test_what_does_not_page_or_is_mild_is_not_escalated(journal: Journal) -> None:
    alerts = alerts_of(journal)
    alerts.take(an_incident(1, severity=Severity.CRITICAL), 1000.0)
    alerts.take(an_incident(2, paged=True), 1000.0)

    assert escalated(alerts, 9000.0) == []


@pytest.mark.parametrize(("until", "expected"), [(0.0, []), (2000.0, ["second:r:i1:escalated:1"])])
def test_an_acknowledgement_stops_it_as_long_as_it_holds(journal: Journal, until: float, expected: list[str]) -> None:
    alerts = alerts_of(journal)
    alerts.take(an_incident(**PAGE), 1500.0)
    ack = IncidentAct(incident="i1", act="ack", who="ana", until=until)
    alerts.take(an_incident(revision=2, acts=(ack,), **PAGE), 1501.0)

    assert escalated(alerts, 1999.0) == []
    assert escalated(alerts, 2001.0) == expected


def test_a_restart_escalates_nothing_twice_and_goes_on(journal: Journal) -> None:
    from sentinel.report.files import json_line
    from sentinel.store.found import FoundIncident
    from sentinel.store.journal import Commit

    alerts = alerts_of(journal)
    incident = an_incident(time=1000.0, **PAGE)
    journal.commit(Commit(judged=1, incidents=[(1, FoundIncident(id="i1", revision=1, body=json_line(incident)))]))
    alerts.take(incident, 1000.0)
    assert len(escalated(alerts, 1060.0)) == 1

    again = alerts_of(journal)

    assert escalated(again, 1100.0) == []
    assert escalated(again, 1600.0) == ["second:r:i1:escalated:2", "third:r:i1:escalated:2"]


def through(sink: str, *batches: list[Alert]) -> list[str]:
    """Return the changes that a sink is told of batches of alerts."""
    bench = SinkBench(FakeSink(), MemoryOutbox(), route=RouteConfig(changes=()))
    bench.sink.name = sink
    for batch in batches:
        bench.outbox.add([alert for alert in batch if alert.sink == sink])
        bench.turn()
    return [alert.change for sent in bench.sink.received for alert in sent]


def history(journal: Journal, *, is_escalated: bool) -> list[list[Alert]]:
    alerts = alerts_of(journal)
    opened: Incident = an_incident(**PAGE)
    first = alerts.take(opened, 1000.0)
    second = alerts.escalations(1060.0) if is_escalated else []
    alerts.have_escalated(second)
    return [first, second, alerts.take(an_incident(revision=2, state="resolved", **PAGE), 1100.0)]


def test_whoever_it_was_escalated_to_is_told_the_end_and_nobody_else(journal: Journal) -> None:
    batches = history(journal, is_escalated=True)

    assert through("second", *batches) == ["escalated", "resolved"]
    assert through("third", *batches) == []


def test_without_an_escalation_the_second_line_is_told_nothing(journal: Journal) -> None:
    assert through("second", *history(journal, is_escalated=False)) == []


def test_an_escalation_that_was_not_sent_before_the_end_is_not_sent(journal: Journal) -> None:
    first, second, end = history(journal, is_escalated=True)

    assert through("second", first, [*second, *end]) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EscalationStep(after_s=0.0, sinks=("a",)), "notify.escalate.after_s must be in (0, 604800], got 0"),
        (lambda: EscalationStep(after_s=1.0, sinks=()), "notify.escalate.sinks must name at least one sink"),
        (
            lambda: NotifyConfig(
                sinks=(WebhookConfig(name="pager", url="http://a"),),
                escalate=(EscalationStep(after_s=1.0, sinks=("pagr",)),),
            ),
            'notify.escalate[0].sinks: unknown sink "pagr"; did you mean "pager"?',
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()

    assert words in str(caught.value)
