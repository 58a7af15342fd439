"""The frames of each incarnation of a step that is still open; they are put in order when the step closes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.decision import RankPart
from sentinel.errors import WireError
from sentinel.ingest.incarnation import Incarnation, SpoolRecord
from sentinel.messages import Descriptor, EndStep
from sentinel.record import ROW_DTYPE
from sentinel.wire.frame import HEADER_BYTES, Buffer, Frame, FrameType, row_dtype, scan


class AwayFrame(msgspec.Struct, frozen=True, array_like=True):
    """A frame of rows whose payload this copy of a spool has not got: where the whole frame lies in the spool itself, and
    which of its rows are wanted."""

    folder: str
    file_index: int
    offset: int
    num_bytes: int
    incarnation: bytes
    seq: int
    tensors: bytes = b""
    """[ids] <u4: the rows of these are wanted, and no others; empty: all are."""
    row_bytes: int = 0
    """Where not all are: bytes of a row, and where in it the id of its tensor lies."""
    id_at: int = 0

    def select(self, frame: Buffer) -> bytes | None:
        """Return the wanted rows of the whole frame, as they are in it; None: it is another frame, or none, or has no such
        rows."""
        found = scan(frame)
        if not isinstance(found, Frame) or found.num_bytes_away or found.header.type != FrameType.ROWS:
            return None
        if found.header.seq != self.seq or not 0 <= self.id_at <= self.row_bytes - 4:
            return None
        try:
            rows = np.frombuffer(found.payload, np.uint8).reshape(-1, self.row_bytes)
            wanted = np.frombuffer(self.tensors, "<u4")
        except ValueError:
            return None
        ids = np.ascontiguousarray(rows[:, self.id_at : self.id_at + 4]).view("<u4").reshape(-1)
        return rows[np.isin(ids, wanted)].tobytes()


@dataclasses.dataclass(slots=True)
class RankPartOfStep:
    """The frames of one incarnation of one step."""

    incarnation: Incarnation
    generation: int
    first: tuple[int, tuple[int, int]]
    """Lowest seq and lowest place of its frames; they need not be of the same one."""
    rows: list[tuple[int, int, SpoolRecord]] = dataclasses.field(default_factory=list)
    """(seq, rows, record)"""
    end: SpoolRecord | None = None
    end_step: EndStep | None = None
    num_rows: int = 0
    """Rows that came."""
    has_away: bool = False
    """Whether the rows of any of its frames are away."""
    last_seq: int = 0
    """The highest number of its frames."""
    layout_id: int = 0
    """Id of the newest descriptor that its frames point into: tables only grow within a step."""
    last_wall_ns: int = 0
    """The newest wall clock of its frames."""

    @property
    def is_whole(self) -> bool:
        """Whether its end_step came, and as many rows as the end_step counts."""
        return self.end_step is not None and self.num_rows >= self.end_step.num_rows

    def add(self, record: SpoolRecord) -> None:
        """Take in a frame of rows, or the end of the step; of several ends the first counts."""
        header, message = record.frame.header, record.message
        if header.seq < self.first[0] or record.begin < self.first[1]:
            self.first = earlier(self.first, (header.seq, record.begin))
        if not isinstance(message, EndStep):
            self.rows.append((header.seq, header.row_count, record))
            self.num_rows += header.row_count
            self.has_away |= record.frame.num_bytes_away > 0
        elif self.end is None:
            self.end, self.end_step = record, message
        else:
            return
        if header.seq > self.last_seq:
            self.last_seq, self.layout_id = header.seq, header.layout_id
        self.last_wall_ns = max(self.last_wall_ns, header.wall_ns)

    def decided(self, rank: int) -> RankPart:
        """Return the rank's part for a decision, with the number of rows that were measured and lost."""
        end = self.end_step
        num_lost = 0 if end is None else max(end.num_rows + end.num_dropped_rows - self.num_rows, 0)
        return RankPart(
            rank=rank,
            incarnation=self.incarnation.id,
            num_rows=self.num_rows,
            last_seq=self.last_seq,
            layout_id=self.layout_id,
            generation=self.generation,
            is_ended=end is not None,
            num_lost=num_lost,
            num_finite_lost=0 if end is None else min(num_lost, end.num_finite_dropped),
            lost_to=(end.lost_to or "frames") if end is not None and num_lost else "",
        )

    def wall_ns(self, last_seq: int) -> int:
        """Return the wall clock of its last frame, among those up to last_seq."""
        if last_seq >= self.last_seq:
            return self.last_wall_ns
        walls = [record.frame.header.wall_ns for seq, _, record in self.rows if seq <= last_seq]
        if self.end is not None and self.end.frame.header.seq <= last_seq:
            walls.append(self.end.frame.header.wall_ns)
        return max(walls, default=0)

    def rows_until(
        self, last_seq: int, descriptor: Descriptor, fetched: Mapping[int, Buffer] = MappingProxyType({})
    ) -> npt.NDArray[np.void]:
        """Return the rows of its frames up to last_seq, as they were written: [rows] ROW_DTYPE; a view where it can be.

        descriptor: of frames whose own was lost. fetched: number of a frame -> its payload, of those whose payload is away.
        """
        if len(self.rows) == 1 and self.rows[0][0] <= last_seq:
            return _rows_of(self.rows[0][2], descriptor, fetched)
        found = sorted(self.rows, key=_by_seq)
        rows = [_rows_of(record, descriptor, fetched) for seq, _, record in found if seq <= last_seq]
        return rows[0] if len(rows) == 1 else np.concatenate([np.empty(0, ROW_DTYPE), *rows])

    def num_rows_until(self, last_seq: int) -> int:
        """Return the number of rows of its frames up to last_seq, here or away."""
        return self.num_rows if last_seq >= self.last_seq else sum(count for seq, count, _ in self.rows if seq <= last_seq)

    def some_away_until(self, last_seq: int, descriptor: Descriptor, tensors: npt.NDArray[np.uint32]) -> list[AwayFrame]:
        """Return the frames up to last_seq whose rows are away, of which those of some tensors are wanted.

        descriptor: of frames whose own was lost. tensors: ids, rising.
        """
        ids, found = tensors.astype("<u4").tobytes(), []
        described = {seq: record.descriptor or descriptor for seq, _, record in self.rows}
        for one in self.away_until(last_seq):
            try:
                theirs = row_dtype(described[one.seq])
            except WireError:
                continue
            fields = theirs.fields
            if fields is not None and "tensor" in fields and fields["tensor"][0] == np.dtype("<u4"):
                id_at = int(fields["tensor"][1])
                found.append(msgspec.structs.replace(one, tensors=ids, row_bytes=theirs.itemsize, id_at=id_at))
            else:
                found.append(one)
        return found

    def has_away_until(self, last_seq: int) -> bool:
        """Return whether the rows of any of its frames up to last_seq are away."""
        if last_seq >= self.last_seq:
            return self.has_away
        return any(record.frame.num_bytes_away and seq <= last_seq for seq, _, record in self.rows)

    def away_until(self, last_seq: int) -> list[AwayFrame]:
        """Return the frames up to last_seq whose rows are away."""
        return [
            AwayFrame(
                self.incarnation.folder, frame.file_index, frame.offset_after - frame.num_bytes_away - HEADER_BYTES,
                frame.num_bytes_away + HEADER_BYTES, self.incarnation.id, seq,
            )
            for seq, _, record in self.rows
            if (frame := record.frame).num_bytes_away and seq <= last_seq
        ]  # fmt: skip


@dataclasses.dataclass(slots=True)
class OpenStep:
    """A step that is not closed: parts of ranks are missing, or earlier steps are open."""

    first_received: float
    """Monotonic seconds."""
    parts: dict[tuple[bytes, int], RankPartOfStep] = dataclasses.field(default_factory=dict)
    """By incarnation and generation."""
    of_rank: dict[int, list[RankPartOfStep]] = dataclasses.field(default_factory=dict)
    """The same, by rank."""

    def add(self, record: SpoolRecord, generation: int) -> None:
        """Take in a frame of rows, or an end of the step, of an incarnation's generation."""
        key = (record.incarnation.id, generation)
        part = self.parts.get(key)
        if part is None:
            first = (record.frame.header.seq, record.begin)
            part = self.parts[key] = RankPartOfStep(record.incarnation, generation, first)
            self.of_rank.setdefault(record.incarnation.rank, []).append(part)
        part.add(record)


def earlier(a: tuple[int, tuple[int, int]], b: tuple[int, tuple[int, int]]) -> tuple[int, tuple[int, int]]:
    """Return the lower seq and the lower place of two."""
    return min(a[0], b[0]), min(a[1], b[1])


def _by_seq(item: tuple[int, int, SpoolRecord]) -> int:
    return item[0]


def _rows_of(record: SpoolRecord, descriptor: Descriptor, fetched: Mapping[int, Buffer]) -> npt.NDArray[np.void]:
    """Return the rows of a frame as [rows] ROW_DTYPE, whatever version of the row its writer has; a view where it can be."""
    frame = record.frame
    try:
        theirs = row_dtype(record.descriptor or descriptor)
        payload = fetched.get(frame.header.seq, b"") if frame.num_bytes_away else frame.payload
        found: npt.NDArray[np.void] = np.frombuffer(payload, theirs)
    except (WireError, ValueError):
        return np.empty(0, ROW_DTYPE)
    if theirs is ROW_DTYPE:
        return found
    rows = np.zeros(len(found), ROW_DTYPE)
    for name in set(theirs.names or ()) & set(ROW_DTYPE.names or ()):
        rows[name] = found[name]
    return rows
