"""From the outbox to people: plain stages a sink, each in a thread of its own, never in the way of judging.

    waiting rows -> expire -> supersede (one message an incident) -> bound -> group (one, or a digest when it storms)
                 -> rate-limit -> send -> done, or again later

The outbox is durable and the rows are committed with the judgement, so nothing is lost by a crash. A row is counted as
begun before its request leaves: after kill -9 a sink without an idempotency key may receive one repeat, marked `repeated`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import msgspec

from sentinel.errors import MALFORMED
from sentinel.report.alert import Alert, topic
from sentinel.report.durations import DurationCounts
from sentinel.report.message import worst_first
from sentinel.report.metrics import OUTCOMES
from sentinel.report.outbox import Outbox, WaitingAlert
from sentinel.report.sinks.delivery import Delivery, ResendingSink, Sink, checked

FOREVER = 1e12
"""A time that lies behind every due time, seconds since the epoch."""
READ_LIMIT = 5000
"""Most rows taken from the outbox at once; a bound on memory."""
BURST = 3
"""Messages that a sink may be sent at once after a quiet time. Too small: a fault's second message waits; too large: the
server refuses them (Slack allows short bursts of one a second)."""

STUCK_AFTER_S = 60.0
"""Seconds after which a delivery under way is a problem of its sink: requests over HTTP are cut off long before."""

LATENCY_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0)
"""Buckets of what passes between a judgement and a sink's answer: a quarter of a second is meant, an outage takes longer."""

ALONE_AFTER = 3
"""Failures after which a message is sent by itself. Too small: one outage breaks digests up; too large: a message that the
server refuses holds back the others of its digest."""

_log = logging.getLogger(__name__)


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How hard a sink is tried; the fields are those of NotifyConfig."""

    retry_s: float = 1.0
    max_retry_s: float = 60.0
    give_up_after_s: float = 86400.0
    max_pending: int = 1000


class TokenBucket:
    """Allows `rate_per_s` on average and `burst` at once. The clock is handed in and may be set back."""

    def __init__(self, rate_per_s: float, burst: int = BURST) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._tokens = float(burst)
        self._then: float | None = None

    def wait_s(self, now: float) -> float:
        """Return the seconds until one may pass; 0: now."""
        if self._then is not None:
            self._tokens = min(self._burst, self._tokens + max(now - self._then, 0.0) * self._rate_per_s)
        self._then = now
        # An epsilon, because 1 s at 0.1 steps must be worth a whole token.
        return 0.0 if self._tokens >= 1.0 - 1e-9 else (1.0 - self._tokens) / self._rate_per_s

    def take(self) -> None:
        """Let one pass."""
        self._tokens -= 1.0


class Pending(msgspec.Struct, kw_only=True):
    """One message to send, and the rows of the outbox that it settles."""

    alert: Alert
    positions: list[int]
    """Its own row first."""
    is_maybe_received: bool = False
    num_failures: int = 0


class SinkWorker:
    """All stages of one sink. `turn` does what is due and returns when it wants the next turn; no thread, no clock.

    rate_per_s: most requests a second on average. rng: spreads retries of many daemons.
    """

    def __init__(
        self, outbox: Outbox, sink: Sink, policy: RetryPolicy, *, rate_per_s: float = 1.0, rng: random.Random
    ) -> None:
        self.sink = sink
        self._handed: SimpleQueue[Callable[[ResendingSink], None]] = SimpleQueue()
        """What other threads want of a sink that resends; done by the thread that delivers."""
        self._resending = sink if isinstance(sink, ResendingSink) else None
        """The sink, where it forgets what it was sent: what is open is sent again, and it takes no digests."""
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.problem = ""
        """Why the last request failed; empty after one that did not."""
        self.latency = DurationCounts(LATENCY_BOUNDS_S)
        """From the judgement of an alert to the sink's answer that it has it."""
        self.num_keep_alives = 0
        """Times that open incidents were sent again."""
        self.sending_s = 0.0
        """Seconds spent in requests, answered or not."""
        self.num_requests = 0
        self.busy_since: float | None = None
        """When the delivery under way began, seconds since the epoch; None: there is none."""
        self._outbox = outbox
        self._policy = policy
        self._bucket = TokenBucket(rate_per_s)
        self._rng = rng
        self._took_s = 0.0
        """Seconds that the newest request took."""
        self._num_failures_in_a_row = 0
        self._blocked_until = 0.0
        self._blocked_at = 0.0
        self._failures: dict[int, int] = {}
        self._known_tries: dict[int, int] = {}
        """Position -> tries begun by this process that the sink certainly did not receive."""
        self._unfinished: dict[int, str] = {}
        """Position -> outcome that the outbox could not yet write down: never sent again meanwhile."""

    def turn(self, now: float) -> float | None:
        """Send what is due. Return the time of the next turn; None: when something new waits. Raises only what the
        outbox raises."""
        self._finish_unfinished()
        self._take_handed()
        due = self._keep_alive(now)
        blocked = self._blocked(now)
        if blocked is not None:
            return _earlier(blocked, due)
        pending = self._bound(self._supersede(self._expire(self._read(), now)))
        if not pending:
            return due
        wait = self._bucket.wait_s(now)
        if wait > 0:
            return _earlier(now + wait, due)
        batch = self._group(pending)
        self._bucket.take()
        self._send(batch, now)
        due = self._keep_alive(now)  # What was sent just now may have to be repeated sooner than anything before.
        is_more = len(batch) < len(pending) or bool(self._failures)
        return _earlier(self._blocked(now) or now, due) if is_more else due

    def num_waiting(self) -> int:
        """Return how many rows of this sink have no outcome."""
        return max(self._outbox.num_waiting(topic(self.sink.name)) - len(self._unfinished), 0)

    def restore(self, open_alerts: Sequence[Alert]) -> None:
        """Hand a sink that resends what is open in a run that is served from now on. Called from any thread."""
        mine = [alert for alert in open_alerts if alert.sink == self.sink.name]
        self._handed.put(lambda sink: sink.restore(mine))

    def release(self, run: str) -> None:
        """Have a sink that resends forget the alerts of a run that is served no more. Called from any thread."""
        self._handed.put(lambda sink: sink.release(run))

    # Stages, in order.

    def _read(self) -> list[Pending]:
        # Due times in the outbox are for people; asking without them keeps an older row from being overtaken.
        rows = self._outbox.waiting(topic(self.sink.name), FOREVER, READ_LIMIT)
        alive = {row.position for row in rows}
        for memory in (self._failures, self._known_tries):
            for position in [position for position in memory if position not in alive]:
                del memory[position]
        return [one for row in rows if row.position not in self._unfinished and (one := self._parse(row)) is not None]

    def _parse(self, row: WaitingAlert) -> Pending | None:
        try:
            alert = Alert.read(row.body)
        except MALFORMED as error:
            _log.error("sink %s: outbox row %d is no alert: %s", self.sink.name, row.position, error)
            self._finish([row.position], "failed")
            return None
        return Pending(
            alert=alert,
            positions=[row.position],
            is_maybe_received=row.tries > self._known_tries.get(row.position, 0),
            num_failures=self._failures.get(row.position, 0),
        )

    def _expire(self, pending: list[Pending], now: float) -> list[Pending]:
        old = [one for one in pending if now - one.alert.created > self._policy.give_up_after_s]
        if old:
            self._finish([position for one in old for position in one.positions], "expired")
        return [one for one in pending if now - one.alert.created <= self._policy.give_up_after_s]

    def _supersede(self, pending: list[Pending]) -> list[Pending]:
        # Only the newest word about an incident is worth sending, but it inherits what was due: a page stays a page,
        # and labels that were sent must still be taken back.
        newest: dict[tuple[str, str], Pending] = {}
        for one in pending:
            where = (one.alert.incident.run, one.alert.incident.id)
            older = newest.pop(where, None)
            if older is not None:
                change = "opened" if older.alert.change == "opened" and not one.alert.is_closed else one.alert.change
                one.alert = msgspec.structs.replace(
                    one.alert,
                    change=change,
                    is_page=(one.alert.is_page or older.alert.is_page) and not one.alert.is_closed,
                    was_severity=older.alert.was_severity,
                    was_paged=older.alert.was_paged,
                )
                one.positions = one.positions + older.positions
                one.is_maybe_received = one.is_maybe_received or older.is_maybe_received
            newest[where] = one
        return list(newest.values())

    def _bound(self, pending: list[Pending]) -> list[Pending]:
        excess = len(pending) - self._policy.max_pending
        if excess <= 0:
            return pending
        dropped = sorted(pending, key=lambda one: (one.alert.is_page, one.positions[0]))[:excess]
        self._finish([position for one in dropped for position in one.positions], "dropped")
        _log.error("sink %s: %d alerts dropped, more than %d waited", self.sink.name, excess, self._policy.max_pending)
        gone = {one.positions[0] for one in dropped}
        return [one for one in pending if one.positions[0] not in gone]

    def _group(self, pending: list[Pending]) -> list[Pending]:
        # What failed before goes last, so that one message which a sink cannot stomach holds up no other.
        order = {alert.key: place for place, alert in enumerate(worst_first([one.alert for one in pending]))}
        ready = sorted(pending, key=lambda one: (one.num_failures, order[one.alert.key]))
        together = [one for one in ready if one.num_failures < ALONE_AFTER]
        is_storm = 0 < self.sink.digest_after < len(together)
        return together[: self.sink.max_batch] if is_storm else ready[:1]

    def _send(self, batch: list[Pending], now: float) -> None:
        heads = [one.positions[0] for one in batch]
        self._outbox.begin_delivery(heads)
        alerts = [msgspec.structs.replace(one.alert, repeated=one.is_maybe_received) for one in batch]
        delivery = self._deliver(alerts, now)
        if delivery.outcome == "sent":
            self.problem = ""
            self._num_failures_in_a_row = 0
            for one in batch:
                self.latency.observe(now + self._took_s - one.alert.created)
                is_digest = len(batch) > 1 and self._resending is None
                outcome = "repeated" if one.is_maybe_received else "digested" if is_digest else "sent"
                self._failures.pop(one.positions[0], None)
                self._finish(one.positions[:1], outcome)
                self._finish(one.positions[1:], "superseded")
            return
        self.problem = delivery.detail
        if delivery.outcome == "failed" and len(batch) > 1:
            # One of them may have spoilt it for all: each gets its own chance.
            self.counts["retried"] += len(batch)
            self._failures.update(dict.fromkeys(heads, ALONE_AFTER))
            self._known_tries.update({one.positions[0]: self._known_tries.get(one.positions[0], 0) + 1 for one in batch})
            return
        if delivery.outcome == "failed":
            _log.error("sink %s: gave up %d alerts: %s", self.sink.name, len(batch), delivery.detail)
            for position in heads:
                self._failures.pop(position, None)
            self._finish([position for one in batch for position in one.positions], "failed")
            return
        self.counts["retried"] += len(batch)
        for position in heads:
            self._failures[position] = self._failures.get(position, 0) + 1
            if not delivery.is_unknown:
                self._known_tries[position] = self._known_tries.get(position, 0) + 1
        self._back_off(delivery, now)
        self._outbox.postpone_delivery(heads, self._blocked_until)

    def _deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        self.busy_since = now
        begun = time.monotonic()
        try:
            return checked(self.sink.deliver(alerts, now))
        except Exception as error:  # A sink of somebody else's must not end the thread, nor lose its alerts.
            _log.exception("sink %s: raised", self.sink.name)
            return Delivery(outcome="retry", detail=f"{type(error).__name__}", is_unknown=True)
        finally:
            self.busy_since = None
            self._took_s = time.monotonic() - begun
            self.sending_s += self._took_s
            self.num_requests += 1

    def _take_handed(self) -> None:
        while not self._handed.empty():
            take = self._handed.get()
            if self._resending is not None:
                take(self._resending)

    def _keep_alive(self, now: float) -> float | None:
        if self._resending is None:
            return None
        delivery, due = self._resending.keep_alive(now)
        if delivery is not None and delivery.outcome == "sent":
            self.problem = ""
            self.num_keep_alives += 1
        elif delivery is not None:
            self.problem = delivery.detail
            self.counts["retried"] += 1
            _log.warning("sink %s: open incidents could not be sent again: %s", self.sink.name, delivery.detail)
        return due

    def _back_off(self, delivery: Delivery, now: float) -> None:
        self._num_failures_in_a_row += 1
        wait = min(self._policy.retry_s * 2 ** min(self._num_failures_in_a_row - 1, 30), self._policy.max_retry_s)
        wait *= 1.0 + 0.1 * self._rng.random()
        wait = max(wait, delivery.retry_after_s or 0.0)
        self._blocked_at, self._blocked_until = now, now + wait
        _log.warning("sink %s: next try in %.1f s: %s", self.sink.name, wait, delivery.detail)

    def _blocked(self, now: float) -> float | None:
        # A clock that was set back must not block for longer than was meant.
        return self._blocked_until if self._blocked_at <= now < self._blocked_until else None

    def _finish(self, positions: Sequence[int], outcome: str) -> None:
        self.counts[outcome] += len(positions)
        self._unfinished.update(dict.fromkeys(positions, outcome))
        self._finish_unfinished()

    def _finish_unfinished(self) -> None:
        for outcome in sorted(set(self._unfinished.values())):
            positions = [position for position, one in self._unfinished.items() if one == outcome]
            self._outbox.finish_delivery(positions, outcome)
            for position in positions:
                del self._unfinished[position]


class Notifier:
    """A thread for each sink, so that one which hangs delays no other.

    clock: seconds since the epoch. rates: sink's name -> most requests a second.
    """

    def __init__(
        self,
        outbox: Outbox,
        sinks: Sequence[Sink],
        policy: RetryPolicy,
        *,
        clock: Callable[[], float],
        rates: dict[str, float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        rng = rng or random.Random()
        self.workers = {
            sink.name: SinkWorker(outbox, sink, policy, rate_per_s=(rates or {}).get(sink.name, 10.0), rng=rng)
            for sink in sinks
        }
        self._clock = clock
        self._wakes = {name: threading.Event() for name in self.workers}
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    def start(self) -> None:
        """Start the threads."""
        for name in self.workers:
            thread = threading.Thread(target=self._run, args=(name,), name=f"sentinel-sink-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def restore(self, open_alerts: Sequence[Alert]) -> None:
        """Say what is open in a run that is served from now on, as `report.alert.open_alerts` has it."""
        for worker in self.workers.values():
            worker.restore(open_alerts)
        self.wake()

    def release(self, run: str) -> None:
        """Say that a run is served no more: what is open there is another daemon's to repeat."""
        for worker in self.workers.values():
            worker.release(run)

    def wake(self) -> None:
        """Say that something new waits; called after each commit that put rows into the outbox. Never blocks."""
        for wake in self._wakes.values():
            wake.set()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop after the requests under way; True when every thread ended in time. What waits stays in the outbox."""
        self._is_closing = True
        self.wake()
        for thread in self._threads:
            thread.join(timeout_s / max(len(self._threads), 1))
        return not any(thread.is_alive() for thread in self._threads)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return (sink, outcome) -> number, zeros included: `MetricsSnapshot.notifications`."""
        return {(name, outcome): worker.counts[outcome] for name, worker in self.workers.items() for outcome in OUTCOMES}

    def pending(self) -> dict[str, int]:
        """Return sink -> alerts that wait: `MetricsSnapshot.notifications_pending`."""
        return {name: worker.num_waiting() for name, worker in self.workers.items()}

    def problems(self) -> dict[str, str]:
        """Return sink -> why it cannot be reached, for those that cannot, or that have not come back from a delivery."""
        found = {name: worker.problem for name, worker in self.workers.items() if worker.problem}
        now = self._clock()
        for name, worker in self.workers.items():
            since = worker.busy_since
            if since is not None and now - since > STUCK_AFTER_S:
                found[name] = f"a delivery has been under way for {now - since:.0f} s"
        return found

    def _run(self, name: str) -> None:
        worker, wake = self.workers[name], self._wakes[name]
        while not self._is_closing:
            wake.clear()
            now = self._clock()
            try:
                due = worker.turn(now)
            except Exception as error:  # The outbox's disk may be full: say so, and go on when it is not.
                worker.problem = f"outbox: {error}"
                _log.exception("sink %s: the outbox failed; next try in 5 s", name)
                due = now + 5.0
            # A minute at most, so that a clock which jumps is noticed.
            wake.wait(60.0 if due is None else min(max(due - now, 0.0), 60.0))


def _earlier(one: float, other: float | None) -> float:
    return one if other is None else min(one, other)
