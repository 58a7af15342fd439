"""Notifier: the sinks at work, each in a thread of its own, never in the way of judging."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from sentinel.report.alert import RouteConfig
from sentinel.report.backoff import RetryPolicy
from sentinel.report.metrics import OUTCOMES
from sentinel.report.outbox import Outbox
from sentinel.report.pipeline import SinkWorker, Telling
from sentinel.report.sinks.delivery import Sink

PAUSE_PER_TURN = 10.0
"""Times the processor time of a look that sent nothing, for which nobody looks again: a tenth of a core at most."""
MAX_PAUSE_S = 0.25
"""Longest such pause: a page must not wait for it."""

STUCK_AFTER_S = 60.0
"""Seconds after which a delivery under way is a problem of its sink: requests over HTTP are cut off long before."""

_log = logging.getLogger(__name__)


class Notifier:
    """A thread for each sink, so that one which hangs delays no other.

    clock: seconds since the epoch. rates: sink's name -> most requests a second. routes: (sink's name, what it is sent).
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
        routes: Iterable[tuple[str, RouteConfig]] = (),
        telling: Telling | None = None,
    ) -> None:
        rng, by_sink = rng or random.Random(), dict(routes)
        self.workers = {
            sink.name: SinkWorker(
                outbox, sink, policy, rate_per_s=(rates or {}).get(sink.name, 10.0), rng=rng,
                route=by_sink.get(sink.name), telling=telling,
            )
            for sink in sinks
        }  # fmt: skip
        self._clock = clock
        self._wakes = {name: threading.Event() for name in self.workers}
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def start(self) -> None:
        """Start the threads."""
        for name in self.workers:
            thread = threading.Thread(target=self._run, args=(name,), name=f"sentinel-sink-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def wake(self) -> None:
        """Say that something new waits; called after each commit that put rows into the outbox. Never blocks."""
        for wake in self._wakes.values():
            wake.set()

    def hurry(self) -> None:
        """Have everything sent that waits for more to come: the daemon ends."""
        for worker in self.workers.values():
            worker.is_hurried = True
        self.wake()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop after the requests under way; True when every thread ended in time. What waits stays in the outbox."""
        self._closing.set()
        self.wake()
        for thread in self._threads:
            thread.join(timeout_s / max(len(self._threads), 1))
        return not any(thread.is_alive() for thread in self._threads)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return (sink, outcome) -> number, zeros included: `MetricsSnapshot.notifications`."""
        return {(name, outcome): worker.counts[outcome] for name, worker in self.workers.items() for outcome in OUTCOMES}

    def withheld(self) -> dict[str, int]:
        """Return sink -> alerts that wait for people or for the calendar: `MetricsSnapshot.notifications_withheld`."""
        return {name: worker.num_withheld for name, worker in self.workers.items()}

    def pending(self) -> dict[str, int]:
        """Return sink -> alerts that wait: `MetricsSnapshot.notifications_pending`."""
        return {name: worker.num_waiting() for name, worker in self.workers.items()}

    def sendable(self) -> dict[str, int]:
        """Return sink -> alerts that wait for it alone, and not for people or for the calendar."""
        return {name: worker.num_sendable() for name, worker in self.workers.items()}

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
        while not self._closing.is_set():
            wake.clear()
            now, begun, num_requests = self._clock(), time.thread_time(), worker.num_requests
            try:
                due = worker.turn(now)
            except Exception as error:  # The outbox's disk may be full: say so, and go on when it is not.
                worker.problem = f"outbox: {error}"
                _log.exception("sink %s: the outbox failed; next try in 5 s", name)
                due = now + 5.0
            if worker.num_requests == num_requests:
                # While a storm gathers, thousands wait, and each commit of the judge would have all of them looked at again.
                self._closing.wait(min(PAUSE_PER_TURN * (time.thread_time() - begun), MAX_PAUSE_S))
            # A minute at most, so that a clock which jumps is noticed.
            wake.wait(60.0 if due is None else min(max(due - now, 0.0), 60.0))
