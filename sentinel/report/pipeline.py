"""From the outbox to people: the stages of one sink, one plain step after the other.

    waiting rows -> deduplicate (the newest word on an incident) -> silence, maintenance, hours, inhibit (what may not be
    told now) -> ends (whoever was told) -> correlate (alike in several runs: one message) -> expire, bound -> hold -> digest
    (one, or a storm's at once) -> rate-limit -> send -> done, or again later

The outbox is durable and the rows are committed with the judgement, so nothing is lost by a crash. Which rows a request is
about is written down before it leaves: after kill -9 the same message is sent once more under the same key, marked
`repeated`, and what is newer follows it as another.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from sentinel.errors import MALFORMED
from sentinel.report.alert import Alert, RouteConfig, topic
from sentinel.report.backoff import Backoff, RetryPolicy
from sentinel.report.durations import DurationCounts
from sentinel.report.metrics import OUTCOMES
from sentinel.report.outbox import Outbox, WaitingAlert
from sentinel.report.settlements import Settlements, ToldRow
from sentinel.report.silences import Silences
from sentinel.report.sinks.delivery import Delivery, ResendingSink, Sink, checked
from sentinel.report.stages.correlate import Correlate, CorrelateConfig, together
from sentinel.report.stages.deduplicate import Deduplicate, TellEnds
from sentinel.report.stages.gather import ALONE_AFTER, DigestConfig, Gather
from sentinel.report.stages.giving_up import Bound, Expire
from sentinel.report.stages.hold import Hold, HoldConfig
from sentinel.report.stages.ledger import Ledger, Told
from sentinel.report.stages.pending import AlertStage, Pending, Turn
from sentinel.report.stages.rate_limit import RateLimit, TokenBucket
from sentinel.report.stages.withhold import (
    Inhibited,
    InhibitRule,
    Maintained,
    MaintenanceConfig,
    OffHours,
    Silenced,
    Withhold,
)

FOREVER = 1e12
"""A time that lies behind every due time, seconds since the epoch."""
READ_LIMIT = 5000
"""Most rows taken from the outbox at once; a bound on memory."""

LATENCY_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0)
"""Buckets of what passes between a judgement and a sink's answer: a quarter of a second is meant, an outage takes longer."""

_log = logging.getLogger(__name__)


class Telling(msgspec.Struct, frozen=True, kw_only=True):
    """What all sinks are told by: the policies of NotifyConfig, and what the daemon knows of now."""

    hold: HoldConfig = HoldConfig()
    correlate: CorrelateConfig = CorrelateConfig()
    digest: DigestConfig = DigestConfig()
    inhibit: tuple[InhibitRule, ...] = ()
    maintenance: tuple[MaintenanceConfig, ...] = ()
    silences: Silences = msgspec.field(default_factory=Silences)
    phases_of: Callable[[str], Collection[str]] = lambda run: ()
    """Run -> what its ranks are at: train, eval, checkpoint, init."""
    num_runs: Callable[[], int] = lambda: 1
    """How many runs are served now."""


class SinkWorker:
    """All stages of one sink. `turn` does what is due and returns when it wants the next turn; no thread, no clock.

    rate_per_s: most requests a second on average. rng: spreads retries of many daemons. route: what the sink is sent.
    """

    def __init__(
        self,
        outbox: Outbox,
        sink: Sink,
        policy: RetryPolicy,
        *,
        rate_per_s: float = 1.0,
        rng: random.Random,
        route: RouteConfig | None = None,
        telling: Telling | None = None,
    ) -> None:
        route, telling = route or RouteConfig(), telling or Telling()
        self.sink = sink
        self._resending = sink if isinstance(sink, ResendingSink) else None
        """The sink, where it forgets what it was sent: what is open is sent again, and it groups by itself."""
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.problem = ""
        """Why the last request failed; empty after one that did not."""
        self.latency = DurationCounts(LATENCY_BOUNDS_S)
        """From the judgement of an alert, or from when it was no longer withheld, to the sink's answer that it has it."""
        self.num_keep_alives = 0
        """Times that open incidents were sent again."""
        self.sending_s = 0.0
        """Seconds spent in requests, answered or not."""
        self.num_requests = 0
        self.busy_since: float | None = None
        """When the delivery under way began, seconds since the epoch; None: there is none."""
        self.is_hurried = False
        """The daemon ends: nothing waits for more to come."""
        self._outbox = outbox
        self._took_s = 0.0
        """Seconds that the newest request took."""
        self._num_runs = telling.num_runs
        self._ledger = Ledger()
        self._generation: int | None = None
        """Of the outbox, when the ledger was read from it."""
        self._bucket = TokenBucket(rate_per_s)
        self._deduplicate = Deduplicate(route)
        self._expire = Expire(policy.give_up_after_s)
        self._rate_limit = RateLimit(self._bucket)
        self._digest = Gather(
            telling.digest, after=sink.digest_after, max_batch=sink.max_batch, is_resending=self._resending is not None
        )
        # An Alertmanager groups incidents of several runs by itself, and needs each under its own labels.
        correlate = telling.correlate if self._resending is None else CorrelateConfig(window_s=0.0)
        self._stages: tuple[AlertStage, ...] = (
            self._deduplicate,
            Withhold(Silenced(telling.silences)),
            Withhold(Maintained(telling.maintenance, telling.phases_of)),
            Withhold(OffHours(route.hours, "route.hours")),
            Withhold(Inhibited(telling.inhibit)),
            TellEnds(route),
            self._expire,
            Bound(sink.name, policy.max_pending),
            Correlate(correlate),
            Hold(telling.hold, storm=sink.digest_after),
            self._digest,
            self._rate_limit,
        )
        self._last_sent = -math.inf
        self._backoff = Backoff(policy, rng)
        self._failures: dict[int, int] = {}
        """Position -> failures of messages that it was part of."""
        self._alerts: dict[int, Alert] = {}
        """Position -> what it says, of the rows that wait."""
        self._begun: set[str] = set()
        """Deliveries that this process began, and knows not to have been received as a whole."""
        self._withheld: frozenset[int] = frozenset()
        """Positions of what waits for people or for the calendar."""
        self._let_go: dict[int, float] = {}
        """Position of what was withheld -> when it was no longer: from then on it waits for the sink."""
        self._settlements = Settlements(outbox, self.counts)

    def turn(self, now: float) -> float | None:
        """Send what is due. Return the time of the next turn; None: when something new waits. Raises only what the
        outbox raises."""
        self._settlements.write()
        self._learn()
        due = self._keep_alive(now)
        blocked = self._backoff.until(now)
        if blocked is not None:
            return _earlier(blocked, due)
        turn = Turn(
            now=now, ledger=self._ledger, num_runs=self._num_runs(), last_sent=self._last_sent, is_hurried=self.is_hurried
        )
        waiting = self._reconciled(self._read(), turn)
        batch = self._next(waiting, turn)
        for positions, outcome in turn.settled:
            self._settle(positions, outcome)
        self._settlements.write()
        self._let_go |= dict.fromkeys(self._withheld - turn.withheld, now)
        self._withheld = frozenset(turn.withheld)
        if not batch:
            return _earlier(due, turn.due)
        self._send(batch, now)
        due = self._keep_alive(now)  # What was sent just now may have to be repeated sooner than anything before.
        num_done = sum(len(one.positions) for one in batch) + sum(len(positions) for positions, _ in turn.settled)
        is_more = num_done < len(waiting) or bool(self._failures)
        return _earlier(self._backoff.until(now) or now, due) if is_more else due

    def num_waiting(self) -> int:
        """Return how many rows of this sink have no outcome."""
        return max(self._outbox.num_waiting(topic(self.sink.name)) - len(self._settlements.positions), 0)

    @property
    def num_withheld(self) -> int:
        """How many rows wait for people or for the calendar: silences, maintenance, hours, inhibition."""
        return len(self._withheld)

    def num_sendable(self) -> int:
        """Return how many rows wait for this sink alone, and not for people or for the calendar."""
        rows = self._outbox.waiting(topic(self.sink.name), FOREVER, READ_LIMIT)
        done = self._settlements.positions
        return sum(row.position not in self._withheld and row.position not in done for row in rows)

    # What waits.

    def _learn(self) -> None:
        """Read what the sink was told, where runs joined or left; what is open in them is repeated, or no more."""
        if self._generation == self._outbox.generation:
            return
        self._generation = self._outbox.generation
        former = {alert.incident.run for alert in self._ledger.open_alerts()}
        self._ledger.load(self._outbox.told(topic(self.sink.name)))
        if self._resending is None:
            return
        standing = self._ledger.open_alerts()
        for run in former - {alert.incident.run for alert in standing}:
            self._resending.release(run)
        new = [alert for alert in standing if alert.incident.run not in former]
        if new:
            self._resending.restore(new)

    def _read(self) -> list[Pending]:
        # Due times in the outbox are for people; asking without them keeps an older row from being overtaken.
        rows = self._outbox.waiting(topic(self.sink.name), FOREVER, READ_LIMIT)
        alive = {row.position for row in rows}
        self._failures = {position: number for position, number in self._failures.items() if position in alive}
        self._alerts = {position: alert for position, alert in self._alerts.items() if position in alive}
        self._let_go = {at: when for at, when in self._let_go.items() if at in alive}
        done = self._settlements.positions
        return [one for row in rows if row.position not in done and (one := self._parse(row)) is not None]

    def _parse(self, row: WaitingAlert) -> Pending | None:
        alert = self._alerts.get(row.position)
        if alert is None:
            try:
                alert = self._alerts[row.position] = Alert.read(row.body)
            except MALFORMED as error:
                _log.error("sink %s: outbox row %d is no alert: %s", self.sink.name, row.position, error)
                self._settle([row.position], "failed")
                return None
        return Pending(
            alert=alert,
            positions=[row.position],
            since=alert.created,
            delivery=row.delivery,
            is_maybe_received=row.tries > 0,
            num_failures=self._failures.get(row.position, 0),
        )

    # The next message.

    def _next(self, waiting: list[Pending], turn: Turn) -> list[Pending]:
        """Return what the next message is made of: one that was begun and may have been received, or what the stages say."""
        begun = self._begun_messages(waiting, turn)
        fresh = [batch for batch in begun if batch[0].num_failures < ALONE_AFTER]
        if fresh:
            return self._rate_limit.apply(fresh[0], turn)
        # Newer words on what was begun wait until it is known what became of that.
        taken = {one.where for batch in begun for pending in batch for one in pending.incidents}
        settled = {position for positions, _ in turn.settled for position in positions}
        pending = [one for one in waiting if one.where not in taken and one.positions[0] not in settled]
        for stage in self._stages:
            pending = stage.apply(pending, turn)
        stale = min(begun, key=lambda batch: batch[0].num_failures, default=[])
        return pending or self._rate_limit.apply(stale, turn)

    def _begun_messages(self, waiting: list[Pending], turn: Turn) -> list[list[Pending]]:
        """Return the messages whose request left and whose answer never came, as they were, the oldest first.

        One of several incidents that failed too often is none any more: each of them gets its own chance.
        """
        found = []
        for parts in _by_message(waiting).values():
            batch = self._expire.apply(self._rebuilt(parts, turn), turn)
            if batch and (len(batch) == 1 or batch[0].num_failures < ALONE_AFTER):
                found.append(batch)
        return found

    def _rebuilt(self, parts: list[Pending], turn: Turn) -> list[Pending]:
        """Return a message as it was before its request left."""
        threads: dict[str, list[Pending]] = {}
        names = {one.where: _thread_of(one.delivery) for one in parts}
        for one in self._deduplicate.apply(parts, turn):
            one.thread = names[one.where]
            threads.setdefault(one.thread, []).append(one)
        batch = []
        for name, ones in threads.items():
            thread = self._ledger.thread(name)
            is_alone = len(ones) == 1 and (thread is None or (ones[0].told is not None and len(thread.members) == 1))
            batch.append(ones[0] if is_alone else together(ones, thread))
        return batch

    def _reconciled(self, waiting: list[Pending], turn: Turn) -> list[Pending]:
        """Return what waits without what a crash left between the outboxes of two runs, where one of them says that the sink
        received the message: it is settled."""
        done: set[int] = set()
        for message, parts in _by_message(waiting).items():
            if message not in self._begun and self._outbox.was_sent(message):
                batch = self._rebuilt(parts, turn)
                self._take_received(batch, turn.now)
                done.update(position for one in batch for position in one.positions)
            self._begun.add(message)
        return [one for one in waiting if one.positions[0] not in done]

    def _send(self, batch: list[Pending], now: float) -> None:
        positions = [position for one in batch for position in one.positions]
        alerts = [msgspec.structs.replace(one.alert, repeated=one.is_maybe_received) for one in batch]
        message = message_key(alerts)
        self._begun.add(message)
        self._outbox.begin_delivery({at: f"{message}\n{one.thread}" for one in batch for at in one.positions})
        self._bucket.take()
        delivery = self._deliver(alerts, now)
        if delivery.outcome == "sent":
            self.problem = ""
            self._backoff.succeeded()
            for one in batch:
                begun = max([one.alert.created, *(self._let_go.get(at, 0.0) for at in one.positions)])
                self.latency.observe(now + self._took_s - begun)
                self._log_sent(one)
            self._last_sent = now
            self._digest.note_sent(batch, now)
            self._take_received(batch, now)
            self._settlements.write()
            return
        self.problem = delivery.detail
        is_unknown = delivery.is_unknown or any(one.is_maybe_received for one in batch)
        if delivery.outcome == "failed" and len(batch) == 1:
            _log.error("sink %s: gave up %d alerts: %s", self.sink.name, len(batch), delivery.detail)
            self._settle(positions, "failed")
            self._settlements.write()
            return
        self.counts["retried"] += len(batch)
        if delivery.outcome == "failed":
            # One of them may have spoilt it for all: each gets its own chance.
            self._failures.update(dict.fromkeys(positions, ALONE_AFTER))
            self._outbox.postpone_delivery(positions, now, is_unknown=is_unknown)
            return
        for position in positions:
            self._failures[position] = self._failures.get(position, 0) + 1
        wait_s = self._backoff.failed(now, delivery.retry_after_s)
        _log.warning("sink %s: next try in %.1f s: %s", self.sink.name, wait_s, delivery.detail)
        self._outbox.postpone_delivery(positions, now + wait_s, is_unknown=is_unknown)

    def _take_received(self, batch: list[Pending], now: float) -> None:
        """Write down what a message that the sink received settles, and what the sink knows now."""
        is_digest = len(batch) > 1 and self._resending is None
        for pending in batch:
            outcome = "correlated" if pending.parts else "digested" if is_digest else "sent"
            for one in pending.incidents:
                said = "repeated" if one.is_maybe_received else outcome
                self._settle(one.positions[:1], said, [self._noted(one, pending.thread, now)])
                self._settle(one.positions[1:], "superseded")

    def _noted(self, one: Pending, thread: str, now: float) -> ToldRow:
        former = self._ledger.get(one.where)
        told = Told(alert=one.alert, thread=thread, first=former.first if former is not None else now, last=now)
        self._ledger.note(told)
        return ToldRow(
            position=one.positions[0],
            topic=topic(self.sink.name),
            incident=one.alert.incident.id,
            over=now if told.is_over else 0.0,
            body=told.body,
        )

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

    def _log_sent(self, one: Pending) -> None:
        incident, change = one.alert.incident, one.alert.change
        fields = {
            "event": "alert.sent", "sink": self.sink.name, "run": incident.run, "incident": incident.id, "change": change,
            "key": one.alert.key,
        }  # fmt: skip
        words = "sink %s: sent run %s: incident %s %s"
        _log.info(words, self.sink.name, incident.run, incident.id, change, extra={"fields": fields})

    def _settle(self, positions: list[int], outcome: str, told: Sequence[ToldRow] = ()) -> None:
        for position in positions:
            self._failures.pop(position, None)
        self._settlements.add(positions, outcome, told)


def message_key(alerts: Sequence[Alert]) -> str:
    """Return the key of one alert, or a hash that names exactly this set of alerts."""
    if len(alerts) == 1:
        return alerts[0].key
    text = "\n".join(sorted(alert.key for alert in alerts))
    return "digest:" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _by_message(waiting: Iterable[Pending]) -> dict[str, list[Pending]]:
    """Return the key of each message that was begun and may have been received -> the rows that it was about."""
    found: dict[str, list[Pending]] = {}
    for one in waiting:
        if one.delivery:
            found.setdefault(one.delivery.partition("\n")[0], []).append(one)
    return found


def _thread_of(delivery: str) -> str:
    return delivery.partition("\n")[2]


def _earlier(one: float | None, other: float | None) -> float | None:
    known = [moment for moment in (one, other) if moment is not None]
    return min(known, default=None)
