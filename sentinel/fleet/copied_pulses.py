"""CopiedPulses: when each process of a run said last that it lives, as nodes tell it, in the folders of its copies.

A process sets its pulse fifty times a second, and each beat of a node tells another one. Who asks for it asks for that of a
process that ended: it is held as long as frames come, and written when none has come for a while, or the node is silent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

QUIET_S = 3.0
"""Of a node that said nothing for so long all is written. Too small: those of nodes that speak every two seconds are written
over and over; too large: a join that ends meanwhile takes them with it, and the next one has the last frames alone."""
LOOK_S = 1.0
MOVED_S = 2.25
"""A process of which frames came so short a time ago goes on. Too small: those of thousands are written at each beat; too
large: it is asked for before it is there, which is when the process has been silent for 2.5 s (`ingest/witnesses.py`)."""


class CopiedPulses:
    """Of one run. Moments are monotonic seconds."""

    def __init__(self, put: Callable[[str, int], None]) -> None:
        """put: writes the pulse of a spool's folder, nanoseconds since the epoch."""
        self._put = put
        self._held: dict[str, dict[str, int]] = {}
        """Node -> folder -> pulse that is not written."""
        self._written: dict[str, int] = {}
        self._moved_at = defaultdict[str, float](lambda: -math.inf)
        self._due = -math.inf

    def take(self, node: str, folder: str, pulse_ns: int, now: float, *, has_moved: bool) -> None:
        """Take in what a beat says of a spool. has_moved: there are frames in it that the beat before did not know of."""
        if has_moved:
            self._moved_at[folder] = now
        if pulse_ns <= 0 or self._written.get(folder) == pulse_ns:
            return
        if now - self._moved_at[folder] < MOVED_S:
            self._held.setdefault(node, {})[folder] = pulse_ns
        else:
            self._held.get(node, {}).pop(folder, None)
            self._write(folder, pulse_ns)

    def write_of(self, node: str) -> None:
        """Write what is held of a node's processes: it is silent, or leaves."""
        for folder, pulse_ns in self._held.pop(node, {}).items():
            self._write(folder, pulse_ns)

    def write_silent(self, heard: dict[str, float], now: float) -> None:
        """Write what is held of nodes that are silent, at most once a second. heard: node -> when it spoke last."""
        if now < self._due:
            return
        self._due = now + LOOK_S
        for node in [one for one in self._held if now - heard.get(one, now - QUIET_S) >= QUIET_S]:
            self.write_of(node)

    def _write(self, folder: str, pulse_ns: int) -> None:
        self._written[folder] = pulse_ns
        self._put(folder, pulse_ns)
