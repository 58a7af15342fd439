"""What is kept of spool files once the cap is reached: what is worth least goes first, and each step tells what it lost.

Level 1 leaves out finite rows that are no border of the black box, vectors and heartbeats. Level 2 leaves out finite borders
as well. Level 3 leaves out steps in which nothing is non-finite, and of a tensor that stays non-finite all rows but the
first. Level 4 leaves out all but the sum of what was lost. Frames keep their numbers; the end of each step says how many of
its rows are gone, and a `steps_dropped` record how many steps.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from sentinel.collect.retention.losses import Losses
from sentinel.collect.retention.worth import is_nonfinite, is_precious
from sentinel.messages import EndStep, Health, LayoutChange
from sentinel.record import ROW_DTYPE
from sentinel.wire.frame import (
    DESCRIPTIONS,
    Corrupt,
    Foreign,
    Frame,
    FrameType,
    decode_message,
    encode_frame,
    encode_message,
    scan,
)

MAX_LEVEL = 4
_LEAST_LEVEL: dict[int, int] = {FrameType.VECTOR: 1, FrameType.HEARTBEAT: 1, FrameType.ACK: 3, FrameType.HEALTH: 3}
"""The level from which frames of a type are left out; other types have a rule of their own."""


@dataclasses.dataclass(slots=True)
class Distilled:
    """What came of it."""

    num_bytes: int = 0
    """Bytes of the file that was written."""
    has_nonfinite: bool = False
    """It holds a non-finite row or scalar."""
    cut: Losses = dataclasses.field(default_factory=Losses)
    """Steps that lost rows just now."""
    gone: Losses = dataclasses.field(default_factory=Losses)
    """Steps that went whole just now."""


def distil(inputs: list[Path], fd: int, level: int) -> Distilled:
    """Write what a level keeps of spool files, in their order, to an open file. OSError."""
    work = _Distillery(fd, level)
    for path in inputs:
        work.take(path)
    return work.finish()


class _Distillery:
    def __init__(self, fd: int, level: int) -> None:
        self._fd = fd
        self._level = level
        self._done = Distilled()
        self._dropped: dict[int, tuple[int, int]] = {}
        """Step -> (rows, rows that were finite) dropped here, until its end comes."""
        self._bad_steps: dict[int, int] = {}
        """Tensor -> the newest step in which it was non-finite."""
        self._has_bad_rows: set[int] = set()
        """Steps of which a non-finite row is kept, until their end comes."""
        self._gone: Losses = Losses()
        """Steps that went whole, until a frame is written that tells it."""
        self._gone_frame: Frame | None = None
        self._layout = 0
        """Layout that is described in the output, and in force."""
        self._owed: Frame | None = None
        """The newest description, unwritten."""
        self._places: dict[int, int] = {}
        """Layout -> where the output describes it."""
        self._moved: dict[int, int] = {}
        """Offset of a description in the input -> its layout."""

    def take(self, path: Path) -> None:
        """Take in one file."""
        self._moved = {}
        for offset, frame in _frames(path):
            frame_type = frame.header.type
            if frame_type in DESCRIPTIONS:
                self._moved[offset] = frame.header.layout_id
                self._owed = self._rebased(frame)
            elif frame_type == FrameType.ROWS:
                self._take_rows(frame)
            elif frame_type == FrameType.END_STEP:
                self._take_end(frame)
            elif frame_type == FrameType.HEALTH and (reported := _reported_by_spool(frame)) is not None:
                if reported:
                    self._note_gone(frame, reported)
            elif self._level < _LEAST_LEVEL.get(frame_type, MAX_LEVEL + 1):
                self._keep(frame, frame.payload)

    def finish(self) -> Distilled:
        """Write the records that are still held back."""
        self._report_dropped()
        return self._done

    def _take_rows(self, frame: Frame) -> None:
        step = frame.header.step
        rows = np.frombuffer(frame.payload, ROW_DTYPE)
        bad = is_nonfinite(rows)
        kept = is_precious(rows) if self._level == 1 else self._first_of(rows, bad, step) if self._level >= 3 else bad
        if self._level == MAX_LEVEL:
            kept = np.zeros(len(rows), np.bool_)
        num_dropped, num_finite = self._dropped.get(step, (0, 0))
        self._dropped[step] = (num_dropped + int((~kept).sum()), num_finite + int((~kept & ~bad).sum()))
        if kept.any():
            self._done.has_nonfinite |= bool(bad.any())
            if bad.any():
                self._has_bad_rows.add(step)
            self._keep(frame, rows[kept].tobytes(), int(kept.sum()))

    def _first_of(self, rows: np.ndarray, bad: np.ndarray, step: int) -> np.ndarray:
        """Return the non-finite rows of tensors that were finite in the step before."""
        kept = np.zeros(len(rows), np.bool_)
        for at in np.flatnonzero(bad).tolist():
            tensor = int(rows["tensor"][at])
            kept[at] = self._bad_steps.get(tensor, -2) < step - 1
        for tensor in np.unique(rows["tensor"][bad]).tolist():
            self._bad_steps[tensor] = step
        return kept

    def _take_end(self, frame: Frame) -> None:
        end = decode_message(frame)
        assert isinstance(end, EndStep)
        num_dropped, num_finite = self._dropped.pop(end.step, (0, 0))
        is_odd = end.step in self._has_bad_rows or not all(map(math.isfinite, end.scalars.values()))
        self._has_bad_rows.discard(end.step)
        if self._level == MAX_LEVEL or (self._level == MAX_LEVEL - 1 and not is_odd):
            num_rows = end.num_rows + end.num_dropped_rows
            self._note_gone(frame, Losses((end.step, end.step, 1, num_rows)))
            self._done.gone.add(end.step, num_rows)
            return
        self._done.has_nonfinite |= is_odd
        if num_dropped:
            self._done.cut.add(end.step, num_dropped)
            end = msgspec.structs.replace(
                end,
                num_rows=max(end.num_rows - num_dropped, 0),
                num_dropped_rows=end.num_dropped_rows + num_dropped,
                num_finite_dropped=end.num_finite_dropped + num_finite,
                lost_to=",".join(sorted({*filter(None, end.lost_to.split(",")), "cap"})),
            )
        self._keep(frame, encode_message(end))

    def _note_gone(self, frame: Frame, losses: Losses) -> None:
        self._gone.merge(losses)
        self._gone_frame = frame

    def _report_dropped(self) -> None:
        """Say which steps went whole, under the number of the last frame that went with them."""
        frame, self._gone_frame = self._gone_frame, None
        if frame is None:
            return
        health, self._gone = self._gone.as_health(frame.header.rank, "steps_dropped", "cap"), Losses()
        header = msgspec.structs.replace(frame.header, type=int(FrameType.HEALTH), row_count=0)
        self._write(Frame(header, b"", 0), encode_message(health), 0)

    def _rebased(self, frame: Frame) -> Frame:
        """Return a description whose base lies where the output has it."""
        change = decode_message(frame) if frame.header.type == FrameType.CHANGE else None
        if not isinstance(change, LayoutChange):
            return frame
        place = self._places.get(self._moved.get(change.base_offset, 0), 0)
        return msgspec.structs.replace(frame, payload=encode_message(msgspec.structs.replace(change, base_offset=place)))

    def _keep(self, frame: Frame, payload: bytes | bytearray | memoryview, row_count: int = 0) -> None:
        self._report_dropped()
        if frame.header.type in (FrameType.ROWS, FrameType.END_STEP):
            self._describe()
        self._write(frame, payload, row_count)

    def _describe(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None and owed.header.layout_id != self._layout:
            self._layout = owed.header.layout_id
            self._places.setdefault(self._layout, self._done.num_bytes)
            self._write(owed, owed.payload, 0)

    def _write(self, frame: Frame, payload: bytes | bytearray | memoryview, row_count: int) -> None:
        head, body = encode_frame(msgspec.structs.replace(frame.header, row_count=row_count), payload)
        data = head + bytes(body)
        done = 0
        while done < len(data):
            done += os.write(self._fd, data[done:])
        self._done.num_bytes += len(data)


def _reported_by_spool(frame: Frame) -> Losses | None:
    """Return the steps that a record of this spool's own says are gone, none where it only says that the cap is reached.

    None: it is somebody else's record.
    """
    health = decode_message(frame)
    if not isinstance(health, Health):
        return None
    if health.code == "steps_dropped" and health.lost_to == "cap":
        return Losses(*health.runs)
    return Losses() if health.code == "spool_full" else None


def _frames(path: Path) -> Iterator[tuple[int, Frame]]:
    """Yield (offset, frame) of a closed file; what is no frame is gone past."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at = 0
    while at < len(data):
        found = scan(data, at)
        if isinstance(found, Frame):
            yield at, found
            at = found.offset_after
        elif isinstance(found, Corrupt | Foreign):
            at = found.next_offset
        else:
            return
