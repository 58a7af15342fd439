"""SpoolCopy: the copy of one spool at the join, written in order whatever the order in which its chunks come."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from pathlib import Path

from sentinel.errors import WireError
from sentinel.fleet.sealed import FilePlace, SpoolChunk
from sentinel.fleet.spool_cursor import last_index
from sentinel.ingest.arrivals import Arrived
from sentinel.private_files import create_file, make_directory
from sentinel.wire.frame import HEADER_BYTES, PREFIX_BYTES, FrameType, peek, without_rows
from sentinel.wire.spool import read_ack
from sentinel.wire.spool_files import file_name, list_files, list_kept, read_name

MAX_EARLY_BYTES = 16 * 2**20
"""Most bytes of chunks that wait for those before them; past it they are dropped, and asked for again."""
ROOM_BYTES = 512
"""What each of them takes beside its bytes: measured, of the objects of Python."""
MAX_INDEX = 10**9
"""Highest index of a file: beyond what any process writes."""


class SpoolCopy:
    """Takes each byte once: what is there already is dropped, what comes early waits. OSError: the disk takes it not."""

    def __init__(self, folder: Path) -> None:
        """folder: of the copy; what lies there is gone on from."""
        self.folder, self._name = folder, str(folder)
        self.num_repeated = 0
        """Chunks of which all was there already."""
        self.num_dropped = 0
        """Chunks that came too early for the room that there is."""
        self.gap = -1
        """`turn` of the newest chunk that came early; -1: none waits for what is before it."""
        self._early: dict[tuple[str, int], SpoolChunk] = {}
        self._early_bytes = 0
        self._arrived: Arrived | None = None
        self.away: dict[tuple[int, int], int] = {}
        """(file index, offset) of frames whose rows are not here -> bytes of the frame; rising."""
        self._ack, self._ack_id, self._ack_looked_at = (0, 0), (0, 0, 0), -math.inf
        """What the daemon has committed, (inode, time, bytes) of the file that says so, and when it was looked at last."""
        self._pruned_before = 0
        self._part: tuple[str, int] = ("", 0)
        """(thinned file of which a part is here, bytes of it)"""
        self._part_end = f".{secrets.token_hex(4)}.part"
        """Of the names of such parts: another process that had this copy, and does not know it yet, has its own."""
        self._drop_parts()
        self.place = self._found()
        """Behind all that is here."""
        self._find_away()

    def begin(self) -> None:
        """Where nothing is here yet, begin with the file in which what is committed ends: what is before it is not taken."""
        index = read_ack(self.folder)[0]
        if index and self.place == FilePlace():
            self.place = FilePlace(file_name(index), 0)

    def take(self, chunk: SpoolChunk) -> int:
        """Write a chunk, and what waited for it; return the bytes that are new on the disk. WireError: no file's name."""
        if last_index(chunk.file) < 0:
            raise WireError(f"spool {self.folder.name}: expected a spool file, got {chunk.file[:64]!r} at {chunk.offset}")
        self._arrived, former = None, self.place
        num_new = self._write(chunk)
        if num_new is None:
            self._keep(chunk)
            return 0
        if num_new == 0 and self.place == former:
            self.num_repeated += 1
            return 0
        has_moved = True
        while self._early and has_moved:
            self._arrived, has_moved = None, False
            for key, one in sorted(self._early.items()):
                wrote = self._write(one)
                if wrote is not None:
                    del self._early[key]
                    self._early_bytes -= ROOM_BYTES + len(one.data)
                    num_new, has_moved = num_new + wrote, True
        self.gap = max((one.turn for one in self._early.values()), default=-1)
        return num_new

    def take_arrived(self) -> Arrived | None:
        """Return what the newest `take` brought, once, where that is bytes at the end of one file, and all are here."""
        arrived, self._arrived = self._arrived, None
        return arrived

    def committed(self, now: float = 0.0, look_s: float = 0.0) -> tuple[int, int]:
        """Return what the daemon has committed: as `read_ack`, for one who asks several times a second.

        now: monotonic seconds. look_s: for so long what was read is taken to be so still.
        """
        if now - self._ack_looked_at < look_s:
            return self._ack
        self._ack_looked_at = now
        try:
            found = os.stat(f"{self._name}/ack")  # noqa: PTH116 -- for each spool of a fleet
        except OSError:
            self._ack = 0, 0
            return self._ack
        if (known := (found.st_ino, found.st_mtime_ns, found.st_size)) != self._ack_id:
            # Looked at before it is read: it is read again if it has changed since.
            self._ack, self._ack_id = read_ack(self.folder), known
        return self._ack

    def prune(self, first: int, acked: tuple[int, int]) -> None:
        """Delete files that the node has no more, as far as the daemon has committed them. first: lowest index there."""
        until = min(first, acked[0])
        if until <= self._pruned_before:
            return
        self._pruned_before = until
        names = [file_name(index) for index in list_files(self.folder) if index < until]
        names += [one.name for one in list_kept(self.folder) if one.last < until]
        for name in names:
            if name != self.place.file:
                with contextlib.suppress(OSError):
                    (self.folder / name).unlink()

    def _write(self, chunk: SpoolChunk) -> int | None:
        """Return the bytes of a chunk that were written; None: what is before it is not there yet."""
        is_whole = isinstance(read_name(chunk.file), int)
        if chunk.file == self.place.file:
            if not is_whole or chunk.offset + chunk.num_bytes <= self.place.offset:
                return 0
            if chunk.offset > self.place.offset:
                return None
            return self._append(chunk, self.place.offset)
        if last_index(chunk.file) < last_index(self.place.file):
            return 0
        if chunk.after != self.place:
            return None
        if is_whole:
            return self._append(chunk, 0) if chunk.offset == 0 else None
        return self._append_part(chunk)

    def _append(self, chunk: SpoolChunk, offset: int) -> int:
        """Write what of a chunk lies behind an offset of its file; return the bytes behind it."""
        behind = offset
        for away, size in chunk.away:
            header = chunk.offset + away - HEADER_BYTES
            if header < offset < chunk.offset + away + size:
                # The beginning of this frame was here before it was whole, as it is: without its rows it has another header.
                offset = header
        index, end = last_index(chunk.file), chunk.offset + chunk.num_bytes
        pieces = chunk.pieces()
        if offset != chunk.offset:
            pieces = [(max(at, offset), data[max(offset - at, 0) :]) for at, data in pieces if at + len(data) > offset]
        fd = self._open(chunk.file)
        try:
            for at, data in pieces:
                _write_all(fd, data, at)
            if chunk.away and os.fstat(fd).st_size < end:
                # Rows that are not here take no room on the disk. Never cut: another join may have this copy by now.
                os.ftruncate(fd, end)
        finally:
            os.close(fd)
        for away, size in chunk.away:
            if chunk.offset + away - HEADER_BYTES >= offset:
                self.away[index, chunk.offset + away - HEADER_BYTES] = HEADER_BYTES + size
        self.place = FilePlace(chunk.file, end)
        self._arrived = Arrived(index, tuple(pieces), end) if pieces and offset == behind else None
        return end - behind

    def _open(self, file: str) -> int:
        path, how = f"{self._name}/{file}", os.O_WRONLY | os.O_NOFOLLOW
        try:
            return os.open(path, how | os.O_CLOEXEC)
        except FileNotFoundError:
            make_directory(self.folder)
            return create_file(Path(path), how)

    def fill(self, file_index: int, offset: int, frame: bytes) -> bool:
        """Write a frame of rows where they were away; return whether they were. WireError: it is another frame.

        The header comes last: until then whoever reads takes them for away.
        """
        if (file_index, offset) not in self.away:
            return False
        fd = os.open(self.folder / file_name(file_index), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            expected = os.pread(fd, HEADER_BYTES, offset)
            if self.away[file_index, offset] != len(frame) or without_rows(frame) != expected:
                raise WireError(f"spool {self.folder.name}: expected the rows at {offset} of file {file_index}, got others")
            _write_all(fd, frame[HEADER_BYTES:], offset + HEADER_BYTES)
            _write_all(fd, frame[:HEADER_BYTES], offset)
        finally:
            os.close(fd)
        del self.away[file_index, offset]
        return True

    def num_away(self, acked: tuple[int, int]) -> int:
        """Return the number of frames whose rows are not here, and are not committed."""
        while self.away and (first := next(iter(self.away))) < acked:
            del self.away[first]
        return len(self.away)

    def _find_away(self) -> None:
        acked = self.committed()
        for index in list_files(self.folder):
            if index < acked[0]:
                continue
            at = acked[1] if index == acked[0] else 0
            fd = os.open(self.folder / file_name(index), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                while (found := peek(os.pread(fd, PREFIX_BYTES, at))) is not None:
                    if found[0] == FrameType.ROWS_AWAY:
                        self.away[index, at] = found[1]
                    at += found[1]
            finally:
                os.close(fd)

    def _append_part(self, chunk: SpoolChunk) -> int | None:
        """Collect a thinned file beside its name, which it gets once it is whole: readers take it for whole."""
        if chunk.offset == 0:
            self._part = (chunk.file, 0)
        if self._part != (chunk.file, chunk.offset):
            return 0 if self._part[0] == chunk.file and chunk.offset < self._part[1] else None
        make_directory(self.folder)
        part = self.folder / f".{chunk.file}{self._part_end}"
        # Never made at an offset: one that another process has deleted meanwhile would begin with a hole.
        how = os.O_WRONLY | os.O_NOFOLLOW
        fd = os.open(part, how | os.O_CLOEXEC) if chunk.offset else create_file(part, how | os.O_TRUNC)
        try:
            _write_all(fd, chunk.data, chunk.offset)
        finally:
            os.close(fd)
        self._part = (chunk.file, chunk.offset + len(chunk.data))
        if self._part[1] >= chunk.size:
            part.replace(self.folder / chunk.file)
            self._part = ("", 0)
            self.place = FilePlace(chunk.file, chunk.size)
        return len(chunk.data)

    def _drop_parts(self) -> None:
        """Delete the parts that another process left: the file is begun anew."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(".*.part"):
                path.unlink()

    def _keep(self, chunk: SpoolChunk) -> None:
        key = (chunk.file, chunk.offset)
        self.gap = max(self.gap, chunk.turn)
        if key in self._early:
            self.num_repeated += 1
        elif self._early_bytes + ROOM_BYTES + len(chunk.data) > MAX_EARLY_BYTES:
            self.num_dropped += 1
        else:
            self._early[key] = chunk
            self._early_bytes += ROOM_BYTES + len(chunk.data)

    def _found(self) -> FilePlace:
        names = [file_name(index) for index in list_files(self.folder)] + [one.name for one in list_kept(self.folder)]
        if not names:
            return FilePlace()
        newest = max(names, key=lambda name: (last_index(name), isinstance(read_name(name), int), name))
        return FilePlace(newest, (self.folder / newest).lstat().st_size)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        num_written = os.pwrite(fd, view, offset)
        view, offset = view[num_written:], offset + num_written
