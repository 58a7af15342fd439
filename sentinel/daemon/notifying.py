"""Notifying: the notifier in force, and how another one takes its place without losing or doubling what waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TextIO

from sentinel.daemon.outboxes import Outboxes
from sentinel.report.backoff import RetryPolicy
from sentinel.report.message_writer import OrdersOf, no_orders
from sentinel.report.notifier import Notifier
from sentinel.report.pipeline import Telling
from sentinel.report.silences import Silences
from sentinel.report.sinks.delivery import DeliveryNotes, NotesInMemory
from sentinel.report.sinks.dry_run import DryRunSink
from sentinel.report.sinks.sink_table import NotifyConfig, build_sinks


class Notifying:
    """What is sent waits in the outboxes of the runs, whichever notifier sends it."""

    def __init__(
        self,
        config: NotifyConfig,
        environ: Mapping[str, str],
        stream: TextIO,
        orders_of: OrdersOf = no_orders,
        notes: DeliveryNotes | None = None,
        *,
        silences: Silences | None = None,
        phases_of: Callable[[str], Collection[str]] = lambda run: (),
        is_dry_run: bool = False,
    ) -> None:
        """environ: for the sinks' secrets. stream: of the console. notes: what sinks know again after a restart.
        phases_of: run -> what its ranks are at. is_dry_run: send nothing, log it.

        ConfigError when a sink cannot be built.
        """
        self.outboxes = Outboxes()
        self.is_dry_run = is_dry_run
        self._environ, self._stream, self._orders_of = environ, stream, orders_of
        self._notes = notes or NotesInMemory()
        self._silences, self._phases_of = silences or Silences(), phases_of
        self._former: Notifier | None = None
        """One that still ends its last requests; nobody sends anything meanwhile."""
        self._is_started = False
        self.notifier = self.built(config)

    def built(self, config: NotifyConfig) -> Notifier:
        """Return a notifier that `exchange` takes; ConfigError when a sink cannot be built."""
        sinks = build_sinks(config, self._environ, self._stream, self._orders_of, self._notes)
        return Notifier(
            self.outboxes,
            [DryRunSink(sink) for sink in sinks] if self.is_dry_run else sinks,
            RetryPolicy(
                retry_s=config.retry_s,
                max_retry_s=config.max_retry_s,
                give_up_after_s=config.give_up_after_s,
                max_pending=config.max_pending,
            ),
            clock=time.time,
            rates={sink.name: getattr(sink, "rate_per_s", 10.0) for sink in config.sinks},
            routes=config.routes(),
            telling=Telling(
                hold=config.hold_s,
                correlate=config.correlate,
                digest=config.digest,
                inhibit=config.inhibit,
                maintenance=config.maintenance,
                silences=self._silences,
                phases_of=self._phases_of,
                num_runs=self.outboxes.num_runs,
            ),
        )

    def start(self) -> None:
        """Begin to send."""
        self._is_started = True
        self.notifier.start()

    def exchange(self, notifier: Notifier) -> None:
        """Have another notifier send from now on; what its sinks were told, the outboxes know."""
        former, self.notifier = self.notifier, notifier
        if self._former is None:
            self._former = former
        self.turn()

    def turn(self) -> None:
        """Begin to send once the former notifier has sent its last; called every turn of the loop."""
        if self._former is not None and self._former.close(0.0):
            self._former = None
            if self._is_started:
                self.notifier.start()

    def close(self) -> None:
        """Stop sending. What waits stays in the outboxes."""
        if self._former is not None:
            self._former.close()
        self.notifier.close()
