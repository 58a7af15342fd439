import itertools

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.report.alert import alerts_for
from sentinel.report.backoff import RetryPolicy
from sentinel.report.notifier import Notifier
from sentinel.report.outbox import MemoryOutbox
from sentinel.report.sample_alert import sample_alert
from sentinel.report.sinks.delivery import SENT, Delivery
from sentinel.report.stages.rate_limit import TokenBucket

from ..support.anomalies import an_incident
from ..support.sink_bench import AT_ONCE, LATER, LOST, NEVER, ROUTES, FakeResendingSink, FakeSink, SinkBench


def test_an_alert_is_sent_once():
    bench = SinkBench(FakeSink())
    bench.add(None, an_incident())
    bench.add(None, an_incident())

    bench.run()
    bench.run()

    assert bench.received() == [[("i1", "opened")]]
    assert bench.outcomes() == ["sent"]
    assert bench.worker.counts["sent"] == 1
    assert bench.worker.num_waiting() == 0


def test_latency_is_counted_from_the_judgement_to_the_answer_that_the_sink_has_it():
    bench = SinkBench(FakeSink([LATER]))
    bench.add(None, an_incident())
    bench.now += 40.0

    bench.turn()
    failed = bench.worker.latency.read()
    bench.run()

    found = bench.worker.latency.read()
    assert failed.cumulative[-1] == 0
    assert found.cumulative[-1] == 1 and 41.0 <= found.sum_s < 60.0
    assert bench.worker.num_requests == 2 and bench.worker.sending_s >= 0


def test_failures_are_retried_with_growing_waits_and_counted():
    bench = SinkBench(FakeSink([LATER, LATER, LATER]))
    bench.add(None, an_incident())
    times = []

    for _ in range(4):
        times.append(bench.now)
        bench.now = bench.turn() or bench.now

    waits = [after - before for before, after in itertools.pairwise(times)]
    assert [1.0 <= wait <= 1.1 for wait in waits[:1]] == [True]
    assert waits == sorted(waits)
    assert waits[2] >= 4.0
    assert bench.worker.counts["retried"] == 3
    assert bench.outcomes() == ["sent"]
    assert [alerts[0].repeated for alerts in bench.sink.received] == [False] * 4


def test_the_servers_own_wish_is_honoured():
    bench = SinkBench(FakeSink([Delivery(outcome="retry", retry_after_s=37.0)]))
    bench.add(None, an_incident())

    due = bench.turn()

    assert due == pytest.approx(bench.now + 37.0)
    assert bench.worker.turn(bench.now + 36.0) == due
    assert len(bench.sink.received) == 1
    bench.worker.turn(due)
    assert bench.outcomes() == ["sent"]


def test_a_refusal_is_permanent():
    bench = SinkBench(FakeSink([NEVER]))
    bench.add(None, an_incident())

    bench.run()

    assert bench.outcomes() == ["failed"]
    assert bench.worker.counts["failed"] == 1
    assert len(bench.sink.received) == 1


def test_after_kill_9_a_repeat_is_marked():
    outbox = MemoryOutbox()
    before = SinkBench(FakeSink([KeyboardInterrupt()]), outbox)
    before.add(None, an_incident())
    with pytest.raises(KeyboardInterrupt):
        before.turn()

    after = SinkBench(FakeSink(), outbox)
    after.run()

    assert [[alert.repeated for alert in alerts] for alerts in after.sink.received] == [[True]]
    assert after.outcomes() == ["repeated"]


def test_a_lost_answer_makes_the_next_try_a_repeat():
    bench = SinkBench(FakeSink([LOST]))
    bench.add(None, an_incident())

    bench.run()

    assert [alerts[0].repeated for alerts in bench.sink.received] == [False, True]


def test_only_the_newest_word_on_an_incident_is_sent():
    bench = SinkBench(FakeSink())
    raised = an_incident(revision=2, severity=Severity.CRITICAL, paged=True)
    refined = an_incident(revision=3, severity=Severity.CRITICAL, paged=True, module="m")
    bench.add(None, an_incident())
    bench.add(an_incident(), raised)
    bench.add(raised, refined)

    bench.run()

    assert bench.received() == [[("i1", "opened")]]
    assert bench.sink.received[0][0].is_page
    assert bench.sink.received[0][0].incident.module == "m"
    assert sorted(bench.outcomes()) == ["sent", "superseded", "superseded"]


def test_a_storm_becomes_a_digest():
    bench = SinkBench(FakeSink(digest_after=5))
    for number in range(40):
        bench.add(None, an_incident(number))

    bench.run()

    assert [len(alerts) for alerts in bench.sink.received] == [40]
    assert bench.worker.counts["digested"] == 40


def test_pages_go_first():
    bench = SinkBench(FakeSink())
    bench.add(None, an_incident(1))
    bench.add(None, an_incident(2, severity=Severity.CRITICAL))
    bench.add(None, an_incident(3, severity=Severity.CRITICAL, paged=True))

    bench.run()

    assert [alerts[0].incident.id for alerts in bench.sink.received] == ["i3", "i2", "i1"]


def test_one_alert_that_a_sink_cannot_stomach_holds_up_no_other():
    class Picky(FakeSink):
        def deliver(self, alerts, now):
            super().deliver(alerts, now)
            return LATER if any(alert.incident.id == "i0" for alert in alerts) else SENT

    bench = SinkBench(Picky(), give_up_after_s=100.0)
    for number in range(3):
        bench.add(None, an_incident(number))

    bench.run()

    assert bench.outcomes() == ["expired", "sent", "sent"]


def test_a_digest_that_is_refused_is_tried_one_by_one():
    class Picky(FakeSink):
        def deliver(self, alerts, now):
            super().deliver(alerts, now)
            return NEVER if any(alert.incident.id == "i0" for alert in alerts) else SENT

    bench = SinkBench(Picky(digest_after=2))
    for number in range(4):
        bench.add(None, an_incident(number))

    bench.run()

    assert bench.outcomes() == ["failed", "sent", "sent", "sent"]


def test_the_rate_is_limited():
    bench = SinkBench(FakeSink(), rate_per_s=1.0)
    for number in range(10):
        bench.add(None, an_incident(number))
    start = bench.now

    bench.run()

    assert len(bench.sink.received) == 10
    assert bench.now - start >= 6.9


def test_what_waits_is_bounded_and_pages_are_kept():
    bench = SinkBench(FakeSink([LATER]), max_pending=10)
    bench.add(None, an_incident(0, severity=Severity.CRITICAL, paged=True))
    for number in range(1, 30):
        bench.add(None, an_incident(number))

    bench.run()

    assert bench.worker.counts["dropped"] == 20
    assert bench.outcomes()[0] == "sent"
    assert bench.outcomes()[1:21] == ["dropped"] * 20


def test_a_sink_that_raises_is_tried_again():
    bench = SinkBench(FakeSink([RuntimeError("bug")]))
    bench.add(None, an_incident())

    bench.run()

    assert bench.outcomes() == ["repeated"]


def test_an_outcome_the_disk_refused_is_not_a_second_message():
    class Flaky(MemoryOutbox):
        is_full = True

        def finish_delivery(self, positions, outcome, told=()):
            if self.is_full:
                raise OSError("disk full")
            super().finish_delivery(positions, outcome, told)

    bench = SinkBench(FakeSink(), Flaky())
    bench.add(None, an_incident())
    with pytest.raises(OSError, match="disk full"):
        bench.turn()
    with pytest.raises(OSError, match="disk full"):
        bench.turn()

    bench.outbox.is_full = False
    bench.run()

    assert len(bench.sink.received) == 1
    assert bench.outcomes() == ["sent"]


def test_a_row_that_is_no_alert_is_failed_and_said():
    bench = SinkBench(FakeSink())
    bench.add(None, an_incident())
    bench.outbox.rows[1].body = b"{}"

    bench.run()

    assert bench.outcomes() == ["failed"]


def test_a_clock_set_back_does_not_silence_a_sink():
    bench = SinkBench(FakeSink([LATER]))
    bench.add(None, an_incident())
    bench.turn()

    bench.now -= 10_000.0
    bench.run()

    assert bench.outcomes() == ["sent"]


def test_sinks_that_resend_are_told_what_is_open_in_a_run_as_long_as_it_is_served():
    class Runs(MemoryOutbox):
        served = ("r", "s")

        def told(self, topic):
            bodies = super().told(topic)
            return [body for body in bodies if msgspec.json.decode(body)["alert"]["incident"]["run"] in self.served]

    before = SinkBench(FakeResendingSink(digest_after=1), Runs())
    for run in ("r", "s"):
        before.add(None, an_incident(run=run))
    before.add(None, an_incident(2))
    before.turn()
    before.add(an_incident(2), an_incident(2, revision=2, state="resolved"))
    before.turn()

    after = SinkBench(FakeResendingSink(), before.outbox)
    found = []
    for after.outbox.generation, after.outbox.served in enumerate((("r",), ("r", "s"), ("s",)), 1):
        after.turn()
        found.append([(alert.incident.run, alert.incident.id) for alert in after.sink.open_alerts])

    assert found == [[("r", "i1")], [("r", "i1"), ("s", "i1")], [("s", "i1")]]
    assert after.sink.received == [], "nobody hears of it as news"


def test_what_was_sent_is_repeated_in_time_though_nothing_new_comes():
    class Remembering(FakeResendingSink):
        def keep_alive(self, now):
            return None, now + 1.0 if self.received else None

    bench = SinkBench(Remembering())
    bench.outbox.add(alerts_for(None, an_incident(), ROUTES, 5.0))

    assert bench.worker.turn(5.0) == 6.0
    assert len(bench.sink.received) == 1


def test_a_bucket_refills_at_its_rate():
    bucket = TokenBucket(0.5, burst=1)

    assert bucket.wait_s(0.0) == 0.0
    bucket.take()
    assert bucket.wait_s(0.0) == pytest.approx(2.0)
    assert bucket.wait_s(1.0) == pytest.approx(1.0)
    assert bucket.wait_s(2.0) == 0.0


def test_the_notifier_counts_every_outcome_of_every_sink_from_the_start():
    notifier = Notifier(MemoryOutbox(), [FakeSink()], RetryPolicy(), clock=lambda: 0.0)

    assert set(notifier.counts().values()) == {0}
    assert notifier.pending() == {"fake": 0}
    assert notifier.close()


def test_a_delivery_that_does_not_come_back_is_told_while_it_lasts():
    class Stuck(FakeSink):
        def deliver(self, alerts, now):
            notified.append(notifier.problems())
            clock[0] += 75.0
            notified.append(notifier.problems())
            return SENT

    notified, clock = [], [1000.0]
    notifier = Notifier(MemoryOutbox(), [Stuck()], RetryPolicy(), clock=lambda: clock[0], telling=AT_ONCE)
    worker = notifier.workers["fake"]
    worker._outbox.add(alerts_for(None, an_incident(), ROUTES, 1000.0))

    worker.turn(1000.0)

    assert notified == [{}, {"fake": "a delivery has been under way for 75 s"}]
    assert notifier.problems() == {}


def test_a_keep_alive_that_works_again_ends_the_problem():
    class Forgetful(FakeResendingSink):
        def keep_alive(self, now):
            return self.answers.pop(0), now + 60.0

    bench = SinkBench(Forgetful([LATER, SENT]))

    problems = []
    for _ in range(2):
        bench.turn()
        problems.append(bench.worker.problem)

    assert problems == ["HTTP 500", ""]


def test_threads_send_what_was_queued_and_end_when_told():
    outbox, sink = MemoryOutbox(), FakeSink()
    notifier = Notifier(outbox, [sink], RetryPolicy(), clock=lambda: 5.0, telling=AT_ONCE)
    notifier.start()

    outbox.add([sample_alert("fake", 5.0)])
    notifier.wake()
    _wait_until_sent(notifier, 1)

    assert notifier.close()
    assert len(sink.received) == 1


def test_a_sink_that_took_a_message_is_sent_the_next_one_without_a_rest(monkeypatch):
    monkeypatch.setattr("sentinel.report.notifier.PAUSE_PER_TURN", 1e12)
    monkeypatch.setattr("sentinel.report.notifier.MAX_PAUSE_S", 1e6)
    outbox, sink = MemoryOutbox(), FakeSink()
    notifier = Notifier(outbox, [sink], RetryPolicy(), clock=lambda: 5.0, telling=AT_ONCE)
    outbox.add([sample_alert("fake", 5.0)])
    notifier.start()
    _wait_until_sent(notifier, 1)

    outbox.add([sample_alert("fake", 6.0)])
    notifier.wake()
    _wait_until_sent(notifier, 2)

    assert notifier.close()
    assert len(sink.received) == 2


def _wait_until_sent(notifier, number):
    for _ in range(1000):
        if notifier.counts()["fake", "sent"] >= number:
            return
        notifier._threads[0].join(0.005)
