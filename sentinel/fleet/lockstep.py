"""Lockstep: which step the ranks of a run have ended, by what is here of their spools, be it written or not.

That nothing older is missing a node says of its spools when it speaks. Ranks that train together say it too, each by the end
of a step: of whoever is at that end, or at the one before it, nothing older can come any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from sentinel.fleet.sealed import FilePlace, SpoolChunk
from sentinel.wire.frame import FrameType, head_of

QUIET_S = 60.0
"""A spool to which nothing came for so long, not even a heartbeat, is that of a process that is gone."""
_END_STEP, _BYE = int(FrameType.END_STEP), int(FrameType.BYE)
_OF_STEPS = frozenset({_END_STEP, int(FrameType.ROWS), int(FrameType.ROWS_AWAY)})


class Lockstep:
    """Of one run. Moments are monotonic seconds."""

    def __init__(self) -> None:
        self._fronts: dict[str, _Front] = {}
        self._steps, self._begun, self._strides = Counter[int](), Counter[int](), Counter[int]()
        """Of the spools that count: newest step that has ended, newest of which there is anything, and how many steps before
        the former the one before ended, each with the number of spools."""
        self._num_unsure = 0
        """Spools that count, of which no two such ends are known, or all nodes have not spoken since the second."""
        self._has_proof = False
        """Whether any spool is proven."""
        self._doubted_at = -math.inf
        """When `doubt` was called last."""

    @property
    def is_kept(self) -> bool:
        """Whether all ranks have ended the same step, or some of them the one before it, and none is beyond the next."""
        if self._num_unsure or not 0 < len(self._steps) <= 2:
            return False
        return max(self._begun) - min(self._steps) <= min(self._strides)

    def begin(self, folder: str, now: float) -> None:
        """Take in a spool of which nothing is known."""
        self._fronts[folder] = _Front(now)
        self._num_unsure += 1

    def take(self, chunk: SpoolChunk, place: FilePlace, now: float, *, is_beats: bool) -> tuple[bool, bool]:
        """Take in a chunk of a spool; return whether it goes on where what is here ends, and whether a step ends in it.

        place: behind what is written of the spool. is_beats: the chunk is heartbeats and nothing else.
        """
        front = self._fronts[chunk.folder]
        here = place if front.here is None else front.here
        end = FilePlace(chunk.file, chunk.offset + chunk.num_bytes)
        is_same = chunk.file == here.file
        if chunk.size or not (chunk.offset <= here.offset < end.offset if is_same else chunk.after == here):
            return False, False
        if is_beats and is_same and front.here is not None and not front.is_over:
            # As most are.
            front.here, front.next, front.grown = end, end.offset, now
            return True, False
        self._count(front, -1)
        at = 0 if not is_same else here.offset if front.here is None else front.next
        kinds, front.next = ([], end.offset) if is_beats else _frames(chunk, at)
        ends = [step for kind, step in kinds if kind == _END_STEP]
        torn = front.torn if is_same else None
        if torn is not None and end.offset >= at:
            ends.insert(0, torn)
            torn = None
        if kinds and kinds[-1][0] == _END_STEP and front.next > end.offset:
            torn = ends.pop()
        has_gone_back = False
        for step in ends:
            has_gone_back |= front.end(step, now)
        front.torn = torn
        front.begun = max((step for kind, step in kinds if kind in _OF_STEPS), default=front.begun)
        if front.next < 0:
            front.forget()
            front.next = end.offset
        front.here, front.grown = end, now
        front.has_left, front.is_over = bool(kinds) and kinds[-1][0] == _BYE, False
        self._count(front, 1)
        if has_gone_back:
            self.doubt(now)
        return True, bool(ends)

    def prove(self, folder: str, came: float) -> None:
        """Take note that all nodes have spoken since a step ended in a spool: ranks that train with it are known.

        came: when the chunk did in which it ended.
        """
        front = self._fronts[folder]
        if not front.is_proven and came >= max(front.to_prove, self._doubted_at):
            self._count(front, -1)
            front.is_proven = self._has_proof = True
            self._count(front, 1)

    def doubt(self, now: float) -> None:
        """Have all be proven anew, by what comes from now on: there is a node that is waited for, whose ranks may train with
        the others, or a rank went back."""
        self._doubted_at = now
        if self._has_proof:
            self._has_proof = False
            for front in self._fronts.values():
                self._count(front, -1)
                front.is_proven = False
                self._count(front, 1)

    def forget(self, folder: str) -> None:
        """Take note that not all is here of a spool that was: where it goes on is seen by what comes next."""
        front = self._fronts[folder]
        self._count(front, -1)
        front.forget()
        front.here = None
        self._count(front, 1)

    def is_here(self, folder: str, place: FilePlace) -> bool:
        """Return whether what is here of a spool ends at a place, or where it ends is not known."""
        return self._fronts[folder].here in (None, place)

    def kept_by(self, folders: Iterable[str]) -> list[str]:
        """Return which of these spools count, while the ranks are in step."""
        return [one for one in folders if not self._fronts[one].is_over] if self.is_kept else []

    def look(self, is_live: Callable[[str], bool], is_waiting: Callable[[str], bool], now: float) -> None:
        """Leave out of account spools whose process is gone, or whose node is waited for no more.

        is_live, is_waiting: of a folder, whether its node is waited for, and whether anything of it is not written.
        """
        for folder, front in self._fronts.items():
            # How far ahead of others it was when it left is seen for as long as that is not read.
            is_gone = (front.has_left or now - front.grown >= QUIET_S) and not is_waiting(folder)
            if (is_over := is_gone or not is_live(folder)) != front.is_over:
                self._count(front, -1)
                front.is_over = is_over
                self._count(front, 1)

    def _count(self, front: _Front, by: int) -> None:
        if front.is_over:
            return
        if front.step is None or not (front.stride and front.is_proven):
            self._num_unsure += by
            return
        begun = max(front.step, front.begun)
        for counter, key in ((self._steps, front.step), (self._begun, begun), (self._strides, front.stride)):
            counter[key] += by
            if not counter[key]:
                del counter[key]


class _Front:
    """How far one spool is here."""

    __slots__ = ("begun", "grown", "has_left", "here", "is_over", "is_proven", "next", "step", "stride", "to_prove", "torn")

    def __init__(self, now: float) -> None:
        self.here: FilePlace | None = None
        """Behind all that came without a gap; None: not known."""
        self.next = 0
        """Offset in that file behind its newest frame, be that here to its end or not."""
        self.grown = now
        self.step: int | None = None
        """The newest that has ended; None: not known."""
        self.torn: int | None = None
        """The step that ends in the newest frame, of which a part is here; None: none does."""
        self.begun = 0
        """The newest of which there is anything in the newest chunk that has steps."""
        self.stride = 0
        """How many steps before it the one before ended; 0: not known, or not before it: training went back."""
        self.is_proven, self.to_prove = False, math.inf
        """As of `Lockstep.prove`, and when that came by which it is to be proven: the second of two ends that rise. Whoever
        trains with it has ended the first by then, be it that training went back before."""
        self.has_left = self.is_over = False
        """Whether the process said goodbye, and whether the spool does not count."""

    def end(self, step: int, now: float) -> bool:
        """Take note of the end of a step; return whether it goes back."""
        has_gone_back = self.step is not None and step <= self.step
        if has_gone_back:
            self.forget()
        if self.step is not None:
            self.stride = step - self.step
            self.to_prove = min(self.to_prove, now)
        self.step = step
        return has_gone_back

    def forget(self) -> None:
        """Take note that ends may have been missed, or that training went back: others may be said to be where they were."""
        self.step, self.stride, self.torn = None, 0, None
        self.is_proven, self.to_prove = False, math.inf


def _frames(chunk: SpoolChunk, at: int) -> tuple[list[tuple[int, int]], int]:
    """Return (type, step) of each frame of a chunk from an offset of its file on, and the offset behind the last; -1: there
    lies something else."""
    found = list[tuple[int, int]]()
    for begin, data in chunk.pieces():
        while begin <= at < begin + len(data):
            head = head_of(memoryview(data)[at - begin :])
            if head is None:
                return found, -1
            found.append((head.type, head.step))
            at += head.num_bytes
    return found, at
