"""One process of one rank as its spool shows it, a frame of it, and where reading it goes on after a restart."""

from __future__ import annotations

import bisect
import dataclasses

import msgspec

from sentinel.ingest.trust import MAX_GAPS
from sentinel.messages import Bye, Descriptor, Heartbeat
from sentinel.wire.frame import Frame, Message

MAX_LAYOUTS = 64
"""Descriptors of an incarnation that are remembered."""


@dataclasses.dataclass(slots=True, eq=False)
class Incarnation:
    """One process of one rank, from its first frame to its last."""

    id: bytes
    rank: int
    folder: str
    attempt: int | None
    """Its attempt by its descriptor; None: the rank could not learn it."""
    descriptor: Descriptor | None = None
    """The newest."""
    layout_id: int = 0
    layouts: dict[int, Descriptor] = dataclasses.field(default_factory=dict)
    described_at: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Where in the spool the newest descriptors, and changes of them, begin: in rising order, at most MAX_LAYOUTS."""
    max_seq: int = 0
    gaps: set[int] = dataclasses.field(default_factory=set)
    last_step: int = -1
    """The newest step whose end_step came."""
    first_wall_ns: int = 0
    """When it wrote its first frame that was read, by its own clock; 0: not known, it was read before a restart of ours."""
    last_wall_ns: int = 0
    heartbeat: Heartbeat | None = None
    bye: Bye | None = None
    """It was read ahead of older frames, which may still come."""
    has_left: bool = False
    """Its bye was read, or its process is gone and all its frames were read."""
    num_frames: int = 0
    num_lost: int = 0
    """Sequence numbers below the newest whose frame has not come."""
    num_duplicates: int = 0
    num_undecodable: int = 0
    """Number of frames that were refused because their content is impossible."""
    leap: tuple[Frame, tuple[int, int]] | None = None
    """A frame far ahead of those before it, in number or step, and where it begins; the next frame confirms it or not."""
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    """Layout id -> why its descriptor is impossible; at most MAX_LAYOUTS."""

    def describe(self, layout_id: int, descriptor: Descriptor, begin: tuple[int, int]) -> None:
        """Put a descriptor in force that was described at a place, (file index, byte offset)."""
        self.described_at = [*self.described_at[-(MAX_LAYOUTS - 1) :], begin]
        self.layout_id = layout_id
        # The one that was in force last is forgotten last.
        self.descriptor = self.layouts.pop(layout_id, descriptor)
        self.layouts[layout_id] = self.descriptor
        if len(self.layouts) > MAX_LAYOUTS:
            del self.layouts[next(iter(self.layouts))]

    def count(self, seq: int) -> bool:
        """Record the sequence number of a frame; False: it was received before."""
        if seq > self.max_seq:
            missing = seq - self.max_seq - 1
            if missing:
                self.num_lost += missing
                self.gaps.update(range(max(self.max_seq + 1, seq - MAX_GAPS), seq))
                while len(self.gaps) > MAX_GAPS:
                    self.gaps.remove(min(self.gaps))
            self.max_seq = seq
            return True
        if seq in self.gaps:
            self.gaps.remove(seq)
            self.num_lost -= 1
            return True
        self.num_duplicates += 1
        return False

    def described_before(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return where the layout is described that was in force at a place: (file index, byte offset)."""
        at = bisect.bisect_left(self.described_at, place)
        return self.described_at[at - 1] if at else (place[0], 0)


class SpoolRecord(msgspec.Struct, frozen=True):
    """One frame of an incarnation that was not read before."""

    incarnation: Incarnation
    frame: Frame
    begin: tuple[int, int]
    """(file index, byte offset) at which it begins."""
    message: Message | None
    """None for rows."""
    descriptor: Descriptor | None
    """The descriptor whose table its rows point into; None when that was lost."""
    time_ns: int
    """The newest wall clock of the incarnation so far, nanoseconds since the epoch: never falls within an incarnation."""


class SpoolPosition(msgspec.Struct, frozen=True):
    """Where reading an incarnation's spool goes on after a restart."""

    incarnation: bytes
    rank: int
    attempt: int | None
    file_index: int
    offset: int
    seq: int
    """Sequence number of the last frame before this position; frames up to it were read."""
    described_at: tuple[int, int]
    last_step: int = -1
    left: str | None = None
    """In a snapshot of before there was `bye`: its reason."""
    last_wall_ns: int = msgspec.field(name="left_wall_ns", default=0)
    """`Incarnation.last_wall_ns` as of this position; 0: frames behind it that were read are read again, and say."""
    first_wall_ns: int = 0
    """`Incarnation.first_wall_ns`."""
    bye: Bye | None = None
    """Its goodbye, where that lies before this position; None: there is none, or it will be read again."""
