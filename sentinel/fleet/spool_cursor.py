"""SpoolCursor: hands out the bytes of one spool in order, file after file, from any place on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sentinel.fleet.sealed import FilePlace
from sentinel.ingest.step_parts import AwayFrame
from sentinel.wire.frame import HEADER_BYTES, FrameType, head_of, peek, without_rows
from sentinel.wire.spool_files import (
    KeptFile,
    covering,
    file_name,
    list_files,
    list_kept,
    next_place,
    read_name,
    read_window,
)


class SpoolPiece(msgspec.Struct, frozen=True):
    """Bytes of one file, as `SpoolChunk` has them."""

    file: str
    offset: int
    after: FilePlace
    size: int
    data: bytes

    @property
    def end(self) -> FilePlace:
        """The place behind it; of a part of a thinned file that is not its last, the place before that file."""
        if self.size and self.offset + len(self.data) < self.size:
            return self.after
        return FilePlace(self.file, self.offset + len(self.data))


class SpoolCursor:
    """Reads, and never waits. A thinned file is handed out whole, or begun anew; one that is gone is passed over."""

    def __init__(self, folder: Path, place: FilePlace = FilePlace()) -> None:  # noqa: B008 -- frozen
        self.folder = folder
        self.place = place
        """Behind what was handed out."""
        self._kept: KeptFile | None = None
        """The thinned file of which a part was handed out."""
        self._kept_offset = 0

    def seek(self, place: FilePlace) -> None:
        """Go on at another place."""
        self.place, self._kept, self._kept_offset = place, None, 0

    def next(self, max_bytes: int) -> SpoolPiece | None:
        """Return the next bytes, up to `max_bytes`, as far as possible whole frames; None: there are none just now."""
        known = read_name(self.place.file)
        if isinstance(known, int) and self._kept is None:
            # Looked for before reading: a writer begins a new file only when it has done with the last.
            has_next = (self.folder / file_name(known + 1)).exists()
            found = read_window(self.folder / self.place.file, self.place.offset, max_bytes)
            if found is not None and not found[0] and not has_next:
                if next_place(self.folder, known) is None:
                    return None
                # One has been begun since: what the last was given before that is read first.
                found = read_window(self.folder / self.place.file, self.place.offset, max_bytes)
            if found is not None and found[0]:
                data = found[0][: _aligned(found[0])]
                piece = SpoolPiece(self.place.file, self.place.offset, self.place, 0, data)
                self.place = piece.end
                return piece
            if found is None and (kept := covering(self.folder, known)) is not None:
                return self._next_kept(kept, max_bytes)
        if self._kept is not None:
            part = self._next_kept(self._kept, max_bytes)
            if part is not None:
                return part
        return self._begin(-1 if known is None else known if isinstance(known, int) else known.last, max_bytes)

    def head(self) -> tuple[int, FilePlace, int]:
        """Return (lowest index of anything there, the place behind all, bytes behind the cursor's place)."""
        whole, kept = list_files(self.folder), list_kept(self.folder)
        if not whole and not kept:
            return 0, FilePlace(), 0
        first = min([*whole[:1], *(one.first for one in kept)])
        sizes = {file_name(index): size_of(self.folder / file_name(index)) for index in whole}
        sizes |= {one.name: size_of(self.folder / one.name) for one in kept}
        at = last_index(self.place.file)
        # Of a file that is empty nothing can come.
        sizes = {name: size for name, size in sizes.items() if size} or {"": 0}
        waiting = sum(size for name, size in sizes.items() if last_index(name) > at)
        if self.place.file in sizes:
            waiting += max(0, sizes[self.place.file] - self.place.offset)
        newest = max(sizes, key=lambda name: (last_index(name), "-" not in name))
        return first, FilePlace(newest, sizes[newest]), waiting

    def _begin(self, after: int, max_bytes: int) -> SpoolPiece | None:
        """Return the first bytes of whatever comes behind an index."""
        index = next_place(self.folder, after)
        if index is None:
            return None
        found = read_window(self.folder / file_name(index), 0, max_bytes)
        if found is None:
            kept = covering(self.folder, index)
            return None if kept is None else self._next_kept(kept, max_bytes)
        if not found[0] and (size_of(self.folder / file_name(index)) or next_place(self.folder, index) is None):
            return None
        # One that is empty and has another behind it stays so: a writer that could not begin it left it there.
        piece = SpoolPiece(file_name(index), 0, self.place, 0, found[0][: _aligned(found[0])])
        self.place = piece.end
        return piece

    def _next_kept(self, kept: KeptFile, max_bytes: int) -> SpoolPiece | None:
        if kept != self._kept:
            self._kept, self._kept_offset = kept, 0
        found = read_window(self.folder / kept.name, self._kept_offset, max_bytes)
        # Of one of which nothing was kept that it is there is handed out: what lies behind it goes on from it.
        if found is None or (not found[0] and (self._kept_offset or size_of(self.folder / kept.name))):
            self._kept, self._kept_offset = None, 0
            return None
        data, size = found
        piece = SpoolPiece(kept.name, self._kept_offset, self.place, size, data)
        self._kept_offset += len(data)
        if self._kept_offset >= size:
            self.seek(piece.end)
        return piece


def without_payloads(piece: SpoolPiece) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """Return the bytes of a piece without the payloads of rows, and (offset in the piece, bytes) of each of those.

    Of whole files alone: what was thinned is kept as it is.
    """
    if piece.size:
        return piece.data, ()
    data, kept, away, at, begin = piece.data, [], [], 0, 0
    while (found := peek(data, at)) is not None and at + found[1] <= len(data):
        head = without_rows(data[at : at + found[1]]) if found[0] == FrameType.ROWS else None
        if head is not None and found[1] > HEADER_BYTES:
            kept += [data[begin:at], head]
            begin = at + found[1]
            away.append((at + HEADER_BYTES, found[1] - HEADER_BYTES))
        at += found[1]
    return b"".join([*kept, data[begin:]]), tuple(away)


def are_heartbeats(data: bytes) -> bool:
    """Return whether there are heartbeats here and nothing else."""
    at = 0
    while (found := peek(data, at)) is not None and found[0] == FrameType.HEARTBEAT:
        at += found[1]
    return at == len(data) > 0


def frames_of_rows(folder: Path, after: tuple[int, int]) -> Iterator[AwayFrame]:
    """Yield the frames of rows of a spool's whole files behind (file index, offset)."""
    for index in list_files(folder):
        if index < after[0]:
            continue
        path, at = folder / file_name(index), after[1] if index == after[0] else 0
        while (window := read_window(path, at, HEADER_BYTES)) and (head := head_of(window[0])) is not None:
            if head.type == FrameType.ROWS:
                yield AwayFrame(folder.name, index, at, head.num_bytes, b"", 0)
            at += head.num_bytes


@functools.lru_cache(maxsize=65536)
def last_index(name: str) -> int:
    """Return the highest index of which a file of this name has anything; -1: it is no spool file."""
    known = read_name(name)
    return -1 if known is None else known if isinstance(known, int) else known.last


def is_beyond(head: FilePlace, place: FilePlace) -> bool:
    """Return whether one place in a spool lies behind another."""
    if head.file == place.file:
        return head.offset > place.offset
    return last_index(head.file) > last_index(place.file)


def _aligned(data: bytes) -> int:
    """Return the bytes of the whole frames in front; of all where there are none: a part of a long frame, or a torn one."""
    at = 0
    while (found := peek(data, at)) is not None and at + found[1] <= len(data):
        at += found[1]
    return at or len(data)


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0: there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0
