"""DaemonMeters: what the daemon measures of its own work, over all runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sentinel.report.durations import DurationCounts
from sentinel.report.stage_times import StageTimes

LAG_BOUNDS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0)
"""Buckets of judge lag: a quarter of a second is meant (chosen), minutes are a daemon that was down."""
DISK_S = 10.0


class DaemonMeters:
    """Written by the loop and read by scrapes."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: as of `StageTimes`."""
        self.stages = StageTimes(clock)
        self.judge_lag = DurationCounts(LAG_BOUNDS_S)
        self.disks: dict[str, tuple[int, int]] = {}
        """Name of a directory -> (free bytes, bytes) of its file system; replaced, never changed."""
        self._disks_due = 0.0

    def take_judged(self, ended: Iterable[float], now: float) -> None:
        """Count steps whose judgement was written down by `now`. ended: of each, when its last rank ended it.

        All in seconds since the epoch.
        """
        for time_ended in ended:
            self.judge_lag.observe(now - time_ended)

    def look_at_disks(self, directories: dict[str, Path]) -> None:
        """Look how much is left, now and then. directories: by name."""
        if time.monotonic() < self._disks_due:
            return
        self._disks_due = time.monotonic() + DISK_S
        found = {}
        for name, directory in directories.items():
            try:
                usage = shutil.disk_usage(directory)
            except OSError:
                continue  # a disk that does not answer is said by whoever writes to it
            found[name] = (usage.free, usage.total)
        self.disks = found
