"""What can be asked of every process of ours that listens."""

from __future__ import annotations

from typing import Any, Protocol


class ProcessApi(Protocol):
    """How a process is. Every method may be called from any thread and returns at once."""

    def health(self) -> dict[str, Any]:
        """Return {"status": "ok" | "degraded" | "standby" | "stopping" | "stuck", "problems": [...], "standby_of": [...],
        "version": ...}. standby_of: the processes that do the work in our place."""
        ...

    def is_ready(self) -> bool:
        """Return whether it does its work; never of a standby.

        A daemon: rules are loaded, and every run there was at the start has been read to its end once. A worker: the broker
        has its share of the partitions."""
        ...

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return (body, content type) of a scrape."""
        ...
