"""The console: a line per alert, for people who watch the daemon's own output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

import msgspec

from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message import facts, headline
from sentinel.report.sinks.delivery import SENT, Delivery, SinkParts


class ConsoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="console"):
    """Standard error of the daemon."""

    name: str = "console"
    """Name in metrics and in the outbox; unique."""

    route: RouteConfig = RouteConfig()
    """Incidents that are printed; by default every one from warning on."""

    def build(self, parts: SinkParts) -> ConsoleSink:
        """Return the sink; `SinkSettings.build`."""
        return ConsoleSink(self, parts.stream)


class ConsoleSink:
    """Writes alerts to a stream."""

    digest_after = 0
    max_batch = 1

    def __init__(self, config: ConsoleConfig, stream: TextIO) -> None:
        self.name = config.name
        self._stream = stream

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Write one line an alert, and behind it where it began, the cause and what to do, as far as they are known."""
        try:
            for alert in alerts:
                print(printable(f"sentinel: {headline(alert)}"), file=self._stream)
                known = dict(facts(alert.incident))
                place = ", ".join(f"{name} {known[name]}" for name in ("began with", "module") if name in known)
                lines = [place, *(f"{name}: {known[name]}" for name in ("cause", "because", "what to do") if name in known)]
                for line in filter(None, lines):
                    print(printable(f"          {line}"), file=self._stream)
            self._stream.flush()
        except (OSError, ValueError) as error:
            return Delivery(outcome="failed", detail=f"console: {error}")
        return SENT


def printable(text: str) -> str:
    """Return text without control characters: a tensor's name must not move the cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)
