"""Reads the spool of one incarnation: whole files, and what is kept of those that were thinned at the cap."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sentinel.wire.frame import DESCRIPTIONS, Corrupt, Foreign, Frame, FrameType, scan
from sentinel.wire.spool_files import KeptFile, covering, file_name, next_place, read_window

READ_BYTES = 16 * 2**20
"""Most bytes of one file that one poll takes in, unless a single frame is longer."""
AWAY_BYTES = 4 * 2**10
"""Read at a time where rows are away: what is between those of two steps, and not their place."""
LOOK_POLLS = 64
"""The folder is listed at least once in so many polls that brought nothing."""


class SpoolReader:
    """Reads the frames of one incarnation's folder from a position on, whole and checked; never raises for what it reads.

    A torn tail is waited for while its writer may live, and cut when a newer file exists or the end is said. A region
    that is no frame is skipped up to the next valid one, and counted. Where files were thinned at the cap, before or while
    they are read, it goes on with what is kept of them, behind the last number that it handed out.
    """

    def __init__(self, directory: Path, *, file_index: int = 0, offset: int = 0, seq: int = 0) -> None:
        """seq: number of the last frame that was handed out before; of a thinned file only what is above it comes."""
        self.directory = Path(directory)
        self._folder = str(self.directory)
        self._wanted = 0
        """Bytes behind the offset up to the end of the frame that the last window ended within."""
        self._has_away = False
        """Whether the newest rows were away."""
        self.file_index = file_index
        """Of the file that is read; of what is kept of several, the last."""
        self.offset = offset
        self._seq = seq
        self._kept: KeptFile | None = None
        """The thinned file that is read; None: a whole one is."""
        self._num_looks = 0
        self.num_corrupt = 0
        """Regions that were skipped, since the beginning."""
        self.num_corrupt_bytes = 0
        self.num_torn = 0
        """Tails that were cut."""
        self.num_missing_files = 0
        """Files deleted before they were read."""
        self.foreign: dict[int, int] = {}
        """Protocol version -> frames of it that were skipped."""
        self.is_caught_up = True
        """Whether the last poll saw the end of the newest file."""

    @property
    def position(self) -> tuple[int, int]:
        """(file index, byte offset) behind the last frame handed out."""
        return self.file_index, self.offset

    @property
    def place(self) -> tuple[int, int]:
        """Where to read on after a restart: the position; of a thinned file its beginning, for it may be thinned again."""
        return self.file_index, 0 if self._kept is not None else self.offset

    def poll(self, *, final: bool = False, max_bytes: int = READ_BYTES) -> list[Frame]:
        """Return the next frames, in order; empty when there is nothing new. `final`: the writer is gone for good.

        At most about `max_bytes` are read; ask again until it is empty.
        """
        frames: list[Frame] = []
        self.is_caught_up = True
        until = self.offset + max_bytes
        while not frames or (self._has_away and not self.is_caught_up and self.offset < until):
            # Looked for before reading: a writer begins a new file only when it has done with the last.
            has_newer = self._has_newer(final)
            window = min(max_bytes, max(AWAY_BYTES, self._wanted)) if self._has_away else max_bytes
            found = self._read(window)
            if found is None:
                if frames or not self._go_round():
                    break
                continue
            data, num_behind = found
            is_whole = not num_behind
            self.is_caught_up = is_whole and not has_newer
            is_over = is_whole and (has_newer or final)
            if data:
                consumed = self._parse(data, frames, num_behind, is_over=is_over)
                if consumed == 0 and not is_whole:
                    max_bytes = max(2 * max_bytes, self._wanted)  # one frame longer than the window
                if not is_whole:
                    continue
            if not is_over or not has_newer or frames:
                break
            self.file_index, self.offset, self._kept = self.file_index + 1, 0, None
            until = max_bytes
        if frames:
            self._seq = max(self._seq, max(frame.header.seq for frame in frames))
        return frames

    def take(self, file_index: int, pieces: Sequence[tuple[int, bytes]], end: int) -> list[Frame] | None:
        """Return the frames of what came to the end of a file, in place of `poll`; None: it does not go on from here.

        pieces: (offset, bytes), between which lie the payloads of rows that are away. end: offset behind all of it, at which
        the file ended.
        """
        if self._kept is not None or (file_index, pieces[0][0]) != (self.file_index, self.offset):
            return None
        frames: list[Frame] = []
        self.is_caught_up = True
        for offset, data in pieces:
            if offset != self.offset:
                # What is between them is not what it is said to be: it is read.
                self.is_caught_up = False
                break
            self._parse(data, frames, end - offset - len(data), is_over=False)
        if frames:
            self._seq = max(self._seq, max(frame.header.seq for frame in frames))
        return frames

    def _has_newer(self, final: bool) -> bool:
        if self._kept is not None or os.path.exists(f"{self._folder}/{file_name(self.file_index + 1)}"):  # noqa: PTH110
            return True
        # A writer that was killed while it thinned files leaves a whole one behind which only a thinned one comes.
        self._num_looks += 1
        return (final or self._num_looks % LOOK_POLLS == 0) and next_place(self.directory, self.file_index) is not None

    def _go_round(self) -> bool:
        """Find where to read on, the file that was read not being there (any more); False: nowhere yet."""
        # Looked for first: what lies before it was written before it, be it since the read that found nothing.
        later = next_place(self.directory, self.file_index)
        if later is not None and self._kept is None and self._read(1) is not None:
            return True
        kept = covering(self.directory, self.file_index)
        if kept is not None and kept != self._kept:
            self._kept, self.file_index, self.offset = kept, kept.last, 0
            return True
        if later is None:
            return False
        self.num_missing_files += later - self.file_index
        self._kept, self.file_index, self.offset = None, later, 0
        return True

    def _read(self, max_bytes: int) -> tuple[bytes, int] | None:
        """Return (what lies behind the offset, at most max_bytes; bytes behind that); None when there is no such file."""
        name = file_name(self.file_index) if self._kept is None else self._kept.name
        found = read_window(f"{self._folder}/{name}", self.offset, max_bytes)
        return None if found is None else (found[0], max(0, found[1] - self.offset - len(found[0])))

    def _parse(self, data: bytes, frames: list[Frame], num_behind: int, *, is_over: bool) -> int:
        """Take the frames out of `data`, which begins at the offset; returns the bytes that are done with."""
        base, at, bad_from = self.offset, 0, -1
        done = self._wanted = 0
        while at < len(data):
            found = scan(data, at, base, self.file_index, num_behind)
            if isinstance(found, (Frame, Foreign)):
                if bad_from >= 0:
                    self._count_corrupt(at - bad_from)
                    bad_from = -1
                if isinstance(found, Frame):
                    at = found.offset_after - base
                    if found.header.type == FrameType.ROWS:
                        self._has_away = bool(found.num_bytes_away)
                    if self._kept is None:
                        frames.append(found)
                    elif found.header.seq > self._seq or found.header.type in DESCRIPTIONS:
                        frames.append(msgspec.structs.replace(found, offset_after=0))
                else:
                    self.foreign[found.protocol] = self.foreign.get(found.protocol, 0) + 1
                    at = found.next_offset
                done = at
            elif isinstance(found, Corrupt):
                bad_from = at if bad_from < 0 else bad_from
                at = found.next_offset
            elif is_over:
                # The rest of a torn frame never comes, but frames may have been written behind it.
                bad_from = at if bad_from < 0 else bad_from
                at = _next_magic(data, at)
            else:
                self._wanted = at - done + found.num_bytes
                break
        if is_over and done < len(data):
            self.num_torn += 1
            self.num_corrupt_bytes += len(data) - done
            done = len(data)
        elif bad_from == 0 and num_behind:  # a window that begins with rubbish and holds no frame: go past it
            self._count_corrupt(at)
            done = at
        self.offset = base + done
        return done

    def _count_corrupt(self, num_bytes: int) -> None:
        self.num_corrupt += 1
        self.num_corrupt_bytes += num_bytes


def _next_magic(data: bytes, at: int) -> int:
    found = data.find(b"SNTL", at + 1)
    return found if found >= 0 else len(data)
