import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.report.alert import Alert, RouteConfig, alerts_for, change_of, open_alerts
from sentinel.report.alert_context import AlertContext
from sentinel.report.message import facts

from ..support.anomalies import an_incident

INFO, WARNING, CRITICAL = Severity.INFO, Severity.WARNING, Severity.CRITICAL


OPEN = an_incident()


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (None, OPEN, "opened"),
        (None, an_incident(severity=INFO), None),
        (OPEN, an_incident(last_step=9, num_members=50), None),
        (OPEN, an_incident(severity=CRITICAL), "raised"),
        (OPEN, an_incident(paged=True), "raised"),
        (OPEN, an_incident(module="blocks.3.mlp"), "refined"),
        (OPEN, an_incident(suspected="hardware"), "refined"),
        (OPEN, an_incident(state="resolved"), "resolved"),
        (OPEN, an_incident(state="settled"), "settled"),
        (OPEN, an_incident(state="merged"), "merged"),
        (OPEN, an_incident(state="ended"), "ended"),
        (None, an_incident(state="ended"), "opened"),
        (None, an_incident(state="ended", severity=INFO), None),
        (an_incident(severity=INFO), an_incident(severity=INFO, state="resolved"), None),
        (an_incident(severity=INFO), OPEN, "opened"),
        (an_incident(state="resolved"), an_incident(state="resolved", last_step=9), None),
    ],
)
def test_only_changes_that_matter_are_told(before, after, change):
    assert change_of(before, after, RouteConfig()) == change


def test_slack_by_default_hears_loss_spikes_and_critical_incidents():
    route = RouteConfig(min_severity=CRITICAL, detectors=("LossSpike",))

    received = [
        route.matches(an_incident(severity=severity, detectors=detectors))
        for severity in (INFO, WARNING, CRITICAL)
        for detectors in (("LossSpike", "AnomalyNan"), ("AnomalyNan",))
    ]

    assert received == [False, False, True, False, True, True]


def test_an_incident_pages_once_however_it_grows():
    history = [
        OPEN,
        an_incident(revision=2, severity=CRITICAL, paged=True),
        an_incident(revision=3, severity=CRITICAL, paged=True, module="m"),
        an_incident(revision=4, severity=CRITICAL, paged=True, state="resolved"),
        an_incident(revision=5, severity=CRITICAL, paged=True, state="open"),
    ]

    alerts = [
        alert
        for before, after in zip([None, *history], history, strict=False)
        for alert in alerts_for(before, after, [("s", RouteConfig())], now=1.0)
    ]

    assert [(alert.change, alert.is_page) for alert in alerts] == [
        ("opened", False), ("raised", True), ("refined", False), ("resolved", False), ("opened", False),
    ]  # fmt: skip
    assert len({alert.key for alert in alerts}) == 5


def test_an_incident_that_is_the_end_of_its_run_pages_though_it_is_over_at_once():
    died = an_incident(state="ended", severity=CRITICAL, paged=True)

    (alert,) = alerts_for(None, died, [("slack", RouteConfig())], 1.0)

    assert (alert.change, alert.is_page, alert.is_closed) == ("opened", True, True)
    assert open_alerts([died], "slack", RouteConfig(), 1.0) == []


def test_a_sink_not_told_of_openings_still_hears_the_page():
    route = RouteConfig(changes=("raised",))

    assert change_of(None, an_incident(paged=True), route) == "raised"
    assert change_of(None, OPEN, route) is None


def test_an_alert_survives_the_outbox():
    alert = alerts_for(OPEN, an_incident(severity=CRITICAL, revision=2), [("s", RouteConfig())], now=5.0)[0]

    assert Alert.read(alert.body) == alert
    assert alert.was_severity is WARNING
    assert alert.topic == "alert:s"


def test_long_lists_are_cut():
    alert = an_alert_of(an_incident(ranks=tuple(range(100))))

    assert ("ranks", ", ".join(map(str, range(16))) + " and 84 more") in facts(alert)


def test_what_stands_after_a_restart_is_what_was_heard_and_is_open():
    incidents = [OPEN, an_incident(id="i2", severity=INFO), an_incident(id="i3", state="resolved")]

    assert [alert.incident.id for alert in open_alerts(incidents, "am", RouteConfig(), 1.0)] == ["i1"]


def test_an_unknown_change_is_refused_by_name():
    with pytest.raises(ConfigError, match="got 'shut'"):
        RouteConfig(changes=("shut",))


def test_reasons_are_not_mixed_with_facts():
    lines = ("suspected batch: loss 9 at step 12 alone", "suspected batch: to do: skip step 12", "first bad: loss")
    one = an_incident(evidence=lines, suspected="batch", title="loss 9 against 1 at step 12", opened_step=12)
    notified = dict(facts(an_alert_of(one)))

    assert (notified["what to do"], notified["cause"], notified["because"], notified["known"]) == (
        "skip step 12", "batch", "loss 9 at step 12 alone", "first bad: loss",
    )  # fmt: skip


def test_an_unknown_cause_is_said_to_be_unknown():
    lines = ("suspected unknown: one replica alone", "suspected unknown: to do: run it again")
    notified = dict(facts(an_alert_of(an_incident(evidence=lines))))

    assert (notified["what to do"], notified["cause"], notified["because"]) == (
        "run it again",
        "not known",
        "one replica alone",
    )
    assert "cause" not in dict(facts(an_alert_of(an_incident())))


def an_alert_of(incident):
    (alert,) = alerts_for(None, incident, [("slack", RouteConfig())], 0.0)
    return alert


@pytest.mark.parametrize(
    ("globs", "run", "is_sent"),
    [
        ((), "nightly-3", True),
        (("nightly-*",), "nightly-3", True),
        (("nightly-*",), "weekly-3", False),
        (("weekly-*", "nightly-?"), "nightly-3", True),
        (("nightly-?",), "nightly-33", False),
        (("Nightly-*",), "nightly-3", False),
        (("nightly",), "nightly-3", False),
        (("nightly-[0-5]",), "nightly-3", True),
        (("nightly-[",), "nightly-3", False),
    ],
)
def test_a_route_by_run_takes_these_runs_and_no_others(globs, run, is_sent):
    routes = [("some", RouteConfig(runs=globs)), ("all", RouteConfig())]
    opened, over = an_incident(run=run), an_incident(run=run, revision=2, state="resolved")

    told = [[alert.sink for alert in alerts_for(*pair, routes, 1.0)] for pair in ((None, opened), (opened, over))]

    assert told == [["some", "all"] if is_sent else ["all"]] * 2


@pytest.mark.parametrize(
    ("wanted", "labels", "is_sent"),
    [
        ({}, {}, True),
        ({"team": "nlp"}, {"team": "nlp", "tier": "1"}, True),
        ({"team": "nlp"}, {"team": "vision"}, False),
        ({"team": "nlp"}, {}, False),
        ({"team": "nlp"}, {"Team": "nlp"}, False),
        ({"team": "n*", "tier": "[12]"}, {"team": "nlp", "tier": "2"}, True),
        ({"team": "n*", "tier": "[12]"}, {"team": "nlp", "tier": "3"}, False),
        ({"team": ""}, {}, True),
        ({"team": ""}, {"team": "nlp"}, False),
    ],
)
def test_a_route_by_label_takes_runs_with_these_labels_and_no_others(wanted, labels, is_sent):
    routes = [("all", RouteConfig()), ("some", RouteConfig(labels=wanted))]
    opened, over = an_incident(), an_incident(revision=2, state="resolved")

    def context_of(incident):
        return AlertContext(labels=labels)

    told = [
        [alert.sink for alert in alerts_for(*pair, routes, 1.0, context_of)] for pair in ((None, opened), (opened, over))
    ]

    assert told == [["all", "some"] if is_sent else ["all"]] * 2
