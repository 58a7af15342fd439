"""The daemon's log: a line an event, for people or as JSON. What cannot be seen in a name ends no line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import TextIO

from sentinel.printable import printable, printable_lines

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("console", "json")


class ConsoleEvents(logging.Formatter):
    """`2026-11-23 18:40:01,123 INFO sentinel.daemon: what happened`; further lines only where the daemon wrote them."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        return printable_lines(super().format(record))


class JsonEvents(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, the fields of the event, and an exception's text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(
            {name: printable(one) if isinstance(one, str) else one for name, one in event.items()}, default=str
        )


def begin_log(stream: TextIO, log_format: str, level: str) -> None:
    """Write everything of a level or graver to a stream, in one of `FORMATS`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonEvents() if log_format == "json" else ConsoleEvents())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
