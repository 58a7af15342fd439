"""StageTimes: where the daemon's time goes, and how much each stage did in it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

STAGES: tuple[str, ...] = ("follow", "assemble", "judge", "commit", "notify")
"""Read spools; close steps of what was read; judge them; write the judgement down; send alerts."""


class StageTimes:
    """Seconds and items of each stage since the daemon started. Any thread may add."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds that pass for whoever measures."""
        self._clock = clock
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._items = dict.fromkeys(STAGES, 0)
        self._mutex = threading.Lock()

    def add(self, stage: str, seconds: float, num_items: int) -> None:
        """Count work of a stage."""
        with self._mutex:
            self._seconds[stage] += seconds
            self._items[stage] += num_items

    @contextlib.contextmanager
    def measure(self, stage: str, num_items: int = 0) -> Iterator[None]:
        """Count the time of the block, and these items."""
        begun = self._clock()
        try:
            yield
        finally:
            self.add(stage, self._clock() - begun, num_items)

    def each(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """Yield what a stage makes as it is asked for, and count the time it takes to make it."""
        iterator = iter(items)
        while True:
            begun = self._clock()
            try:
                one = next(iterator)
            except StopIteration:
                self.add(stage, self._clock() - begun, 0)
                return
            self.add(stage, self._clock() - begun, 1)
            yield one

    def read(self) -> dict[str, tuple[float, int]]:
        """Return stage -> (seconds, items)."""
        with self._mutex:
            return {stage: (self._seconds[stage], self._items[stage]) for stage in STAGES}
