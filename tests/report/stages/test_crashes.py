"""A process that dies between the beginning of a delivery and its end, at each of its writes."""

from __future__ import annotations

import pytest

from sentinel.anomaly import Severity
from sentinel.report.outbox import MemoryOutbox

from ...support.anomalies import an_incident
from ...support.sink_bench import LATER, LOST, FakeSink, SinkBench

FAULT = {"severity": Severity.CRITICAL, "paged": True, "detectors": ("AnomalyNan",), "module": "blocks.3"}


class Killed(BaseException):
    """kill -9."""


class KilledOutbox(MemoryOutbox):
    """Dies at its n-th finish, before or after that is written."""

    def __init__(self, left=0, *, is_written=False):
        super().__init__()
        self.left, self.is_written = left, is_written

    def finish_delivery(self, positions, outcome, told=()):
        if self.left < 0:
            super().finish_delivery(positions, outcome, told)
            return
        self.left -= 1
        if self.left >= 0 or self.is_written:
            super().finish_delivery(positions, outcome, told)
        if self.left < 0:
            raise Killed


def restarted(bench, **options):
    again = SinkBench(bench.sink, bench.outbox, **options)
    again.now = bench.now + 1.0
    return again


def received(bench):
    return [[(alert.key, alert.change, alert.repeated, alert.is_page) for alert in alerts] for alerts in bench.sink.received]


def test_a_repeat_has_the_key_and_the_words_of_the_first_and_newer_words_follow():
    bench = SinkBench(FakeSink(), KilledOutbox())
    bench.add(None, an_incident(**FAULT))
    with pytest.raises(Killed):
        bench.turn()
    bench.add(an_incident(**FAULT), an_incident(revision=2, num_worse=1, **FAULT))
    restarted(bench).run()

    assert received(bench) == [
        [("fake:r:i1:1", "opened", False, True)],
        [("fake:r:i1:1", "opened", True, True)],
        [("fake:r:i1:2", "worse", False, False)],
    ]
    assert bench.sink.received[0][0].incident == bench.sink.received[1][0].incident


def test_an_end_that_came_meanwhile_is_told_under_its_own_key():
    bench = SinkBench(FakeSink(), KilledOutbox())
    bench.add(None, an_incident(**FAULT))
    with pytest.raises(Killed):
        bench.turn()
    bench.add(an_incident(**FAULT), an_incident(revision=2, state="resolved", **FAULT))
    restarted(bench).run()

    assert [[one[:3] for one in message] for message in received(bench)] == [
        [("fake:r:i1:1", "opened", False)],
        [("fake:r:i1:1", "opened", True)],
        [("fake:r:i1:2", "resolved", False)],
    ]


def test_a_digest_is_repeated_as_it_was_though_more_waits():
    bench = SinkBench(FakeSink(digest_after=2), KilledOutbox())
    for number in range(4):
        bench.add(None, an_incident(number))
    with pytest.raises(Killed):
        bench.turn()
    bench.add(None, an_incident(4))
    restarted(bench).run()

    first, repeat, rest = ([alert.key for alert in alerts] for alerts in bench.sink.received)
    assert sorted(first) == sorted(repeat) == [f"fake:r:i{number}:1" for number in range(4)]
    assert rest == ["fake:r:i4:1"]
    assert all(alert.repeated for alert in bench.sink.received[1])


def test_alike_runs_are_repeated_as_they_were_told():
    bench = SinkBench(FakeSink(), KilledOutbox())
    for run in ("a", "b", "c"):
        bench.add(None, an_incident(run=run, **FAULT))
    with pytest.raises(Killed):
        bench.turn()
    restarted(bench).run()

    first, repeat = received(bench)
    assert [one[:2] for one in first] == [one[:2] for one in repeat]
    assert bench.sink.received[1][0].alike == bench.sink.received[0][0].alike
    assert bench.outcomes() == ["repeated"] * 3


def test_a_message_of_several_runs_of_which_one_knows_that_it_was_received_is_not_repeated():
    bench = SinkBench(FakeSink(), KilledOutbox(is_written=True))
    for run in ("a", "b", "c"):
        bench.add(None, an_incident(run=run, **FAULT))
    with pytest.raises(Killed):
        bench.turn()
    again = restarted(bench)
    again.run()
    for run in ("a", "b", "c"):
        again.add(an_incident(run=run, **FAULT), an_incident(run=run, revision=2, state="resolved", **FAULT))
    again.run()

    assert [message[0][1:3] for message in received(bench)] == [("opened", False), ("resolved", False)]
    assert again.worker.num_waiting() == 0


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("left", range(6))
def test_wherever_it_dies_only_what_is_marked_is_told_twice(left, is_written):
    bench = SinkBench(FakeSink(digest_after=2), KilledOutbox(left, is_written=is_written))
    history = [an_incident(number, run=run, **FAULT) for number in range(2) for run in ("a", "b")]
    for one in history:
        bench.add(None, one)
        bench.add(one, an_incident(int(one.id[1:]), run=one.run, revision=2, num_worse=1, **FAULT))
    for _ in range(2):
        try:
            bench.run()
        except Killed:
            bench = restarted(bench)
        for one in history:
            bench.add(one, an_incident(int(one.id[1:]), run=one.run, revision=3, state="resolved", **FAULT))
    bench.run()

    said = [(alert.key, alert.change) for alerts in bench.sink.received for alert in alerts if not alert.repeated]
    assert len(said) == len(set(said))
    keys = {alert.key for alerts in bench.sink.received for alert in alerts if not alert.repeated}
    assert all(alert.key in keys for alerts in bench.sink.received for alert in alerts if alert.repeated)
    assert bench.worker.num_waiting() == 0


def test_a_try_that_was_certainly_not_received_is_free_to_be_superseded():
    bench = SinkBench(FakeSink([LATER]))
    bench.add(None, an_incident(**FAULT))
    bench.turn()
    bench.add(an_incident(**FAULT), an_incident(revision=2, num_worse=1, **FAULT))
    restarted(bench).run()

    assert received(bench)[1:] == [[("fake:r:i1:2", "opened", False, True)]]


def test_a_digest_that_nobody_answers_is_broken_up_in_the_end():
    class Poisoned(FakeSink):
        def deliver(self, alerts, now):
            super().deliver(alerts, now)
            return LOST if any(alert.incident.id == "i0" for alert in alerts) else None or self.sent

    bench = SinkBench(Poisoned(digest_after=2), give_up_after_s=100.0)
    bench.sink.sent = FakeSink().deliver([], 0.0)
    for number in range(4):
        bench.add(None, an_incident(number))
    bench.run()

    assert bench.outcomes() == ["expired", "repeated", "repeated", "repeated"]
    assert len({tuple(alert.key for alert in alerts) for alerts in bench.sink.received[:3]}) == 1
