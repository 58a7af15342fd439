"""Backoff: how long a sink that failed is left alone, twice as long each time."""

from __future__ import annotations

import random

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How hard a sink is tried; the fields are those of NotifyConfig."""

    retry_s: float = 1.0
    max_retry_s: float = 60.0
    give_up_after_s: float = 86400.0
    max_pending: int = 5000


class Backoff:
    """Of one sink. rng: spreads the tries of many daemons."""

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy, self._rng = policy, rng
        self._num_failures = 0
        """Since the last success."""
        self._at = self._until = 0.0

    def failed(self, now: float, least_s: float | None) -> float:
        """Take note of a failure, and return the seconds until the next try.

        least_s: how long the sink asks to be left alone; None: it does not say.
        """
        self._num_failures += 1
        wait: float = min(self._policy.retry_s * 2 ** min(self._num_failures - 1, 30), self._policy.max_retry_s)
        wait *= 1.0 + 0.1 * self._rng.random()
        wait = max(wait, least_s or 0.0)
        self._at, self._until = now, now + wait
        return wait

    def succeeded(self) -> None:
        """Take note of a success: the next failure is a first one."""
        self._num_failures = 0

    def until(self, now: float) -> float | None:
        """Return the time of the next try, in seconds since the epoch; None: it may be tried now."""
        # A clock that was set back must not block for longer than was meant.
        return self._until if self._at <= now < self._until else None
