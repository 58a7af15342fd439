"""A clock that moves when a test moves it."""

from __future__ import annotations

EPOCH_S = 1_800_000_000.0
"""Where a FakeClock's wall clock begins: 2027-01-15, a fixed day."""


class FakeClock:
    """A clock that moves when a test moves it. Serves as a `wire.Clock`, and its methods as `time.time` and
    `time.monotonic`."""

    def __init__(self, time_s: float = EPOCH_S, monotonic_s: float = 1000.0) -> None:
        self._wall_ns = round(time_s * 1e9)
        self._mono_ns = round(monotonic_s * 1e9)

    def advance(self, seconds: float) -> None:
        """Move both clocks forward; ValueError backwards."""
        if seconds < 0:
            raise ValueError(f"a clock goes forward, got {seconds}")
        self._wall_ns += round(seconds * 1e9)
        self._mono_ns += round(seconds * 1e9)

    def sleep(self, seconds: float) -> None:
        """Advance instead of waiting: stands in for `time.sleep`."""
        self.advance(max(0.0, seconds))

    def wall_ns(self) -> int:
        """Return nanoseconds since the epoch."""
        return self._wall_ns

    def mono_ns(self) -> int:
        """Return monotonic nanoseconds."""
        return self._mono_ns

    def time(self) -> float:
        """Return seconds since the epoch."""
        return self._wall_ns / 1e9

    def monotonic(self) -> float:
        """Return monotonic seconds."""
        return self._mono_ns / 1e9
