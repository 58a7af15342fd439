"""NodeRun: one run of a machine as its shipper follows it: what of it is published next, digests before spools."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sentinel.fleet.node_digests import RunDigests
from sentinel.fleet.node_spool import RESEND_S, NodeSpool
from sentinel.fleet.sealed import (
    MAX_MESSAGE_BYTES,
    PLAIN_VERSION,
    ROOM_BYTES,
    THIN_VERSION,
    DigestPiece,
    FilePlace,
    Published,
    RowsPiece,
    SpoolChunk,
)
from sentinel.fleet.spool_cursor import frames_of_rows, last_index, size_of, without_payloads
from sentinel.ingest.arrivals import Arrivals
from sentinel.ingest.step_parts import AwayFrame
from sentinel.wire.frame import HEADER_BYTES, MAX_FRAME_BYTES
from sentinel.wire.spool_files import file_name, read_name, read_window

CHUNK_BYTES = MAX_MESSAGE_BYTES - ROOM_BYTES
THINNED_BYTES = 4 * 2**20
"""Most bytes of a spool that one chunk without rows stands for, and of rows that are read at once."""
MAX_UNSENT_BYTES = 64 * 2**20
"""Most bytes of digests that wait for a broker that did not take them; of others the join asks for the rows."""


class NodeRun:
    """Moments are monotonic seconds."""

    def __init__(
        self,
        run_dir: Path,
        node: str,
        digested_kinds: frozenset[str] | None,
        arrivals: Callable[[], Arrivals] | None,
        clock: Callable[[], float],
    ) -> None:
        """digested_kinds, clock: as of `NodeRuns`. arrivals: of spools that are copies; None: they are none."""
        self.run_dir, self.name = run_dir, run_dir.name
        self.spools: dict[str, NodeSpool] = {}
        """Folder -> spool."""
        self.echo = ("", 0)
        """(join, stamp) of the newest answer; ("", 0): there was none."""
        self.answered = 0
        """The newest beat to which an answer was taken."""
        self.answered_at = clock()
        """When an answer was taken last, or it began."""
        self.refused: dict[str, tuple[str, float]] = {}
        """Why an answer was not believed, whoever's -> (the same in words, with the first's join, when last)."""
        self.told_all, self.told_to = -math.inf, ""
        """When all was said of all spools, and to which join."""
        self.beaten = -math.inf
        """When heartbeats were published last."""
        self._node, self._kinds, self._arrivals, self._clock = node, digested_kinds, arrivals, clock
        self._digests: RunDigests | None = None
        """None: no join has said yet what it has judged, or none are made."""
        self._num_digests = 0
        self._unsent: list[DigestPiece] = []
        """Pieces of digests that are not published, or could not be, in their order."""
        self._wanted: dict[AwayFrame, float] = {}
        """Frame that the join asks for -> when it was sent last."""
        self._owed: dict[AwayFrame, float] = {}
        """The same of frames that the join is to have before this node ends."""

    @property
    def is_waited_for(self) -> bool:
        """Whether the join waits for rows, or has not spoken yet."""
        return bool(self._wanted) or not self.echo[0]

    def want(self, frames: tuple[AwayFrame, ...]) -> None:
        """Have rows sent that the join asks for, and no others that it asked for before."""
        if self._kinds is None:
            return
        now = self._clock()
        self._wanted = {
            frame: self._wanted.get(frame, now - RESEND_S)
            for frame in frames
            if frame.folder in self.spools and 0 < frame.num_bytes <= MAX_FRAME_BYTES and frame.offset >= 0
        }

    def owe_rows(self) -> None:
        """Have all rows sent that the join has not got and has not committed."""
        now = self._clock()
        for spool in self.spools.values():
            if spool.num_away and not spool.refused:
                for frame in frames_of_rows(spool.cursor.folder, spool.acked):
                    self._owed.setdefault(frame, now - RESEND_S)

    def digest_anew(self, committed: Mapping[str, tuple[int, int]]) -> None:
        """Make digests from what the join has judged on: another join has none of ours, the stream may have lost some."""
        if self._kinds is not None:
            self._unsent.clear()
            self._digests = RunDigests(self.run_dir, self._kinds, self._arrivals or Arrivals, committed)

    def take_back(self, published: Published) -> None:
        """Have what could not be published go again; for rows the join asks again."""
        if isinstance(published, DigestPiece):
            insort(self._unsent, published, key=_order)
            while sum(len(one.data) for one in self._unsent) > MAX_UNSENT_BYTES:
                del self._unsent[0]
        elif isinstance(published, SpoolChunk) and (spool := self.spools.get(published.folder)) is not None:
            spool.take_back(published)

    # What is published next.

    def digested(self) -> Iterator[DigestPiece]:
        """Yield the digests that are new, or were not sent, each once: what comes back meanwhile goes the next time."""
        newest = (0, 0)
        for pieces in itertools.chain([()], self._new_pieces()):
            self._unsent += pieces
            while (at := bisect_right(self._unsent, newest, key=_order)) < len(self._unsent):
                newest = _order(self._unsent[at])
                yield self._unsent.pop(at)

    def _new_pieces(self) -> Iterator[tuple[DigestPiece, ...]]:
        """Yield those of each digest that is new."""
        for data in self._digests.next() if self._digests is not None else ():
            self._num_digests += 1
            cuts = range(0, len(data), CHUNK_BYTES)
            yield tuple(
                DigestPiece(
                    version=THIN_VERSION, node=self._node, run=self.name, number=self._num_digests, part=part,
                    num_parts=len(cuts), data=data[at : at + CHUNK_BYTES],
                )
                for part, at in enumerate(cuts)
            )  # fmt: skip

    def asked(self) -> Iterator[RowsPiece]:
        """Yield the rows that were asked for, unless they are on their way."""
        now, num_bytes = self._clock(), 0
        for sent_at, frame in [(asked, one) for asked in (self._wanted, self._owed) for one in asked]:
            spool = self.spools.get(frame.folder)
            if spool is None or now - sent_at[frame] < RESEND_S or num_bytes > THINNED_BYTES:
                continue
            sent_at[frame] = now
            found = read_window(spool.cursor.folder / file_name(frame.file_index), frame.offset, frame.num_bytes)
            data = b"" if found is None or len(found[0]) < frame.num_bytes else found[0]
            if not data and self._arrivals is not None and _is_behind(spool.cursor.head()[1], frame):
                sent_at[frame] = now - RESEND_S  # Not here yet.
                continue
            size = len(data)
            num_bytes += size
            if data and frame.tensors:
                selected = frame.select(data)
                data, size = selected or b"", 0 if selected is None else HEADER_BYTES + len(selected)
            for at in range(0, max(len(data), 1), CHUNK_BYTES):
                yield RowsPiece(
                    version=THIN_VERSION, node=self._node, run=self.name, folder=frame.folder, file_index=frame.file_index,
                    offset=frame.offset, num_bytes=size, at=at, data=data[at : at + CHUNK_BYTES], tensors=frame.tensors,
                )  # fmt: skip

    def chunk(self, folder: str) -> SpoolChunk | None:
        """Return what comes next of a spool; None: there is nothing, or no digest of it yet."""
        spool = self.spools[folder]
        begin = spool.cursor.place
        most = self._most_bytes(folder, spool)
        if most <= 0:
            return None
        piece = spool.cursor.next(min(most, CHUNK_BYTES if self._kinds is None else THINNED_BYTES))
        data, away = (b"", ()) if piece is None else (piece.data, ()) if self._kinds is None else without_payloads(piece)
        if len(data) + 16 * len(away) > CHUNK_BYTES:
            # What is not rows is long: in smaller pieces.
            spool.cursor.seek(begin)
            piece, away = spool.cursor.next(min(most, CHUNK_BYTES)), ()
            data = b"" if piece is None else piece.data
        if piece is None:
            return None
        return SpoolChunk(
            version=THIN_VERSION if away else PLAIN_VERSION, node=self._node, run=self.name, folder=folder, file=piece.file,
            offset=piece.offset, after=piece.after, size=piece.size, data=data, away=away, turn=spool.turn,
        )  # fmt: skip

    def _most_bytes(self, folder: str, spool: NodeSpool) -> int:
        """Return how many bytes may be published next: of steps whose digests were made, while there are more to make.

        The join asks for the rows of a step that ends before its digest comes: of a backlog it did for nearly every one.
        """
        place = spool.cursor.place
        until = self._digests.read_until(folder) if self._digests is not None else None
        index = last_index(place.file)
        if until is None or until[0] > index + 1:
            most = THINNED_BYTES
        elif until[0] == index:
            most = until[1] - place.offset
        else:
            is_over = not place.file or size_of(spool.cursor.folder / place.file) <= place.offset
            most = until[1] if is_over and until[0] > index else 0 if until[0] < index else THINNED_BYTES
        now = self._clock()
        spool.kept_since = None if most > 0 else now if spool.kept_since is None else spool.kept_since
        # A spool that cannot be read for digests is published all the same.
        return most if spool.kept_since is None or now - spool.kept_since < RESEND_S else THINNED_BYTES


def _order(piece: DigestPiece) -> tuple[int, int]:
    return piece.number, piece.part


def _is_behind(head: FilePlace, frame: AwayFrame) -> bool:
    """Return whether a spool that ends there lacks a frame for it has not come yet. What was thinned comes no more."""
    of_head = (last_index(head.file), head.offset if isinstance(read_name(head.file), int) else math.inf)
    return of_head < (frame.file_index, frame.offset + frame.num_bytes)
