"""DiskWatch: says in the log that a disk answers slowly, also while the loop waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

log = logging.getLogger("sentinel.daemon")

LOOK_S = 1.0


class DiskWatch:
    """A thread of its own: whoever waits for a disk cannot say so."""

    def __init__(self, problems: Callable[[], Mapping[str, str]]) -> None:
        """problems: returns, by run, that its disk is slow, in words; empty words: it is not. Called from the thread."""
        self._problems = problems
        self._said: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sentinel-disk-watch", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(2 * LOOK_S)

    def look(self) -> None:
        """Say once that a run's disk is slow, and once that it no longer is."""
        found = {run: words for run, words in self._problems().items() if words}
        for run in sorted(found.keys() - self._said):
            log.warning("run %s: %s", run, found[run])
        for run in sorted(self._said - found.keys()):
            log.info("run %s: its disk answers in time again", run)
        self._said = set(found)

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            self.look()
