"""The window before something is told at first."""

from __future__ import annotations

import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.report.pipeline import Telling
from sentinel.report.stages.hold import HoldConfig

from ...support.anomalies import an_incident
from ...support.sink_bench import FakeSink, SinkBench

CRITICAL = {"severity": Severity.CRITICAL}
SEVERAL = Telling(num_runs=lambda: 2)


def test_the_first_alarm_of_the_only_run_is_told_at_once_and_one_right_behind_it_a_little_later():
    bench = SinkBench(FakeSink(), telling=Telling())
    bench.add(None, an_incident(1, **CRITICAL))
    bench.turn()
    assert bench.received() == [[("i1", "opened")]]

    bench.add(None, an_incident(2, **CRITICAL))

    assert bench.turn() == bench.now + 2.0
    bench.now += 2.0
    bench.turn()
    assert bench.received()[1:] == [[("i2", "opened")]]


@pytest.mark.parametrize(("fields", "hold_s"), [(CRITICAL, 2.0), ({}, 10.0), ({"severity": Severity.INFO}, 10.0)])
def test_what_opens_is_held_by_severity_where_several_runs_are_served(fields, hold_s):
    bench = SinkBench(FakeSink(), telling=SEVERAL)
    bench.add(None, an_incident(severity=Severity.WARNING))
    bench.outbox.rows.clear()
    bench.outbox.rows |= _row(bench, an_incident(**fields))

    assert bench.turn() == 1000.0 + hold_s
    bench.now = 1000.0 + hold_s
    bench.turn()

    assert len(bench.sink.received) == 1


def _row(bench, incident):
    from sentinel.report.alert import Alert
    from sentinel.report.outbox import MemoryRow

    alert = Alert(key="fake:r:i1:1", sink="fake", change="opened", incident=incident, created=bench.now)
    return {1: MemoryRow(position=1, key=alert.key, topic=alert.topic, body=alert.body)}


def test_what_is_over_before_it_was_told_is_told_to_nobody():
    bench = SinkBench(FakeSink(), telling=SEVERAL)
    bench.add(None, an_incident())
    bench.turn()
    bench.now += 5.0
    bench.add(an_incident(), an_incident(revision=2, state="resolved"))
    bench.run()

    assert bench.sink.received == []
    assert bench.outcomes() == ["brief", "brief"]


@pytest.mark.parametrize("fields", [CRITICAL, {"paged": True}])
def test_what_is_critical_or_pages_is_told_though_it_is_over(fields):
    bench = SinkBench(FakeSink(), telling=SEVERAL)
    bench.add(None, an_incident(**fields))
    bench.add(an_incident(**fields), an_incident(revision=2, state="resolved", **fields))
    bench.run()

    assert bench.received() == [[("i1", "resolved")]], "opening and end in one message"
    assert not bench.sink.received[0][0].is_page


def test_changes_and_ends_of_what_was_told_are_not_held():
    bench = SinkBench(FakeSink(), telling=SEVERAL)
    bench.add(None, an_incident())
    bench.run()
    told_at = bench.now
    bench.add(an_incident(), an_incident(revision=2, num_worse=1))
    bench.turn()
    bench.add(an_incident(revision=2, num_worse=1), an_incident(revision=3, state="resolved"))
    bench.turn()

    assert [message[0][1] for message in bench.received()] == ["opened", "worse", "resolved"]
    assert bench.now == told_at


def test_a_daemon_that_ends_holds_nothing_back():
    bench = SinkBench(FakeSink(), telling=SEVERAL)
    bench.add(None, an_incident())
    bench.worker.is_hurried = True
    bench.turn()

    assert bench.received() == [[("i1", "opened")]]


def test_a_clock_set_back_holds_nothing_for_longer():
    bench = SinkBench(FakeSink(), telling=SEVERAL)
    bench.add(None, an_incident())
    bench.now -= 10_000.0
    bench.turn()

    assert bench.received() == [[("i1", "opened")]]


@pytest.mark.parametrize("value", [-1.0, 3601.0, float("nan")])
def test_impossible_holds_are_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"notify\.hold_s\.warning must be in \[0, 3600\], got"):
        HoldConfig(warning=value)
