"""All stages together: random schedules of incidents, silences, crashes and answers, and what holds of what was received."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.report.outbox import MemoryOutbox
from sentinel.report.pipeline import Telling
from sentinel.report.silences import SilenceBook, SilenceRequest, Silences
from sentinel.report.sinks.delivery import SENT
from sentinel.report.stages.withhold import RUN_ENDED

from ...support.anomalies import an_incident
from ...support.sink_bench import LATER, LOST, FakeSink, SinkBench


class Killed(BaseException):
    """kill -9."""


class MortalOutbox(MemoryOutbox):
    """May die at each of its writes, before or after it."""

    def __init__(self, rng):
        super().__init__()
        self._rng = rng
        self.chance = 0.03

    def finish_delivery(self, positions, outcome, told=()):
        self._perhaps_die()
        super().finish_delivery(positions, outcome, told)
        self._perhaps_die()

    def _perhaps_die(self):
        if self._rng.random() < self.chance:
            raise Killed


class MoodySink(FakeSink):
    """Answers at random; `received` is what it took, also where its answer was lost."""

    def __init__(self, rng):
        super().__init__(digest_after=5)
        self._rng = rng
        self.is_healthy = False
        self.lost = set()
        """Keys of what it took without an answer."""

    def deliver(self, alerts, now):
        mood = 1.0 if self.is_healthy else self._rng.random()
        if mood < 0.1:
            return LATER
        if mood < 0.15:
            return LOST  # It hung before it took anything.
        self.received.append((now, list(alerts)))
        if mood < 0.2:
            self.lost |= {alert.key for alert in alerts}
            return LOST
        return SENT


class Fleet:
    """Runs whose incidents open, grow and end at random, and the daemon that tells of them."""

    def __init__(self, seed, tmp_path):
        self.rng = random.Random(seed)
        self.book = SilenceBook(tmp_path / str(seed))
        self.telling = Telling(silences=Silences(self.book), inhibit=(RUN_ENDED,), num_runs=lambda: 4)
        self.sink = MoodySink(self.rng)
        self.outbox = MortalOutbox(self.rng)
        self.bench = self._started(1000.0)
        self.open = {}
        self.all = {}
        self.silenced = set()

    def _started(self, now):
        bench = SinkBench(self.sink, self.outbox, telling=self.telling, give_up_after_s=1e9)
        bench.now = now
        return bench

    def live(self, num_events):
        for _ in range(num_events):
            self.let_work(self.bench.now + self.rng.expovariate(1 / 8.0))
            self.rng.choice((self.opens, self.opens, self.grows, self.ends, self.silences))()
        while self.open:
            self.ends()
        self.outbox.chance, self.sink.is_healthy = 0.0, True
        self.let_work(self.bench.now + 20_000.0)

    def let_work(self, until):
        for _ in range(3000):
            try:
                due = self.bench.turn()
            except Killed:
                self.bench = self._started(self.bench.now + 1.0)
                continue
            if due is None or due > until:
                break
            self.bench.now = max(due, self.bench.now)
        else:
            raise AssertionError("never done")
        self.bench.now = max(until, self.bench.now)

    def opens(self):
        number, run = len(self.all), f"r{self.rng.randrange(4)}"
        severity = self.rng.choice((Severity.WARNING, Severity.CRITICAL))
        one = an_incident(
            number, run=run, severity=severity, paged=severity is Severity.CRITICAL and self.rng.random() < 0.5,
            detectors=(self.rng.choice(("AnomalyNan", "LossSpike")),), module=f"blocks.{self.rng.randrange(2)}",
        )  # fmt: skip
        self.becomes(None, one)

    def grows(self):
        if self.open:
            before = self.rng.choice(list(self.open.values()))
            fields = {"num_worse": before.num_worse + 1}
            if self.rng.random() < 0.3:
                fields = {"severity": Severity.CRITICAL, "paged": True}
            self.becomes(before, _next(before, **fields))

    def ends(self):
        if self.open:
            before = self.rng.choice(list(self.open.values()))
            self.becomes(before, _next(before, state=self.rng.choice(("resolved", "settled", "closed"))))

    def silences(self):
        run = f"r{self.rng.randrange(4)}"
        request = SilenceRequest(matchers=(f"run={run}",), why="x", who="y", for_s=self.rng.choice((20.0, 200.0)))
        self.book.add(request.begun(self.bench.now), self.bench.now)
        self.silenced.add(run)

    def becomes(self, before, after):
        self.bench.add(before, after)
        self.all[after.id] = after
        if after.state == "open":
            self.open[after.id] = after
        else:
            self.open.pop(after.id, None)


def _next(incident, **fields):
    return msgspec.structs.replace(incident, revision=incident.revision + 1, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_nothing_is_lost_and_nothing_false_is_told(seed, tmp_path):
    fleet = Fleet(seed, tmp_path)
    fleet.live(60)
    rows = list(fleet.outbox.rows.values())
    messages = [alerts for _, alerts in fleet.sink.received]
    alerts = [alert for message in messages for alert in message]

    assert all(row.outcome for row in rows), "everything comes to an end"
    assert {row.outcome for row in rows} <= {
        "sent", "repeated", "digested", "correlated", "superseded", "brief", "silenced"
    }  # fmt: skip

    news = Counter(alert.key for alert in alerts if not alert.repeated)
    assert max(news.values(), default=0) <= 1, "what is told again says so"
    assert {alert.key for alert in alerts if alert.repeated} >= {
        key for key, number in Counter(alert.key for alert in alerts).items() if number > 1
    }

    assert fleet.sink.lost <= {alert.key for alert in alerts if alert.repeated}, "a repeat has the key of the first"

    received = {"sent", "repeated", "digested", "correlated"}
    told, outcomes = set(), {}
    for row in rows:
        incident, revision = row.key.rsplit(":", 2)[1:]
        outcomes.setdefault(incident, set()).add(row.outcome)
        if row.outcome in received and fleet.all[incident].revision != int(revision):
            told.add(incident)
    for name, last in fleet.all.items():
        is_told = bool(outcomes[name] & received)
        was_silenced = last.run in fleet.silenced
        if last.severity is Severity.CRITICAL and not was_silenced:
            assert is_told, f"{name} was critical"
        if not is_told:
            assert outcomes[name] <= {"brief", "silenced", "superseded"}, name
        if not told & {name} and last.severity is Severity.WARNING:
            assert not outcomes[name] & received, f"nobody was told of {name}, and nobody is told its end"
        if name in told:
            [end] = [row for row in rows if row.key == f"fake:{last.run}:{name}:{last.revision}"]
            assert end.outcome in received, f"the end of {name} reaches whoever was told of it"

    pages = Counter((alert.incident.run, alert.incident.id) for alert in alerts if alert.is_page and not alert.repeated)
    assert max(pages.values(), default=0) <= 1, "nobody is paged twice for the same"


def test_a_schedule_is_the_same_each_time(tmp_path):
    histories = []
    for part in ("a", "b"):
        fleet = Fleet(7, tmp_path / part)
        fleet.live(40)
        histories.append([(now, [alert.key for alert in alerts]) for now, alerts in fleet.sink.received])

    assert histories[0] == histories[1]
