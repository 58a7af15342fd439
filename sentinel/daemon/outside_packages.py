"""What other packages offer in vain, tried beside the work of the daemon: what nobody asked for harms nobody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from sentinel.detect import DETECTORS
from sentinel.detect import ENTRY_POINTS as DETECTOR_POINTS
from sentinel.entry_points import OutsidePart, outside_parts
from sentinel.mirrors.mirror_table import ENTRY_POINTS as MIRROR_POINTS
from sentinel.mirrors.mirror_table import MIRRORS
from sentinel.report.sinks.sink_table import ENTRY_POINTS as SINK_POINTS
from sentinel.report.sinks.sink_table import SINKS

log = logging.getLogger("sentinel.daemon")

LAST_WAIT_S = 2.0
"""Seconds that the end of a short run waits for a trial. Smaller: on a busy machine a broken package goes unnamed;
larger: one that hangs holds up the end."""


class OutsidePackages:
    """Logs which detectors, sinks and mirrors of other packages nobody could use, from a thread of its own.

    Each is imported by another process (`OutsidePart.problem`). Where no package offers any there is no thread.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._tried = ""
        """What is being imported, for people; empty: nothing is."""

    def start(self) -> None:
        """Begin to try them; returns at once."""
        offers = list(_offers())
        if offers:
            self._thread = threading.Thread(target=self._try, args=(offers,), name="outside-packages", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the rest of the trials, `LAST_WAIT_S` at most; log which one goes on."""
        if self._thread is not None:
            self._thread.join(LAST_WAIT_S)
        if tried := self._tried:
            log.warning("%s: its import has not ended by the end of the daemon; whether it can be used is not known", tried)

    def _try(self, offers: list[tuple[OutsidePart, bool]]) -> None:
        for part, is_taken in offers:
            self._tried = part.where
            problem = "takes the name of one of Sentinel's own" if is_taken else part.problem()
            if problem:
                log.warning("%s %s; it is left out, mend or uninstall the package that offers it", part.where, problem)
        self._tried = ""


def _offers() -> Iterator[tuple[OutsidePart, bool]]:
    """Yield (what is offered to daemons, whether its name is one of Sentinel's own)."""
    for group, own in ((DETECTOR_POINTS, DETECTORS), (SINK_POINTS, SINKS), (MIRROR_POINTS, MIRRORS)):
        for part in outside_parts(group):
            yield part, part.name in own
