"""DurationCounts: how long things took, counted by bucket, for whoever scrapes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import msgspec


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """What a histogram held at one moment."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets in seconds, rising; one more bucket holds what is above them."""
    cumulative: tuple[int, ...]
    """[len(bounds) + 1] durations up to each bound; the last is all of them."""
    sum_s: float


class DurationCounts:
    """Counts durations. Any thread may observe; any thread may read.

    bounds: upper bounds of the buckets in seconds, rising.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum_s = 0.0
        self._mutex = threading.Lock()

    def observe(self, seconds: float) -> None:
        """Count one duration; below zero (clocks of two machines) it counts as zero."""
        seconds = max(seconds, 0.0)
        with self._mutex:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._sum_s += seconds

    def read(self) -> Distribution:
        """Return what was counted so far."""
        with self._mutex:
            return Distribution(bounds=self._bounds, cumulative=tuple(accumulate(self._counts)), sum_s=self._sum_s)
