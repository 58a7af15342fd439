"""The two clocks that every frame carries, as something that can be handed in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for people, monotonic time for durations; both in nanoseconds."""

    def wall_ns(self) -> int:
        """Return nanoseconds since the epoch; may jump."""
        ...

    def mono_ns(self) -> int:
        """Return nanoseconds since some fixed point; never goes back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def wall_ns(self) -> int:
        """Return `time.time_ns()`."""
        return time.time_ns()

    def mono_ns(self) -> int:
        """Return `time.monotonic_ns()`."""
        return time.monotonic_ns()
