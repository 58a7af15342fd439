"""CopiedNews: what was written to the copies of a run since the follower asked last. Most of it is heartbeats."""

from __future__ import annotations

from sentinel.ingest.arrivals import Arrived

MAX_BYTES, MAX_ARRIVED_BYTES = 128 * 2**20, 16 * 2**10
"""Most bytes of what was written that are held for the one who reads it, of all spools and of one: a bound on memory, and on
what he holds of it. Heartbeats and the ends of steps are small; rows are read from the disk."""


class CopiedNews:
    """Of one run."""

    def __init__(self) -> None:
        self._news: dict[str, Arrived | None] = {}
        """Folder of a copy -> what was written to it, where that is held."""
        self._num_bytes = 0

    def add(self, folder: str, arrived: Arrived | None) -> None:
        """Take note of what was written to a copy; None: it is to be read from the disk."""
        former, is_new = self._news.get(folder), folder not in self._news
        if arrived is not None and not is_new:
            arrived = None if former is None else former.followed_by(arrived)
        self._num_bytes -= 0 if former is None else former.num_bytes
        num_bytes = 0 if arrived is None else arrived.num_bytes
        if num_bytes > MAX_ARRIVED_BYTES or self._num_bytes + num_bytes > MAX_BYTES:
            arrived, num_bytes = None, 0
        self._num_bytes += num_bytes
        self._news[folder] = arrived

    def take(self) -> dict[str, Arrived | None]:
        """Return all of it, once, as `Arrivals.came`."""
        news, self._news, self._num_bytes = self._news, {}, 0
        return news
