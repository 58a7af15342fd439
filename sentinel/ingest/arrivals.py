"""Arrivals: what whoever fills a run's spools knows of them, for the follower that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Arrived(NamedTuple):
    """What came to the end of a whole file of a spool, and is there by now."""

    file_index: int
    pieces: tuple[tuple[int, bytes], ...]
    """(offset in the file, bytes), rising, one at least. Between them, and behind them, lie rows that have not come."""
    end: int
    """Offset behind all of it."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return sum(len(data) for _, data in self.pieces)

    def followed_by(self, other: Arrived) -> Arrived | None:
        """Return this and what came behind it; None: that is somewhere else."""
        (last, data), (first, more) = self.pieces[-1], other.pieces[0]
        if (other.file_index, first) != (self.file_index, self.end):
            return None
        joined = ((last, data + more),) if last + len(data) == first else ((last, data), (first, more))
        return Arrived(self.file_index, (*self.pieces[:-1], *joined, *other.pieces[1:]), other.end)


class Unheard(NamedTuple):
    """A machine's node of which nothing was heard for a while."""

    node: str
    seconds: float


NOBODY: Mapping[str, Unheard] = MappingProxyType({})


class Arrivals(NamedTuple):
    """Folders of spools. As it is by default spools fill by themselves, and each is looked at."""

    on_the_way: frozenset[str] = frozenset()
    """Of which more is known to exist than has come here: they are behind, though they were read to their ends."""
    came: Mapping[str, Arrived | None] | None = None
    """To which anything came since this was asked last, and what, where that is known: no other is looked at. None: nobody
    knows."""
    unheard: Mapping[str, Unheard] = NOBODY
    """Of whose node nothing was heard for a while: what comes of them all the same is at least so old, and that more exists
    is no sign of life."""
