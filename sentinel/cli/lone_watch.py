"""LoneWatch: beside the shipper of a node, has what no join answers judged by this machine, and says what is found."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from sentinel.fleet.node_runs import UNANSWERED_S, NodeRuns
from sentinel.judge.lone_runs import LoneRuns
from sentinel.printable import printable

log = logging.getLogger("sentinel.fleet")

LOOK_S = 1.0


class LoneWatch:
    """A thread, for as long as it is entered. It writes nothing but the log, and what beats of the node say."""

    def __init__(self, runs: NodeRuns, lone: LoneRuns) -> None:
        self._runs, self._lone = runs, lone
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
        self._told = found
