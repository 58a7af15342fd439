"""LoneWatch: beside the shipper of a node, has what no join answers judged by this machine, and says what is found."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from sentinel.fleet.node_runs import UNANSWERED_S, NodeRuns
from sentinel.judge.lone_runs import LoneRuns
from sentinel.printable import printable

log = logging.getLogger("sentinel.fleet")

LOOK_S = 1.0
STOOD_STILL_S = 5.0
"""Where a look comes so much later than it is due this process was stopped, or its machine. Too small: a busy machine never
judges; too large: a join that answered all others is said to be silent."""


class LoneWatch:
    """A thread, for as long as it is entered. It writes nothing but the log, and what beats of the node say."""

    def __init__(self, runs: NodeRuns, lone: LoneRuns, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._lone, self._clock = runs, lone, clock
        self._looked_at = clock()
        """When the last look ended: what one takes is no standstill."""
        self._told: dict[str, tuple[str, ...]] = {}
        """Run -> what was said of it."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sentinel-lone", daemon=True)

    def __enter__(self) -> LoneWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join(LOOK_S)

    def _run(self) -> None:
        try:
            while not self._is_over.wait(LOOK_S):
                self.look()
        except Exception:
            # What is shipped does not depend on it.
            log.exception("what this machine's ranks do is not judged here any more")
            self._runs.found_alone = {}

    def look(self) -> None:
        """Look once."""
        if self._clock() - self._looked_at > LOOK_S + STOOD_STILL_S:
            self._runs.wait_anew(self._told.keys())
        found = self._lone.look(self._runs.unanswered())
        self._runs.found_alone = found
        for name in found.keys() - self._told.keys():
            log.warning(
                "run %s: no join has answered for %g s, and nobody is told of anything: is the broker there, and a join? "
                "Until one answers this machine judges its own ranks, and says what it finds, here and in `fleet status`",
                printable(name), UNANSWERED_S,
            )  # fmt: skip
        for name, lines in found.items():
            for line in lines[len(self._told.get(name, ())) :]:
                log.error("run %s: found by this machine alone: %s", printable(name), printable(line))
        for name in self._told.keys() - found.keys():
            log.info("run %s: a join answers again, and judges all of it", printable(name))
        self._told, self._looked_at = found, self._clock()
