"""A worker of a sink that writes down what it is sent, its outbox, and a clock that jumps to the next turn."""

import random

from sentinel.report.alert import RouteConfig, alerts_for
from sentinel.report.alert_context import AlertContext
from sentinel.report.backoff import RetryPolicy
from sentinel.report.outbox import MemoryOutbox
from sentinel.report.pipeline import SinkWorker, Telling
from sentinel.report.sinks.delivery import SENT, Delivery
from sentinel.report.stages.hold import HoldConfig

ROUTES = [("fake", RouteConfig())]
LATER = Delivery(outcome="retry", detail="HTTP 500")
LOST = Delivery(outcome="retry", detail="no answer", is_unknown=True)
NEVER = Delivery(outcome="failed", detail="HTTP 404")


AT_ONCE = Telling(hold=HoldConfig(critical=0.0, warning=0.0, info=0.0))


class FakeSink:
    name = "fake"
    max_batch = 5000

    def __init__(self, answers=(), digest_after=0):
        self.answers = list(answers)
        self.digest_after = digest_after
        self.received = []

    def deliver(self, alerts, now):
        self.received.append(list(alerts))
        answer = self.answers.pop(0) if self.answers else SENT
        if isinstance(answer, BaseException):
            raise answer
        return answer


class FakeResendingSink(FakeSink):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.open_alerts = []

    def restore(self, open_alerts):
        self.open_alerts += open_alerts

    def release(self, run):
        self.open_alerts = [alert for alert in self.open_alerts if alert.incident.run != run]

    def keep_alive(self, now):
        return None, now + 60.0


class SinkBench:
    """A worker, its outbox, and a clock that jumps to when the worker wants its next turn."""

    def __init__(self, sink, outbox=None, rate_per_s=1000.0, telling=AT_ONCE, route=None, **policy):
        self.sink = sink
        self.outbox = outbox or MemoryOutbox()
        self.worker = SinkWorker(
            self.outbox,
            sink,
            RetryPolicy(**policy),
            rate_per_s=rate_per_s,
            rng=random.Random(0),
            telling=telling,
            route=route,
        )
        self.now = 1000.0

    def add(self, before, after):
        def context_of(incident):
            return AlertContext(job=f"job of {incident.run}")

        self.outbox.add(alerts_for(before, after, ROUTES, self.now, context_of))

    def turn(self):
        return self.worker.turn(self.now)

    def run(self, max_turns=1000):
        for _ in range(max_turns):
            due = self.turn()
            if due is None:
                return
            self.now = max(due, self.now)
        raise AssertionError("never done")

    def outcomes(self):
        return [row.outcome for row in self.outbox.rows.values()]

    def received(self):
        return [[(alert.incident.id, alert.change) for alert in alerts] for alerts in self.sink.received]
