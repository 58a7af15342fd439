"""Standstill: the line of the user's code at which a rank stands that makes no progress.

Read from outside by the writer thread, with each heartbeat: the training thread pays nothing, and does nothing for it.
"""

from __future__ import annotations

from sentinel.collect.probes.call_sites import CallSites

AFTER = 3
"""Heartbeats, a second apart, without progress before the stack is read. Too small: slow steps pay for it; too large: the
stack of a rank that hangs comes late."""
MAX_CHARACTERS = 200
"""Characters of a line of the stack that are recorded; the rest is cut."""


class Standstill:
    """One for an incarnation, asked with each of its heartbeats."""

    def __init__(self) -> None:
        # Its own: what knows of code objects is no matter of two threads.
        self._sites = CallSites()
        self._place: tuple[object, ...] = ()
        self._num_same = 0

    def site(self, place: tuple[object, ...], thread_id: int) -> str:
        """Return `file:line (function)` where a thread stands; empty: it has moved lately, or runs none of the user's code.

        place: what changes when the rank makes progress.
        """
        self._num_same = self._num_same + 1 if place == self._place else 0
        self._place = place
        if self._num_same < AFTER:
            return ""
        found = self._sites.of_thread(thread_id)
        return "" if found is None else f"{found} ({found.function})"[:MAX_CHARACTERS]
