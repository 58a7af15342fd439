"""FetchedRows: the digests of one run at the join, and the rows that nodes are asked for."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sentinel.errors import StoreError, WireError
from sentinel.fleet.digest_book import DigestBook, ReadyRoom
from sentinel.fleet.packed_digest import MAX_DIGEST_BYTES, decode_digest
from sentinel.fleet.sealed import DigestPiece, RowsPiece
from sentinel.ingest.node_digest import NodeDigest
from sentinel.ingest.step_parts import AwayFrame
from sentinel.printable import printable
from sentinel.wire.frame import HEADER_BYTES, MAX_FRAME_BYTES, Buffer, Frame, scan
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import file_name, read_window

log = logging.getLogger("sentinel.fleet")

LOOK_S = 0.02
STALLED_S = 60.0
"""Nodes that speak, and send none of the rows that they are asked for, are waited for so long."""
MAX_WANTED, MAX_WANTED_BYTES = 2048, 128 * 2**10
"""Most frames that one answer asks for, and most bytes of ids of tensors: the others come with the next."""
LEAST_PART_BYTES = 4096
"""Bytes of a part, but for the last, are this many at least: smaller ones take more memory than they have bytes."""
MAX_BEGUN = 8
"""Digests and frames of one node of which parts are here; past it the oldest are dropped, and rows asked for again."""


class _Begun:
    """Something that comes in parts."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.num_bytes = 0

    def add(self, at: int, data: bytes) -> None:
        self.num_bytes += len(data) - len(self.parts.get(at, b""))
        self.parts[at] = data

    def whole(self) -> bytes:
        return b"".join(data for _, data in sorted(self.parts.items()))


class FetchedRows:
    """A `RowSource`, for the thread that judges; the thread of the join brings what nodes send."""

    def __init__(
        self,
        run_dir: Path,
        *,
        owner: Callable[[str], str],
        is_heard: Callable[[str], bool],
        is_refused: Callable[[], bool] = lambda: False,
        wait: Callable[[float], None] = time.sleep,
        room: ReadyRoom | None = None,
    ) -> None:
        """owner: folder of a spool -> the node that it comes from, empty: none. is_heard: whether a node speaks. is_refused:
        whether the disk takes nothing, so that what nodes send cannot be written.

        wait: lets seconds pass in the thread that judges, which may do something else meanwhile. room: as of `DigestBook`.
        """
        self.num_steps = 0
        """Steps of which digests were handed out."""
        self.num_fetched = 0
        """Times that rows were asked for: one a step."""
        self.num_gone = 0
        """Frames that could not be had any more: their rows are not judged."""
        self.why_ended = ""
        """Why nothing is fetched any more; empty: it is."""
        self._spool_dir, self._owner, self._is_heard, self._wait = run_dir / "spool", owner, is_heard, wait
        self._is_refused = is_refused
        self._book = DigestBook(room=room)
        self._begun: dict[str, dict[tuple[object, ...], _Begun]] = {}
        self._wanted = defaultdict[str, dict[AwayFrame, bool]](dict)
        """Node -> frame that it is to send -> whether it is known to be gone."""
        self._some: dict[AwayFrame, bytes] = {}
        """What came of frames of which some rows are wanted."""
        self._lock = threading.Lock()
        self._newest_step = -1

    # For the thread that judges.

    def digest(self, step: int, of: tuple[tuple[bytes, int, int], ...], folders: Sequence[str]) -> NodeDigest | None:
        """Return the digest that a node made of these frames of these spools, all its own; None: there is none."""
        owners = {self._owner(folder) for folder in folders}
        if len(owners) != 1:
            return None
        node = owners.pop()
        try:
            found = self._book.find(node, step, of)
            ranks = [parsed[0] for folder in folders if (parsed := parse_incarnation_folder(folder)) is not None]
            if found is not None and [one.rank for one in found.ranks] != ranks:
                said = [one.rank for one in found.ranks][:8]
                raise WireError(f"digest of step {step}: expected one of ranks {ranks[:8]}, got {said}")
        except WireError as error:
            log.warning("run %s: node %s: %s; its rows are asked for", self._spool_dir.parent.name, printable(node), error)
            return None
        if found is not None and step != self._newest_step:
            self.num_steps, self._newest_step = self.num_steps + 1, step
        return found

    def fetch(self, frames: Sequence[AwayFrame]) -> Mapping[tuple[bytes, int], Buffer]:
        """Return (process, number of the frame) -> payload, or the wanted rows of it. Waits for nodes that speak.

        StoreError: this join is at its end.

        What a node has no more is left out, and what is wanted of one that is silent, or sends nothing for `STALLED_S`.
        """
        found: dict[tuple[bytes, int], Buffer] = {}
        missing = [one for one in frames if not self._read(one, found)]
        advanced, num_missing = time.monotonic(), len(missing)
        self.num_fetched += 1
        with self._lock:
            for one in missing:
                self._wanted[self._owner(one.folder)][one] = False
        try:
            while missing:
                if self.why_ended:
                    raise StoreError(f"{self._spool_dir.parent}: rows of nodes are not to be had: {self.why_ended}")
                self._wait(LOOK_S)
                with self._lock:
                    gone = {one for of_node in self._wanted.values() for one, is_gone in of_node.items() if is_gone}
                    gone.intersection_update(missing)
                gone |= {one for one in missing if not self._is_heard(self._owner(one.folder))}
                missing = [one for one in missing if not self._read(one, found)]
                if len(missing) < num_missing or self._is_refused():
                    advanced, num_missing = time.monotonic(), len(missing)
                elif time.monotonic() - advanced >= STALLED_S:
                    gone.update(missing)
                lost = [one for one in missing if one in gone]
                if lost:
                    self.num_gone += len(lost)
                    log.warning(
                        "run %s: rows of %d frames of %s cannot be had: their node has them no more, says nothing, or sends "
                        "none; that step is judged without them",
                        self._spool_dir.parent.name, len(lost), ", ".join(sorted({one.folder for one in lost})[:8]),
                    )  # fmt: skip
                missing = [one for one in missing if one not in gone]
        finally:
            with self._lock:
                self._wanted.clear()
                self._some.clear()
        return found

    def _read(self, one: AwayFrame, found: dict[tuple[bytes, int], Buffer]) -> bool:
        if one in self._some:
            found[one.incarnation, one.seq] = self._some[one]
            return True
        window = read_window(self._spool_dir / one.folder / file_name(one.file_index), one.offset, one.num_bytes)
        frame = None if window is None else scan(window[0])
        if not isinstance(frame, Frame) or frame.num_bytes_away or frame.header.seq != one.seq:
            return False
        payload = frame.payload if window is None or not one.tensors else one.select(window[0])
        if payload is None:
            return False
        found[one.incarnation, one.seq] = payload
        return True

    # For the thread of the join.

    def forget(self) -> None:
        """Let go of all that nodes sent: of a run that is over nobody asks for it, and rows can be asked for again."""
        self._book.clear()
        self._begun.clear()

    def wanted(self, node: str) -> tuple[AwayFrame, ...]:
        """Return the frames that a node is to send."""
        with self._lock:
            wanted = [one for one, is_gone in self._wanted.get(node, {}).items() if not is_gone and one not in self._some]
        sizes = itertools.accumulate(len(one.tensors) for one in wanted)
        fits = [one for one, size in zip(wanted[:MAX_WANTED], sizes, strict=False) if size <= MAX_WANTED_BYTES]
        return tuple(fits or wanted[:1])

    def take_digest(self, piece: DigestPiece) -> None:
        """Take in a part of a digest. WireError: it is part of none."""
        if not 0 <= piece.part < piece.num_parts or not piece.data:
            raise WireError(f"node {piece.node}: expected a part of a digest, got {piece.part} of {piece.num_parts}")
        begun = self._part_of(piece.node, ("digest", piece.number), piece.part, piece.data, MAX_DIGEST_BYTES)
        if len(begun.parts) < piece.num_parts:
            return
        del self._begun[piece.node]["digest", piece.number]
        self._book.add(piece.node, decode_digest(begun.whole()))

    def take_rows(self, piece: RowsPiece, fill: Callable[[int, int, bytes], bool]) -> int:
        """Take in a part of a frame of rows; returns the bytes that were written. WireError: they are no rows of ours.

        fill: as `SpoolCopy.fill`.
        """
        if not piece.num_bytes:
            with self._lock:
                of_node = self._wanted.get(piece.node, {})
                for one in of_node:
                    if _is_of(one, piece):
                        of_node[one] = True
            return 0
        if piece.tensors:
            return self._take_some(piece)
        if not 0 <= piece.at < piece.at + len(piece.data) <= piece.num_bytes:
            raise WireError(f"node {piece.node}: expected a part of {piece.num_bytes} bytes, got one at {piece.at}")
        key = ("rows", piece.folder, piece.file_index, piece.offset)
        begun = self._part_of(piece.node, key, piece.at, piece.data, min(piece.num_bytes, MAX_FRAME_BYTES))
        if begun.num_bytes < piece.num_bytes:
            return 0
        del self._begun[piece.node][key]
        return piece.num_bytes if fill(piece.file_index, piece.offset, begun.whole()) else 0

    def _take_some(self, piece: RowsPiece) -> int:
        """Take in a part of the rows that are wanted of a frame; returns the bytes of them once all are there."""
        size = piece.num_bytes - HEADER_BYTES
        with self._lock:
            wanted = [one for one in self._wanted.get(piece.node, {}) if _is_of(one, piece)]
        if not wanted:
            return 0
        is_part = 0 <= piece.at < piece.at + len(piece.data) <= size or size == len(piece.data) == piece.at == 0
        if not is_part or size % wanted[0].row_bytes:
            raise WireError(
                f"node {piece.node}: expected a part of {size} bytes, rows of {wanted[0].row_bytes}, got one at {piece.at}"
            )
        key = ("some", piece.folder, piece.file_index, piece.offset, piece.tensors)
        begun = self._part_of(piece.node, key, piece.at, piece.data, min(size, MAX_FRAME_BYTES))
        if begun.num_bytes < size:
            return 0
        del self._begun[piece.node][key]
        with self._lock:
            if piece.node in self._wanted:
                self._some.update(dict.fromkeys(wanted, begun.whole()))
        return size

    def _part_of(self, node: str, key: tuple[object, ...], at: int, data: bytes, most: int) -> _Begun:
        of_node = self._begun.setdefault(node, {})
        begun = of_node.setdefault(key, _Begun())
        begun.add(at, data)
        if begun.num_bytes > most or len(begun.parts) > most // LEAST_PART_BYTES + 1:
            del of_node[key]
            raise WireError(f"node {node}: expected at most {most} bytes, in parts of {LEAST_PART_BYTES}, got more")
        while len(of_node) > MAX_BEGUN:
            del of_node[next(iter(of_node))]
        return begun


def _is_of(one: AwayFrame, piece: RowsPiece) -> bool:
    asked, said = (one.folder, one.file_index, one.offset), (piece.folder, piece.file_index, piece.offset)
    return asked == said and one.tensors == piece.tensors
