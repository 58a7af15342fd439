"""Alike incidents of several runs: one page, one update, one end."""

from __future__ import annotations

import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.rank_identity import RankIdentity
from sentinel.report.alert import Alert
from sentinel.report.alert_context import AlertContext
from sentinel.report.pipeline import Telling
from sentinel.report.stages.correlate import CorrelateConfig, traits

from ...support.anomalies import an_incident
from ...support.sink_bench import AT_ONCE, FakeSink, SinkBench

FLEET = Telling(num_runs=lambda: 30)
FAULT = {"severity": Severity.CRITICAL, "paged": True, "detectors": ("AnomalyNan",), "module": "blocks.3"}


def at(bench, moment):
    """Let the worker have all turns that it wants until a moment."""
    while (due := bench.turn()) is not None and due <= moment:
        bench.now = max(due, bench.now)
    bench.now = moment


def told(bench):
    """(change, runs, pages) of each message."""
    return [
        (alert.change, alert.alike.num_runs if alert.alike else 1, alert.is_page)
        for alerts in bench.sink.received
        for alert in alerts
    ]


def test_thirty_runs_that_fail_alike_are_one_page_one_update_and_one_end():
    bench = SinkBench(FakeSink(digest_after=5), telling=FLEET)
    opened = [an_incident(run=f"r{number:02}", **FAULT) for number in range(30)]
    for number, one in enumerate(opened):
        at(bench, 1000.0 + number)
        bench.add(None, one)
    at(bench, 1300.0)

    assert told(bench) == [("opened", 2, True), ("opened", 30, False)]
    first, update = bench.sink.received[0][0], bench.sink.received[1][0]
    assert (first.incident.run, update.incident.run) == ("r00", "r00")
    assert update.alike.runs == tuple(f"r{number:02}" for number in range(20))
    assert update.alike.num_open == 30

    for number, one in enumerate(opened):
        at(bench, 1300.0 + number)
        bench.add(one, an_incident(run=one.run, revision=2, state="resolved", **FAULT))
    at(bench, 2000.0)

    assert told(bench)[2:] == [("resolved", 30, False)]
    assert bench.sink.received[2][0].alike.num_open == 0
    assert bench.worker.num_waiting() == 0


def test_a_message_about_many_says_the_machines_of_the_run_that_it_names():
    bench = SinkBench(FakeSink(), telling=FLEET)
    for number, run in enumerate(("a", "b", "c")):
        at(bench, 1000.0 + 20 * number)
        bench.add(None, an_incident(run=run, **FAULT))
    at(bench, 2000.0)

    alerts = [alert for alerts in bench.sink.received for alert in alerts]
    assert len(alerts) > 1
    assert [(one.incident.run, one.context.job) for one in alerts] == [("a", "job of a")] * len(alerts)


def test_two_runs_that_fail_differently_are_two_messages():
    bench = SinkBench(FakeSink(digest_after=5), telling=FLEET)
    bench.add(None, an_incident(run="a", **FAULT))
    bench.add(None, an_incident(run="b", **(FAULT | {"detectors": ("LossSpike",)})))
    bench.add(None, an_incident(run="c", **(FAULT | {"module": "head"})))
    at(bench, 1200.0)

    assert told(bench) == [("opened", 1, True)] * 3


def test_the_end_of_some_is_told_in_time_though_others_go_on():
    bench = SinkBench(FakeSink(), telling=AT_ONCE)
    opened = [an_incident(run=run, **FAULT) for run in ("a", "b", "c")]
    for one in opened:
        bench.add(None, one)
    at(bench, 2000.0)
    for one in opened[:2]:
        bench.add(one, an_incident(run=one.run, revision=2, state="resolved", **FAULT))
    at(bench, 2050.0)
    assert len(bench.sink.received) == 1, "the third may end too"
    at(bench, 2100.0)

    some = bench.sink.received[1][0]
    assert (some.change, some.alike.num_open, some.is_closed) == ("resolved", 1, False)

    bench.add(opened[2], an_incident(run="c", revision=2, state="resolved", **FAULT))
    at(bench, 2101.0)

    end = bench.sink.received[2][0]
    assert (end.change, end.alike.num_open, end.is_closed, end.incident.run) == ("resolved", 0, True, "a")
    assert bench.worker.num_waiting() == 0


def test_runs_that_page_one_after_the_other_page_once():
    bench = SinkBench(FakeSink(), telling=AT_ONCE)
    mild = FAULT | {"paged": False}
    opened = [an_incident(run=run, **mild) for run in ("a", "b")]
    for one in opened:
        bench.add(None, one)
    at(bench, 1010.0)
    for one in opened:
        bench.add(one, an_incident(run=one.run, revision=2, **FAULT))
        at(bench, bench.now + 1.0)
    at(bench, 1200.0)

    assert told(bench) == [("opened", 2, False), ("raised", 2, True), ("raised", 2, False)]


def test_what_opens_after_the_window_is_told_by_itself_and_pages():
    bench = SinkBench(FakeSink(), telling=AT_ONCE)
    bench.add(None, an_incident(run="a", **FAULT))
    at(bench, 1121.0)
    bench.add(None, an_incident(run="b", **FAULT))
    at(bench, 1300.0)

    assert told(bench) == [("opened", 1, True)] * 2


def test_what_opens_after_the_end_of_the_first_pages_again():
    bench = SinkBench(FakeSink(), telling=AT_ONCE)
    bench.add(None, an_incident(run="a", **FAULT))
    at(bench, 1010.0)
    bench.add(an_incident(run="a", **FAULT), an_incident(run="a", revision=2, state="resolved", **FAULT))
    at(bench, 1020.0)
    bench.add(None, an_incident(run="b", **FAULT))
    at(bench, 1030.0)

    assert told(bench) == [("opened", 1, True), ("resolved", 1, False), ("opened", 1, True)]


def test_incidents_of_one_run_are_told_one_by_one():
    bench = SinkBench(FakeSink(), telling=AT_ONCE)
    for number in range(3):
        bench.add(None, an_incident(number, **FAULT))
    at(bench, 1200.0)

    assert told(bench) == [("opened", 1, True)] * 3


def test_nothing_is_correlated_where_the_window_is_zero():
    bench = SinkBench(FakeSink(), telling=Telling(hold=AT_ONCE.hold, correlate=CorrelateConfig(window_s=0.0)))
    for run in ("a", "b"):
        bench.add(None, an_incident(run=run, **FAULT))
    at(bench, 1200.0)

    assert told(bench) == [("opened", 1, True)] * 2


def test_a_restart_between_page_and_update_pages_nobody_again():
    bench = SinkBench(FakeSink(), telling=AT_ONCE)
    bench.add(None, an_incident(run="a", **FAULT))
    at(bench, 1001.0)
    bench = SinkBench(bench.sink, bench.outbox, telling=AT_ONCE)
    bench.now = 1001.0
    bench.add(None, an_incident(run="b", **FAULT))
    at(bench, 1200.0)

    assert told(bench) == [("opened", 1, True), ("opened", 2, False)]


@pytest.mark.parametrize(
    ("fields", "is_alike"),
    [
        ({}, True),
        ({"severity": Severity.WARNING}, False),
        ({"detectors": ("LossSpike",)}, False),
        ({"module": "head"}, False),
        ({"module": "", "segment": "blocks.3"}, True),
        ({"module": "", "root_name": "blocks.3 (activation) rank 0"}, True),
        ({"module": "", "root_name": "loss (scalar)"}, False),
        ({"module": ""}, False),
        ({"module": "", "host": "node7"}, True),
        ({"module": "", "host": "node8"}, False),
    ],
)
def test_what_is_alike(fields, is_alike):
    def alert(host="node7", **changes):
        incident = an_incident(**(FAULT | changes))
        context = AlertContext(ranks=(RankIdentity(rank=0, host=host),))
        return Alert(key="k", sink="fake", change="opened", incident=incident, context=context)

    shared = set(traits(alert(run="a"))) & set(traits(alert(**({"run": "b", "host": "node9"} | fields))))
    assert bool(shared) is is_alike


@pytest.mark.parametrize(
    ("title", "file_system", "is_alike"),
    [
        ("rank 7 was killed: SIGKILL, step 90", "fe01", True),
        ("rank 7 was killed: SIGKILL, step 90", "fe02", False),
        ("rank 3 raised OSError, step 12", "fe01", False),
    ],
)
def test_runs_that_end_in_the_same_words_on_one_file_system_are_alike(title, file_system, is_alike):
    def alert(title, file_system):
        incident = an_incident(detectors=("RunEnded",), nature="liveness", title=title)
        return Alert(key="k", sink="s", change="opened", incident=incident, context=AlertContext(file_system=file_system))

    first = traits(alert("rank 3 was killed: SIGKILL, step 12", "fe01"))
    assert bool(set(first) & set(traits(alert(title, file_system)))) is is_alike


@pytest.mark.parametrize(("field", "value"), [("window_s", -1.0), ("window_s", float("nan")), ("interval_s", 0.0)])
def test_impossible_windows_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"notify\.correlate\.{field} must be in"):
        CorrelateConfig(**{field: value})
