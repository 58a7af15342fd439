"""Garbage: when a daemon looks for objects that hold each other and nobody holds.

It has millions that stay, of tables and layouts of ranks. The collector would go through all of them several times a minute:
a seventh of the time in which a join of 128 nodes judged (`benchmarks/fleet_scale.py --collector`).
"""

from __future__ import annotations

import gc

EVERY_S = 600.0
"""Seconds from one search among all objects to the next."""
LATEST_S = 1200.0
"""Seconds after which it is made though there is much to do."""
NEVER = 2**30


class Garbage:
    """New objects are looked through as ever; all of them when there is time. For the thread of the loop."""

    def __init__(self, now: float) -> None:
        """now: monotonic seconds."""
        self._since = now
        self._former = gc.get_threshold()
        gc.set_threshold(self._former[0], self._former[1], NEVER)

    def turn(self, now: float, *, is_idle: bool) -> bool:
        """Look through all objects where it is time; return whether it was."""
        if now - self._since < (EVERY_S if is_idle else LATEST_S):
            return False
        self._since = now
        gc.collect()
        return True

    def close(self) -> None:
        """Leave the collector as it was."""
        gc.set_threshold(*self._former)
