"""Silences, maintenance, hours and inhibition: what waits, what is told afterwards, and what is told all the same."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.report.alert import RouteConfig
from sentinel.report.pipeline import Telling
from sentinel.report.silences import Silence, SilenceBook, Silences
from sentinel.report.stages.withhold import RUN_ENDED, InhibitRule, MaintenanceConfig

from ...support.anomalies import an_incident
from ...support.sink_bench import AT_ONCE, FakeResendingSink, FakeSink, SinkBench

HOLD = AT_ONCE.hold
CRITICAL = {"severity": Severity.CRITICAL, "paged": True}


def moment(seconds):
    return datetime.fromtimestamp(seconds, UTC)


@pytest.fixture(params=["silenced", "maintenance", "off_hours"])
def withheld(request, tmp_path):
    """(bench whose run `r` is withheld from 1000 to 1600, outcome of what ended meanwhile)."""
    route = RouteConfig()
    if request.param == "silenced":
        book = SilenceBook(tmp_path)
        silence = Silence(id="s1", matchers=("run=r",), who="ana", why="known", begun=0.0, until=1600.0)
        book.add(silence, 1000.0)
        telling = Telling(hold=HOLD, silences=Silences(book))
    elif request.param == "maintenance":
        window = MaintenanceConfig(matchers=("run=r",), begin=moment(900.0), end=moment(1600.0))
        telling = Telling(hold=HOLD, maintenance=(window,))
    else:
        route, telling = RouteConfig(hours=("00:27-00:20",)), Telling(hold=HOLD)
    bench = SinkBench(FakeSink(), telling=telling, route=route)
    if request.param == "off_hours":
        bench.now = 1260.0  # 00:21
    return bench, request.param


def test_what_is_withheld_is_told_once_afterwards_in_its_newest_words(withheld):
    bench, _ = withheld
    bench.add(None, an_incident(**CRITICAL))
    due = bench.turn()
    bench.add(an_incident(**CRITICAL), an_incident(revision=2, num_worse=1, **CRITICAL))
    bench.turn()
    assert bench.sink.received == [] and bench.worker.num_sendable() == 0
    assert bench.worker.num_withheld == 2

    assert due in (1600.0, 1620.0)
    bench.run()

    assert bench.received() == [[("i1", "opened")]]
    assert bench.sink.received[0][0].is_page and bench.sink.received[0][0].incident.num_worse == 1
    assert bench.now == due
    # The sink did not keep it waiting.
    assert bench.worker.latency.read().sum_s < 60.0 and bench.worker.num_withheld == 0


def test_what_ended_unsaid_is_told_to_nobody_whatever_it_was(withheld):
    bench, outcome = withheld
    bench.add(None, an_incident(**CRITICAL))
    bench.turn()
    bench.add(an_incident(**CRITICAL), an_incident(revision=2, state="resolved", **CRITICAL))
    bench.run()

    assert bench.sink.received == []
    assert bench.outcomes() == [outcome] * 2


def test_whoever_was_told_before_is_told_the_end(withheld):
    bench, _ = withheld
    bench.turn()
    bench.worker._ledger.note(_told(an_incident(**CRITICAL)))
    bench.add(an_incident(**CRITICAL), an_incident(revision=2, num_worse=1, **CRITICAL))
    bench.turn()
    assert bench.sink.received == [], "changes wait"

    bench.add(an_incident(revision=2, **CRITICAL), an_incident(revision=3, state="resolved", **CRITICAL))
    bench.turn()

    assert bench.received() == [[("i1", "resolved")]]
    assert set(bench.outcomes()) == {"sent", "superseded"}


def _told(incident):
    from sentinel.report.alert import Alert
    from sentinel.report.stages.ledger import Told

    alert = Alert(key="fake:r:i1:0", sink="fake", change="opened", incident=incident)
    return Told(alert=alert, thread=f"{incident.run}:{incident.id}", first=0.0, last=0.0)


def test_what_is_not_meant_is_told_at_once(withheld):
    bench, outcome = withheld
    bench.add(None, an_incident(run="other", **CRITICAL))
    bench.turn()

    assert bool(bench.sink.received) is (outcome != "off_hours")


def test_a_silence_that_is_ended_lets_what_it_held_go(tmp_path):
    book = SilenceBook(tmp_path)
    book.add(Silence(id="s1", matchers=("run=r",), who="ana", why="known", begun=0.0, until=9000.0), 1000.0)
    bench = SinkBench(FakeSink(), telling=Telling(hold=HOLD, silences=Silences(book)))
    bench.add(None, an_incident())
    bench.turn()
    book.end("s1", "bob", 1100.0)
    bench.now = 1101.0
    bench.turn()

    assert bench.received() == [[("i1", "opened")]]


def test_a_silence_of_days_outlives_what_gives_up(tmp_path):
    book = SilenceBook(tmp_path)
    book.add(Silence(id="s1", matchers=("run=r",), who="ana", why="known", begun=0.0, until=400_000.0), 1000.0)
    bench = SinkBench(FakeSink(), telling=Telling(hold=HOLD, silences=Silences(book)), give_up_after_s=86400.0)
    bench.add(None, an_incident())
    bench.run()

    assert bench.received() == [[("i1", "opened")]]
    assert bench.now == 400_000.0


def test_an_alertmanager_goes_on_to_be_sent_what_it_was_sent_and_nothing_that_is_silenced(tmp_path):
    book = SilenceBook(tmp_path)
    bench = SinkBench(FakeResendingSink(digest_after=1), telling=Telling(hold=HOLD, silences=Silences(book)))
    bench.add(None, an_incident(1))
    bench.turn()
    book.add(Silence(id="s1", matchers=("run=r",), who="ana", why="known", begun=0.0, until=9000.0), 1000.0)
    bench.add(None, an_incident(2))
    bench.turn()

    again = SinkBench(FakeResendingSink(digest_after=1), bench.outbox, telling=Telling(hold=HOLD, silences=Silences(book)))
    again.turn()

    assert [alert.incident.id for alert in again.sink.open_alerts] == ["i1"]
    assert again.sink.received == []


def test_maintenance_by_phase_lasts_as_long_as_a_rank_is_at_it():
    phases = {"r": {"train", "eval"}}
    window = MaintenanceConfig(phases=("eval", "checkpoint"))
    bench = SinkBench(FakeSink(), telling=Telling(hold=HOLD, maintenance=(window,), phases_of=lambda run: phases[run]))
    bench.add(None, an_incident())
    assert bench.turn() == bench.now + 1.0

    phases["r"] = {"train"}
    bench.run()

    assert bench.received() == [[("i1", "opened")]]


ENDED = {"severity": Severity.CRITICAL, "detectors": ("RunEnded",), "state": "ended"}


def test_ranks_of_a_run_that_ended_are_silent_and_nobody_is_told():
    bench = SinkBench(FakeSink(), telling=Telling(hold=HOLD, inhibit=(RUN_ENDED,)))
    bench.add(None, an_incident(1, **ENDED))
    bench.turn()
    for number, fields in ((2, {}), (3, {"run": "other"}), (4, {"attempt": 1}), (5, {"severity": Severity.CRITICAL})):
        bench.add(None, an_incident(number, **({"detectors": ("StaleRank",)} | fields)))
    bench.run()
    silent = {"detectors": ("StaleRank",)}
    bench.add(an_incident(2, **silent), an_incident(2, revision=2, state="ended", **silent))
    bench.run()

    assert sorted(alert.incident.id for alerts in bench.sink.received for alert in alerts) == ["i1", "i3", "i4", "i5"]
    assert bench.outcomes()[1] == "inhibited"


def test_what_was_inhibited_is_told_when_what_explained_it_is_over():
    rule = InhibitRule(source=("severity=critical",), target=("severity=warning",), equal=("run",))
    bench = SinkBench(FakeSink(), telling=Telling(hold=HOLD, inhibit=(rule,)))
    critical = {"severity": Severity.CRITICAL}
    bench.add(None, an_incident(1, **critical))
    bench.turn()
    bench.add(None, an_incident(2))
    bench.turn()
    assert len(bench.sink.received) == 1

    bench.add(an_incident(1, **critical), an_incident(1, revision=2, state="resolved", **critical))
    bench.run()

    assert bench.received()[1:] == [[("i1", "resolved")], [("i2", "opened")]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "must have one of hours, begin and end, or phases"),
        ({"hours": "09:00-10:00", "phases": ("eval",)}, "must have one of"),
        ({"phases": ("evla",)}, 'unknown phase "evla"; did you mean "eval"?'),
        ({"begin": moment(0.0)}, "begin and end together"),
        ({"begin": moment(10.0), "end": moment(5.0)}, "end must lie behind begin"),
        ({"hours": "whenever"}, "notify.maintenance.hours must be like"),
        (
            {"phases": ("eval",), "matchers": ("hots=x",)},
            'notify.maintenance.matchers: unknown name "hots"; did you mean "host"?',
        ),
    ],
)
def test_impossible_windows_are_refused_by_name(fields, words):
    with pytest.raises(ConfigError) as caught:
        MaintenanceConfig(**fields)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": ()}, "notify.inhibit.source must have at least one matcher"),
        ({"target": ("x",)}, "notify.inhibit.target: expected NAME=VALUE"),
        ({"equal": ("rnu",)}, 'notify.inhibit.equal: unknown name "rnu"; did you mean "run"?'),
    ],
)
def test_impossible_inhibitions_are_refused_by_name(fields, words):
    with pytest.raises(ConfigError) as caught:
        InhibitRule(**({"source": ("run=a",), "target": ("run=b",)} | fields))

    assert words in str(caught.value)
