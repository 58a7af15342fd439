"""A sink: a file with a line for each message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message import headline
from sentinel.report.sinks.delivery import SENT, Delivery, SinkParts


class NotebookConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `type: notebook`."""

    path: str
    name: str = "notebook"
    route: RouteConfig = RouteConfig()

    def build(self, parts: SinkParts) -> Notebook:
        """Return the sink."""
        return Notebook(self.name, Path(self.path))


class Notebook:
    """Writes down what it is told."""

    digest_after, max_batch = 0, 1

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Append a line for each message."""
        with self._path.open("a") as file:
            file.writelines(headline(one) + "\n" for one in alerts)
        return SENT
