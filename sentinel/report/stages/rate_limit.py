"""RateLimit: no more requests than a sink takes, on average."""

from __future__ import annotations

from sentinel.report.stages.pending import Pending, Turn

BURST = 3
"""Messages that a sink may be sent at once after a quiet time. Too small: a fault's second message waits; too large: the
server refuses them (Slack allows short bursts of one a second)."""


class TokenBucket:
    """Allows `rate_per_s` on average and `burst` at once. The clock is handed in and may be set back."""

    def __init__(self, rate_per_s: float, burst: int = BURST) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._tokens = float(burst)
        self._then: float | None = None

    def wait_s(self, now: float) -> float:
        """Return the seconds until one may pass; 0: now."""
        if self._then is not None:
            self._tokens = min(self._burst, self._tokens + max(now - self._then, 0.0) * self._rate_per_s)
        self._then = now
        # An epsilon, because 1 s at 0.1 steps must be worth a whole token.
        return 0.0 if self._tokens >= 1.0 - 1e-9 else (1.0 - self._tokens) / self._rate_per_s

    def take(self) -> None:
        """Let one pass."""
        self._tokens -= 1.0


class RateLimit:
    """Lets the next message pass when the bucket has a token for it."""

    def __init__(self, bucket: TokenBucket) -> None:
        self._bucket = bucket

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return the message, or nothing."""
        wait = self._bucket.wait_s(turn.now) if pending else 0.0
        if wait > 0:
            turn.wake_at(turn.now + wait)
            return []
        return pending
