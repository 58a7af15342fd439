"""Expire and Bound: what could not be delivered for too long, and what is too much, is given up and counted."""

from __future__ import annotations

import logging

from sentinel.report.stages.pending import Pending, Turn

_log = logging.getLogger(__name__)


class Expire:
    """Gives up what failed for longer than `give_up_after_s`. What was never tried waits as long as its incident is open."""

    def __init__(self, give_up_after_s: float) -> None:
        self._give_up_after_s = give_up_after_s

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return what is tried on."""
        kept = []
        for one in pending:
            is_old = turn.now - one.since > self._give_up_after_s
            if is_old and (one.num_failures or one.is_maybe_received or one.alert.is_closed):
                turn.settle(one, "expired")
            else:
                kept.append(one)
        return kept


class Bound:
    """Drops what is more than `max_pending`: the oldest first, pages last."""

    def __init__(self, sink: str, max_pending: int) -> None:
        self._sink = sink
        self._max_pending = max_pending

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return at most `max_pending`."""
        excess = len(pending) - self._max_pending
        if excess <= 0:
            return pending
        dropped = sorted(pending, key=lambda one: (one.alert.is_page, one.positions[0]))[:excess]
        for one in dropped:
            turn.settle(one, "dropped")
        _log.error("sink %s: %d alerts dropped, more than %d waited", self._sink, excess, self._max_pending)
        gone = {one.positions[0] for one in dropped}
        return [one for one in pending if one.positions[0] not in gone]
