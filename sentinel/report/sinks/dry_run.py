"""DryRunSink: in the place of a sink, it writes to the log what that would be sent, and sends nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sentinel.report.alert import Alert
from sentinel.report.sinks.delivery import SENT, Delivery, Sink

log = logging.getLogger("sentinel.notify")


class DryRunSink:
    """Has the name of a sink and its way to group, so that all is decided as it would be."""

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self.digest_after = sink.digest_after
        self.max_batch = sink.max_batch

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Write to the log what would be sent."""
        for alert in alerts:
            log.info(
                "dry run: sink %s would be sent: run %s: %s, %s: %s",
                self.name, alert.incident.run, alert.change, alert.incident.severity.value, alert.incident.title,
            )  # fmt: skip
        return SENT
