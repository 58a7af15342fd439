"""Garbage: when a daemon looks for objects that hold each other and nobody holds, and gives back memory that is free.

It has millions that stay, of tables and layouts of ranks. The collector would go through all of them several times a minute:
a seventh of the time in which a join of 128 nodes judged (`benchmarks/fleet_scale.py --collector`).
"""

from __future__ import annotations

import ctypes
import gc

EVERY_S, FIRST_S = 600.0, 60.0
"""Seconds from one search among all objects to the next, and to the first: what layouts are built of is free by then."""
LATEST_S = 1200.0
"""Seconds after which it is made though there is much to do."""
NEVER = 2**30


class Garbage:
    """New objects are looked through as ever; all of them when there is time. For the thread of the loop."""

    def __init__(self, now: float) -> None:
        """now: monotonic seconds."""
        self._since = now - EVERY_S + FIRST_S
        self._former = gc.get_threshold()
        gc.set_threshold(self._former[0], self._former[1], NEVER)
        # glibc keeps what is free between what is not, where nobody asks; other libraries have no such function.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def turn(self, now: float, *, is_idle: bool) -> bool:
        """Look through all objects where it is time; return whether it was."""
        if now - self._since < (EVERY_S if is_idle else LATEST_S):
            return False
        self._since = now
        gc.collect()
        if self._trim is not None:
            self._trim(0)
        return True

    def close(self) -> None:
        """Leave the collector as it was."""
        gc.set_threshold(*self._former)
