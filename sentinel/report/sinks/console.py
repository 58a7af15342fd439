"""The console: a line per alert, for people who watch the daemon's own output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

import msgspec

from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.delivery import SENT, Delivery, SinkParts
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates

SHOWN = ("machines", "cause", "because", "done", "what to do")
"""What of a message has a line of its own; the page has the rest."""


class ConsoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="console"):
    """Standard error of the daemon."""

    name: str = "console"
    """Name in metrics and in the outbox; unique."""

    route: RouteConfig = RouteConfig()
    """Incidents that are printed; by default every one from warning on."""

    templates: MessageTemplates = NO_TEMPLATES
    """Texts of your own."""

    def build(self, parts: SinkParts) -> ConsoleSink:
        """Return the sink; `SinkSettings.build`."""
        return ConsoleSink(self, parts.stream, parts.writer(self.name, self.templates))


class ConsoleSink:
    """Writes alerts to a stream."""

    digest_after = 0
    max_batch = 1

    def __init__(self, config: ConsoleConfig, stream: TextIO, writer: MessageWriter | None = None) -> None:
        self.name = config.name
        self._stream = stream
        self._writer = writer or MessageWriter()

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Write one line an alert, and behind it where it began, on which machines, the cause and what to do, if known."""
        try:
            for alert in alerts:
                message = self._writer.write(alert)
                print(f"sentinel: {message.headline()}", file=self._stream)
                known = dict(message.fields)
                place = ", ".join(f"{name} {known[name]}" for name in ("began with", "module") if name in known)
                lines = [place, *(f"{name}: {known[name]}" for name in SHOWN if name in known)]
                for line in filter(None, lines):
                    print(f"          {line}", file=self._stream)
            self._stream.flush()
        except (OSError, ValueError) as error:
            return Delivery(outcome="failed", detail=f"console: {error}")
        return SENT
