"""Digests by rate: few messages one by one, a storm as one now and then."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.report.pipeline import Telling
from sentinel.report.sinks.sink_table import SINKS
from sentinel.report.stages.gather import DigestConfig

from ...support.anomalies import an_incident
from ...support.sink_bench import AT_ONCE, FakeResendingSink, FakeSink, SinkBench

CRITICAL = {"severity": Severity.CRITICAL}
PAGE = {"severity": Severity.CRITICAL, "paged": True}


def storm(bench, num, seconds, at_once=1, **fields):
    """Have `num` incidents open over `seconds`, `at_once` between two looks, and let the worker have every turn it wants."""
    begun, due = bench.now, None
    for first in range(0, num, at_once):
        moment = begun + seconds * first / num
        while due is not None and due < moment:
            bench.now = max(due, bench.now)
            due = bench.turn()
        bench.now = moment
        for number in range(first, min(first + at_once, num)):
            bench.add(None, an_incident(number, **fields))
        due = bench.turn()
    bench.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_runs", "fields"),
    [(8, {}), (1, PAGE), *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, {}), (1, CRITICAL), (8, PAGE)))],
)
def test_two_thousand_onsets_in_five_minutes_are_at_most_three_messages(num_runs, fields):
    bench = SinkBench(FakeSink(digest_after=5), telling=Telling(num_runs=lambda: num_runs))
    storm(bench, 2000, 300.0, at_once=100, **fields)

    assert len(bench.sink.received) <= 3
    told = sorted(alert.incident.id for alerts in bench.sink.received for alert in alerts)
    assert told == sorted(f"i{number}" for number in range(2000))


# What has no `digest_after` of its own groups by itself, or is no one's inbox.
@pytest.mark.parametrize("kind", ["slack", "slack-bot", "email", "discord", "teams"])
@pytest.mark.parametrize("num", [4, 60])
@pytest.mark.parametrize("fields", [{}, PAGE], ids=["warnings", "pages"])
def test_a_storm_that_comes_one_by_one_within_a_minute_is_at_most_three_messages_to_people(kind, num, fields):
    (digest_after,) = [one.default for one in msgspec.structs.fields(SINKS[kind]) if one.name == "digest_after"]
    bench = SinkBench(FakeSink(digest_after=digest_after), telling=Telling())
    storm(bench, num, 60.0, **fields)

    assert len(bench.sink.received) <= 3
    told = sorted(alert.incident.id for alerts in bench.sink.received for alert in alerts)
    assert told == sorted(f"i{number}" for number in range(num))


def test_opening_change_and_end_of_one_incident_are_no_storm():
    bench = SinkBench(FakeSink(digest_after=2))
    before = None
    for revision, fields in ((1, {}), (2, {"severity": Severity.CRITICAL}), (3, {"state": "resolved"})):
        after = an_incident(revision=revision, **fields)
        bench.add(before, after)
        bench.turn()
        bench.now += 1.0
        before = after
    begun = bench.now
    bench.run()

    assert [message[0][1] for message in bench.received()] == ["opened", "raised", "resolved"]
    assert bench.now == begun


def test_one_incident_that_comes_and_goes_without_end_is_a_storm():
    bench = SinkBench(FakeSink(digest_after=2))
    before = None
    for revision in range(1, 60):
        after = an_incident(revision=revision, state="open" if revision % 2 else "resolved")
        bench.add(before, after)
        bench.turn()
        bench.now += 1.0
        before = after
    bench.run()

    assert len(bench.sink.received) <= 3 * 2 + 1


def test_few_messages_come_one_by_one():
    bench = SinkBench(FakeSink(digest_after=5))
    storm(bench, 5, 50.0)

    assert [len(alerts) for alerts in bench.sink.received] == [1] * 5


def test_what_follows_many_messages_is_gathered_and_comes_once_an_interval():
    bench = SinkBench(FakeSink(digest_after=5))
    sent_at = []
    deliver = bench.sink.deliver
    bench.sink.deliver = lambda alerts, now: (sent_at.append(now), deliver(alerts, now))[1]
    storm(bench, 60, 480.0)

    assert [len(alerts) for alerts in bench.sink.received[:5]] == [1] * 5
    digests = sent_at[5:]
    assert len(digests) == 3
    assert all(later - earlier >= 300.0 for earlier, later in itertools.pairwise(digests))


def test_a_page_breaks_through_a_storm_once():
    bench = SinkBench(FakeSink(digest_after=5))
    for number in range(40):
        bench.add(None, an_incident(number))
    bench.turn()
    for number, fields in ((40, {}), (41, PAGE), (42, PAGE), (43, {})):
        bench.now += 1.0
        bench.add(None, an_incident(number, **fields))
        bench.turn()
    bench.run()

    told = [[alert.incident.id for alert in alerts] for alerts in bench.sink.received[1:]]
    assert told == [["i41"], ["i42", "i40", "i43"]]
    assert bench.now >= 1060.0, "the others wait until the storm is over"


def pages_within_a_storm(*opened):
    """Return (seconds since the storm began, incidents) of each message about pages that opened within it.

    opened: (second, run) of each page; one of `first` begins the storm.
    """
    bench = SinkBench(FakeSink(digest_after=5))
    begun, sent = bench.now, []
    deliver = bench.sink.deliver
    bench.sink.deliver = lambda alerts, now: (sent.append((now - begun, alerts)), deliver(alerts, now))[1]
    for number in range(40):
        bench.add(None, an_incident(number, run="first", **(PAGE if number == 0 else {})))
    bench.turn()
    for second in range(5, 300, 5):
        bench.now = begun + second
        bench.add(None, an_incident(1000 + second, run="first"))
        for number, (at, run) in enumerate(opened, 100):
            if at == second:
                bench.add(None, an_incident(number, run=run, **PAGE))
        bench.turn()
    bench.run()
    names = [(second, [alert.incident.id for alert in alerts if alert.is_page]) for second, alerts in sent[1:]]
    return [(second, pages) for second, pages in names if pages]


def test_a_page_of_another_run_breaks_through_a_storm_a_window_later():
    assert pages_within_a_storm((10, "second"), (20, "third")) == [(60.0, ["i100", "i101"])]


def test_further_pages_of_runs_that_somebody_was_paged_for_wait_for_the_digest():
    assert pages_within_a_storm((10, "first"), (140, "first")) == [(300.0, ["i100", "i101"])]
    assert pages_within_a_storm((65, "second"), (140, "second")) == [(65.0, ["i100"]), (300.0, ["i101"])]


def test_a_lasting_incident_without_news_is_two_messages():
    bench = SinkBench(FakeSink(digest_after=5), telling=Telling())
    before = None
    for revision in range(1, 200):
        incident = an_incident(revision=revision, last_step=7 + revision, num_members=revision)
        bench.add(before, incident)
        bench.turn()
        bench.now += 30.0
        before = incident
    bench.add(before, an_incident(revision=200, state="resolved"))
    bench.run()

    assert [message[0][1] for message in bench.received()] == ["opened", "resolved"]


def test_a_sink_that_wants_no_digests_is_sent_none():
    bench = SinkBench(FakeSink(digest_after=0))
    storm(bench, 20, 1.0)

    assert [len(alerts) for alerts in bench.sink.received] == [1] * 20


def test_a_sink_that_groups_by_itself_is_sent_all_that_is_due_at_once_and_waits_for_nothing():
    bench = SinkBench(FakeResendingSink(digest_after=1), telling=AT_ONCE)
    for number in range(30):
        bench.add(None, an_incident(number))
    bench.turn()
    bench.add(None, an_incident(30))
    bench.turn()

    assert [len(alerts) for alerts in bench.sink.received] == [30, 1]


@pytest.mark.parametrize("field", ["window_s", "interval_s"])
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_impossible_windows_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"notify\.digest\.{field} must be in"):
        DigestConfig(**{field: value})
