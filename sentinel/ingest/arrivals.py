"""Arrivals: what whoever fills a run's spools knows of them, for the follower that reads them."""

from __future__ import annotations

from typing import NamedTuple


class Arrivals(NamedTuple):
    """Folders of spools. As it is by default spools fill by themselves, and each is looked at."""

    on_the_way: frozenset[str] = frozenset()
    """Of which more is known to exist than has come here: they are behind, though they were read to their ends."""
    came: frozenset[str] | None = None
    """To which anything came since this was asked last: no other is looked at. None: nobody knows."""
