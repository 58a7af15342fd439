"""WriteClock: how long writes to a disk take; while one hangs, other threads can say so."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

SLOW_S = 5.0
"""Seconds from which on a write is called slow (chosen): a healthy disk takes milliseconds, a busy one a second or two."""


class WriteClock:
    """Of one directory. Written by whoever writes, read by any thread.

    directory: for the words. clock: monotonic seconds.
    """

    def __init__(self, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.last_s = 0.0
        """Seconds that the last write took."""
        self.slowest_s = 0.0
        """The longest of all, one that is under way left out."""
        self.num_slow = 0
        """Writes that took longer than `SLOW_S`."""
        self._directory, self._clock = directory, clock
        self._began: float | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Time a write; one at a time."""
        began = self._began = self._clock()
        try:
            yield
        finally:
            self._began = None
            self.last_s = self._clock() - began
            self.slowest_s = max(self.slowest_s, self.last_s)
            self.num_slow += self.last_s > SLOW_S

    @property
    def under_way_s(self) -> float:
        """Seconds for which a write has been under way; 0: none is."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    @property
    def problem(self) -> str:
        """What to tell people while the disk is slow; empty: it is not."""
        if self.under_way_s > SLOW_S:
            took = f"a write has been under way for {self.under_way_s:.0f} s"
        elif self.last_s > SLOW_S:
            took = f"the last write took {self.last_s:.0f} s"
        else:
            return ""
        return f"the disk of {self._directory} answers slowly: {took}"
