"""SpoolWatch: looks now and then how long the spools of a run still last, and says so while the judge lags."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from sentinel.ingest.spool_room import NOTICED_SHARE, fullest
from sentinel.report.metrics import RunMetrics

log = logging.getLogger("sentinel.serving")

LOOK_S = 2.0
"""Least seconds between two looks."""


class SpoolWatch:
    """Of one run. `problem` is replaced, never changed: other threads read it."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.problem = ""
        """What to tell people while much waits; empty: little does."""
        self._name, self._run_dir = name, run_dir
        self._due = 0.0
        self._notified_share = 0.0

    def look(self, metrics: RunMetrics) -> None:
        """Look if it is time to, and note in the metrics what was seen. Logs each further quarter of the cap once."""
        begun = time.monotonic()
        if begun < self._due:
            return
        room = fullest(self._run_dir)
        metrics.spool_waiting_bytes = 0 if room is None else room.waiting_bytes
        metrics.spool_seconds_left = None if room is None else room.seconds_left
        share = 0.0 if room is None else room.share
        self.problem = room.words if room is not None and share >= NOTICED_SHARE else ""
        if share < self._notified_share / 2:
            self._notified_share = 0.0
        if self.problem and share >= self._notified_share + NOTICED_SHARE:
            self._notified_share = share
            log.warning("run %s: the judge lags: %s", self._name, self.problem)
        # Thousands of spools must not cost a core.
        self._due = time.monotonic() + max(LOOK_S, 200.0 * (time.monotonic() - begun))
