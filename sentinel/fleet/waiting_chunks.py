"""WaitingChunks: what came of the spools of a run and waits until no node may be behind of it."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from sentinel.fleet.lockstep import Lockstep
from sentinel.fleet.sealed import FilePlace, SpoolChunk
from sentinel.fleet.spool_copy import SpoolCopy
from sentinel.fleet.spool_cursor import are_heartbeats, is_beyond

LOOK_S = 5.0
"""Seconds between two looks at whose process is gone: thousands are not looked through with each chunk."""


class WaitingChunk:
    """A chunk that waits."""

    __slots__ = ("begin", "came", "chunk", "end", "has_end", "is_beats", "is_here")

    def __init__(self, chunk: SpoolChunk, came: float) -> None:
        self.chunk, self.came = chunk, came
        self.begin, self.end = FilePlace(chunk.file, chunk.offset), FilePlace(chunk.file, chunk.offset + chunk.num_bytes)
        self.is_beats = not (chunk.size or chunk.away) and are_heartbeats(chunk.data)
        """It is heartbeats and nothing else."""
        self.is_here = self.has_end = False
        """Whether all that is before it is here, and whether a step ends in it."""


class WaitingChunks:
    """Of one run. Moments are monotonic seconds."""

    def __init__(
        self, copies: Mapping[str, SpoolCopy], is_live: Callable[[str, float], bool], *, has_lockstep: bool
    ) -> None:
        """copies: folder of a spool -> its copy. is_live: of a folder and as of a moment, whether its node is waited for.

        has_lockstep: ends of steps wait for no node while all ranks are in step.
        """
        self.num_bytes = 0
        """Bytes of all of them."""
        self.dropped_at = -math.inf
        """When one was last forgotten for want of room."""
        self._copies, self._is_live = copies, is_live
        self._all = OrderedDict[WaitingChunk, None]()
        """In the order in which they came. What goes out of turn leaves nothing here: nobody counts what it would hold."""
        self._of = defaultdict[str, list[WaitingChunk]](list)
        """Folder of a spool -> those of it, in the order in which they came."""
        self._lockstep = Lockstep() if has_lockstep else None
        self._ending = dict[str, None]()
        """Folders of spools of which an end of a step waits that goes on where what is here ends."""
        self._look_at = 0.0
        """When to look next whose process is gone."""

    def begin(self, folder: str, now: float) -> None:
        """Take in a spool of which nothing is known."""
        if self._lockstep is not None:
            self._lockstep.begin(folder, now)

    def doubt(self, now: float) -> None:
        """Take note that a node is waited for that was not: its ranks may train with the others."""
        if self._lockstep is not None:
            self._lockstep.doubt(now)
            # Its spools count from now on.
            self._look_at = now

    def hold(self, chunk: SpoolChunk, now: float) -> None:
        """Keep a chunk until it is due."""
        waiting = WaitingChunk(chunk, now)
        if self._lockstep is not None:
            place = self._copies[chunk.folder].place
            waiting.is_here, waiting.has_end = self._lockstep.take(chunk, place, now, is_beats=waiting.is_beats)
            if waiting.has_end:
                self._ending[chunk.folder] = None
        self._all[waiting] = None
        self._of[chunk.folder].append(waiting)
        self.num_bytes += len(chunk.data)

    def of(self, folder: str) -> Sequence[WaitingChunk]:
        """Return what waits of a spool, in the order in which it came."""
        return self._of.get(folder, ())

    def folders(self) -> list[str]:
        """Return the folders of the spools of which anything waits."""
        return [folder for folder, waiting in self._of.items() if waiting]

    @property
    def oldest(self) -> WaitingChunk | None:
        """The one that came first."""
        return next(iter(self._all), None)

    def waited_s(self, now: float) -> float:
        """Return for how long the oldest has waited."""
        oldest = self.oldest
        return now - oldest.came if oldest is not None else 0.0

    def due(self, until: float, now: float, may_act: Callable[[], bool]) -> Iterator[SpoolChunk]:
        """Yield what waits no more; each is written, if the disk takes it, before the next is asked for.

        until: what came up to this moment no node may be behind of. may_act: asked before each.
        """
        while (oldest := self.oldest) is not None and oldest.came <= until and may_act():
            yield self._forget(oldest)
            self._note_written(oldest)
            if self._lockstep is not None and oldest.has_end:
                self._lockstep.prove(oldest.chunk.folder, oldest.came)
        if self._lockstep is None:
            return
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._lockstep.look(lambda folder: self._is_live(folder, now), lambda folder: bool(self._of[folder]), now)
        for folder in self._lockstep.kept_by(self._ending) if self._ending else ():
            # All of it up to the newest end of a step.
            here = [one for one in self._of[folder] if one.is_here]
            num_ending = max((at for at, one in enumerate(here, 1) if one.has_end), default=0)
            for one in here[:num_ending]:
                if not may_act():
                    return
                yield self._forget(one)
                self._note_written(one)
            self._ending.pop(folder, None)

    def drop_newest(self, now: float) -> SpoolChunk:
        """Forget the one that came last, for want of room; return it: its node sends it again."""
        newest = next(reversed(self._all))
        if self._lockstep is not None and newest.is_here:
            self._lockstep.forget(newest.chunk.folder)
        self.dropped_at = now
        return self._forget(newest)

    def _forget(self, waiting: WaitingChunk) -> SpoolChunk:
        del self._all[waiting]
        self._of[waiting.chunk.folder].remove(waiting)
        self.num_bytes -= len(waiting.chunk.data)
        return waiting.chunk

    def _note_written(self, waiting: WaitingChunk) -> None:
        """See whether of what waited of a spool all was written: the disk may not have taken it."""
        if self._lockstep is None:
            return
        folder = waiting.chunk.folder
        place = self._copies[folder].place
        is_lost = waiting.is_here and is_beyond(waiting.end, place)
        if is_lost or not (self._of[folder] or self._lockstep.is_here(folder, place)):
            self._lockstep.forget(folder)
