"""The order in which a chunk's sites first appear in its forward, as the numbers `site_pos`."""

from __future__ import annotations

from bisect import bisect_right, insort

from sentinel.collect.hooks.sites import BORDER
from sentinel.collect.rows.tensor_table import TensorEntry

SITE_GAP = 64
"""Distance of two neighbouring sites. Too small: sites first seen in a later forward find no place between them; too large:
large models run out of 2**31 positions."""
BORDER_GAP = 2**18
"""Distance of a border from the site before it: room for 4,096 sites of its segment, whose modules may be switched on
later, and positions for 8,192 borders."""
LAST = 2**31 - 1


class SiteNumbering:
    """Gives each site a place behind the one that passed before it, which it keeps whichever other sites are measured."""

    def __init__(self) -> None:
        self.cursor = 0
        """site_pos of the site that the running forward passed last."""
        self._taken: list[int] = []
        self._placed: set[int] = set()
        """Ids of the entries that have a place."""

    def begin(self) -> None:
        """Begin a forward: none of its sites has passed yet."""
        self.cursor = 0

    def place(self, entry: TensorEntry) -> None:
        """Set the `site_pos` of a site when it first appears in a forward.

        One that appears later (its module was switched on, or its output is usually handed on as it is) comes right behind
        the site before it, so that ranks which never see it agree on all others.
        """
        if entry.id not in self._placed:
            self._placed.add(entry.id)
            entry.site_pos = self._next(BORDER_GAP if entry.flags & BORDER else SITE_GAP)
            insort(self._taken, entry.site_pos)
        self.cursor = entry.site_pos

    def behind(self, entry: TensorEntry) -> int:
        """Return the place between a site and those that follow, for what its tensor was handed on as."""
        return min(entry.site_pos + 1, LAST)

    def _next(self, gap: int) -> int:
        at = bisect_right(self._taken, self.cursor)
        if at == len(self._taken):
            return min(self.cursor + gap, LAST)
        room = self._taken[at] - self.cursor
        return self.cursor + (SITE_GAP if room > 2 * SITE_GAP else min(1, room - 1))
