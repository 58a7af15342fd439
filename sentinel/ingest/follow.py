"""Follows every rank of a run: finds spools as they appear, reads each from where it stood, drops what was heard before."""

from __future__ import annotations

import bisect
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sentinel.errors import WireError
from sentinel.ingest.descriptor_lookup import look_back
from sentinel.ingest.trust import MAX_GAPS, bears_out, leaps, why_contradicted, why_descriptor, why_header
from sentinel.messages import IMPOSSIBLE, Bye, Descriptor, EndStep, Health, Heartbeat, LayoutChange
from sentinel.version import VERSION
from sentinel.wire.frame import (
    DESCRIPTIONS,
    HEADER_BYTES,
    NO_ATTEMPT,
    PROTOCOL,
    Frame,
    FrameType,
    Message,
    decode_message,
)
from sentinel.wire.spool import parse_life_folder
from sentinel.wire.spool_files import file_name
from sentinel.wire.spool_reader import SpoolReader

log = logging.getLogger("sentinel.ingest")

_ROWS = int(FrameType.ROWS)

WINDOW_BYTES = 2**20
"""Most bytes of one spool that are read at a time while few ranks are followed."""
MIN_WINDOW_BYTES = 128 * 2**10
POLL_BYTES = 64 * 2**20
"""Most bytes that one poll reads of all spools together, about."""
MAX_LAYOUTS = 64
"""Descriptors of a life that are remembered."""
DISCOVER_POLLS = 20
"""The folder of spools is listed at least once in so many polls, whatever its time stamp says."""


@dataclasses.dataclass(slots=True, eq=False)
class Incarnation:
    """One process of one rank, from its first frame to its last."""

    id: bytes
    rank: int
    folder: str
    attempt: int | None
    """As it says itself; None: it could not learn it."""
    descriptor: Descriptor | None = None
    """The newest."""
    layout_id: int = 0
    layouts: dict[int, Descriptor] = dataclasses.field(default_factory=dict)
    described_at: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Where in the spool the newest descriptors, and changes of them, begin: in rising order, at most MAX_LAYOUTS."""
    max_seq: int = 0
    gaps: set[int] = dataclasses.field(default_factory=set)
    last_step: int = -1
    """The newest step that it ended."""
    first_wall_ns: int = 0
    """When it wrote its first frame that was read, by its own clock; 0: not known, it was read before a restart of ours."""
    last_wall_ns: int = 0
    heartbeat: Heartbeat | None = None
    bye: Bye | None = None
    """Read ahead: what came before it may not be taken in yet."""
    has_left: bool = False
    """Its bye was taken in, or its process is gone and all that it wrote was."""
    num_frames: int = 0
    num_lost: int = 0
    """Numbers that never came, as far as is known."""
    num_duplicates: int = 0
    num_undecodable: int = 0
    """Frames that were left out because they say what is impossible."""
    leap: tuple[Frame, tuple[int, int]] | None = None
    """A frame that is far ahead of those before it, and where it begins: the next ones tell whether to believe it."""
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    """Layout id -> why what was said of it is impossible; at most MAX_LAYOUTS."""

    def described_before(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return where the layout is described that was in force at a place: (file index, byte offset)."""
        at = bisect.bisect_left(self.described_at, place)
        return self.described_at[at - 1] if at else (place[0], 0)


class SpoolRecord(msgspec.Struct, frozen=True):
    """One frame of a life, heard for the first time."""

    life: Incarnation
    frame: Frame
    begin: tuple[int, int]
    """(file index, byte offset) at which it begins."""
    message: Message | None
    """None for rows."""
    descriptor: Descriptor | None
    """The one its rows point into; None when that was lost."""
    time_ns: int
    """The newest wall clock of the life so far, nanoseconds since the epoch: never falls within a life."""


class SpoolPosition(msgspec.Struct, frozen=True):
    """Where reading a life's spool goes on after a restart."""

    life: bytes
    rank: int
    attempt: int | None
    file_index: int
    offset: int
    seq: int
    """Number of the last frame before; what is not above it was heard."""
    described_at: tuple[int, int]
    last_step: int = -1
    left: str | None = None
    """Why it said bye, where that lies before; None: it has not, or will be read again."""


class RunFollower:
    """Tails the spools of one run. No clock, no thread: `poll` does what there is to do, in bounded memory."""

    def __init__(self, run_dir: Path, *, on_problem: Callable[[str], None] | None = None) -> None:
        """`on_problem` is told, once each, what makes a rank unreadable; by default it is logged."""
        self.run_dir = Path(run_dir)
        self.spool_dir = self.run_dir / "spool"
        self.lives: dict[bytes, Incarnation] = {}
        self.num_bytes = 0
        """Bytes of frames read so far."""
        self.behind: set[bytes] = set()
        """Lives of which more is on disk than was read: nobody may call them late."""
        self._readers: dict[str, SpoolReader] = {}
        self._wall_ns: dict[str, int] = {}
        self._last_life: dict[str, bytes] = {}
        self._behind: set[str] = set()
        self._waiting: list[SpoolRecord] = []
        """Heard, and ahead of somebody who is behind."""
        self._handed: dict[str, tuple[Incarnation, int, int, int]] = {}
        """Folder -> (life, file index, offset behind, seq) of the last record handed out."""
        self._on_problem = on_problem or log.warning
        self._said: set[str] = set()
        self._mtime_ns = -1
        self._polls = 0

    @property
    def num_duplicates(self) -> int:
        """Frames dropped because their (life, seq) was heard before."""
        return sum(life.num_duplicates for life in self.lives.values())

    @property
    def num_lost(self) -> int:
        """Frames whose number never came."""
        return sum(life.num_lost for life in self.lives.values())

    @property
    def num_undecodable(self) -> int:
        """Whole frames whose payload is not what they promise."""
        return sum(life.num_undecodable for life in self.lives.values())

    @property
    def num_corrupt(self) -> int:
        """Regions of spool files that were no frame and were skipped."""
        return sum(reader.num_corrupt for reader in self._readers.values())

    @property
    def num_torn(self) -> int:
        """Torn tails that were cut."""
        return sum(reader.num_torn for reader in self._readers.values())

    @property
    def num_missing_files(self) -> int:
        """Spool files deleted before they were read."""
        return sum(reader.num_missing_files for reader in self._readers.values())

    @property
    def num_foreign(self) -> int:
        """Frames of another protocol version, skipped."""
        return sum(sum(reader.foreign.values()) for reader in self._readers.values())

    def poll(self, *, final: bool = False) -> list[SpoolRecord]:
        """Return what is new, in the order of its wall clocks, each life's own order kept; empty when there is nothing.

        `final`: all writers are gone; torn tails are cut instead of waited for. Reads a bounded amount: ask again until
        it is empty. While catching up, whoever is furthest behind in time is read first, and what is ahead of it waits:
        memory holds few steps, and a life that took another's place is heard after it.
        """
        self._discover()
        num_bytes = 0
        oldest = min((self._wall_ns[folder] for folder in self._behind), default=None)
        unsure: set[str] = set()
        for folder in self._readers:
            if folder in self._behind:
                continue
            if oldest is not None and self._wall_ns[folder] > oldest:
                unsure.add(folder)
            else:
                num_bytes += self._read(folder, final=final)
        while True:
            records = self._due()
            if not self._behind or (records and num_bytes >= POLL_BYTES):
                break
            folder = min(self._behind, key=self._wall_ns.__getitem__)
            before = self._readers[folder].position
            num_bytes += self._read(folder, final=final)
            if self._readers[folder].position == before:
                break  # unreadable just now
            self._waiting = [*records, *self._waiting]
        self.behind = {self._last_life[one] for one in self._behind | unsure if one in self._last_life}
        self.behind |= {record.life.id for record in self._waiting}
        for record in records:
            life, frame = record.life, record.frame
            self._handed[life.folder] = (life, frame.file_index, frame.offset_after, min(frame.header.seq, life.max_seq))
        return records

    def _due(self) -> list[SpoolRecord]:
        """Take out what is not ahead of anybody who is still behind, in the order of time."""
        # Sorting is stable, and the key of a life never falls: its own order is kept.
        self._waiting.sort(key=_time)
        if not self._behind:
            due, self._waiting = self._waiting, []
            return due
        frontier = min(self._wall_ns[folder] for folder in self._behind)
        at = bisect.bisect_right(self._waiting, frontier, key=_time)
        due, self._waiting = self._waiting[:at], self._waiting[at:]
        return due

    def _read(self, folder: str, *, final: bool) -> int:
        """Read one window of one spool; returns the bytes of its frames."""
        reader = self._readers[folder]
        window = max(MIN_WINDOW_BYTES, min(WINDOW_BYTES, POLL_BYTES // len(self._readers)))
        begin = reader.place
        frames = reader.poll(final=final, max_bytes=window)
        (self._behind.discard if reader.is_caught_up else self._behind.add)(folder)
        if reader.foreign:
            self._say_foreign(folder, reader)
        if reader.num_missing_files:
            self._say(
                f"{folder}/missing",
                f"spool {folder}: files before {file_name(reader.file_index)} are gone that nobody had read here; what they "
                f"held is not judged and not counted; who deletes from the spool?",
            )
        if reader.num_corrupt:
            self._say(
                f"{folder}/corrupt",
                f"spool {folder}: expected frames, got bytes that are none, before offset {reader.offset} of "
                f"{file_name(reader.file_index)}; they were skipped and are counted, check this rank's disk",
            )
        num_bytes = 1
        for frame in frames:
            if frame.file_index != begin[0] or not frame.offset_after:
                begin = (frame.file_index, 0)
            records = self._hear(folder, frame, begin)
            frame_bytes = HEADER_BYTES + memoryview(frame.payload).nbytes
            num_bytes += frame_bytes
            self.num_bytes += frame_bytes
            begin = (frame.file_index, frame.offset_after)
            self._wait(folder, records)
        life = self.lives.get(self._last_life.get(folder, b""))
        if final and not frames and life is not None and life.leap is not None:
            leap, life.leap = life.leap, None
            self._wait(folder, self._accept(folder, life, *leap))
        return num_bytes

    def _wait(self, folder: str, records: Sequence[SpoolRecord]) -> None:
        self._waiting += records
        if records:
            self._wall_ns[folder] = records[-1].time_ns

    def is_readable(self, folder: str) -> bool:
        """Return whether a spool folder of this name is followed."""
        return folder in self._readers

    def positions(self) -> dict[str, SpoolPosition]:
        """Return, per spool folder, the place behind the last frame handed out."""
        found = {}
        for folder, (life, file_index, offset, seq) in self._handed.items():
            found[folder] = SpoolPosition(
                life.id, life.rank, life.attempt, file_index, offset, seq, life.described_before((file_index, offset)),
                life.last_step,
            )  # fmt: skip
        return found

    def restore(self, positions: dict[str, SpoolPosition]) -> None:
        """Go on reading at `positions`; descriptors are read again from the spool."""
        for folder, at in positions.items():
            if parse_life_folder(folder) is None:
                continue
            life = Incarnation(at.life, at.rank, folder, at.attempt, max_seq=at.seq, last_step=at.last_step)
            if at.left is not None:
                life.bye, life.has_left = Bye(reason=at.left, step=at.last_step), True
            self.lives[at.life] = life
            self._last_life[folder] = at.life
            self._wall_ns[folder] = 0
            self._readers[folder] = SpoolReader(
                self.spool_dir / folder, file_index=at.file_index, offset=at.offset, seq=at.seq
            )
            # The head of the file has one too, should the other file be gone.
            for place in dict.fromkeys((at.described_at, (at.file_index, 0))):
                described = look_back(self.spool_dir / folder, at.life, place, life.layouts)
                if described is not None:
                    self._describe(life, *described, place)
                    break

    def _discover(self) -> None:
        self._polls += 1
        try:
            mtime_ns = os.stat(self.spool_dir).st_mtime_ns  # noqa: PTH116 -- every few milliseconds
        except OSError:
            return
        if mtime_ns == self._mtime_ns and self._polls % DISCOVER_POLLS:
            return
        self._mtime_ns = mtime_ns
        try:
            names = os.listdir(self.spool_dir)  # noqa: PTH208
        except OSError:
            return
        for name in sorted(names):
            if name not in self._readers and parse_life_folder(name) is not None:
                self._readers[name] = SpoolReader(self.spool_dir / name)
                self._wall_ns[name] = 0

    def _hear(self, folder: str, frame: Frame, begin: tuple[int, int]) -> list[SpoolRecord]:
        header = frame.header
        rank, digits = parse_life_folder(folder) or (0, "")
        why = why_header(header, rank)
        life = self.lives.get(header.life)
        if not why and life is None and header.life.hex()[: len(digits)] != digits:
            why = f"expected the process {digits}, got {header.life.hex()}"
        if why:
            return self._refuse(folder, self.lives.get(self._last_life.get(folder, b"")), frame, begin, why)
        if life is None:
            attempt = None if header.attempt == NO_ATTEMPT else header.attempt
            life = Incarnation(header.life, header.rank, folder, attempt, first_wall_ns=header.wall_ns)
            self.lives[header.life] = life
        self._last_life[folder] = header.life
        if header.seq <= life.max_seq and header.type in DESCRIPTIONS and header.layout_id not in life.layouts:
            # A thinned file is read from its beginning after a restart: its rows point into what it described before.
            self._describe_again(life, frame, begin)
            return []
        records: list[SpoolRecord] = []
        if life.leap is not None:
            is_borne_out = bears_out(life.leap[0].header, header)
            if is_borne_out is not None:
                leap, life.leap = life.leap, None
                if is_borne_out:
                    records = self._accept(folder, life, *leap)
                else:
                    why = leaps(leap[0].header, life.max_seq, life.last_step)
                    records = self._refuse(folder, life, *leap, why)
        if life.leap is None and leaps(header, life.max_seq, life.last_step):
            life.leap = (frame, begin)
            return records
        return records + self._accept(folder, life, frame, begin)

    def _accept(self, folder: str, life: Incarnation, frame: Frame, begin: tuple[int, int]) -> list[SpoolRecord]:
        """Take a frame in whose header can be believed."""
        header = frame.header
        if not self._is_new(life, header.seq):
            return []
        life.num_frames += 1
        message: Message | None = None
        why = life.refused.get(header.layout_id, "") if header.type == _ROWS else ""
        if header.type != _ROWS:
            try:
                message = decode_message(frame)
            except WireError as error:
                why = str(error)
        if isinstance(message, LayoutChange):
            message = self._changed(life, frame, begin, message)
        if isinstance(message, Descriptor):
            why = why_descriptor(message, life.rank)
        why = why or why_contradicted(frame, message, life.layouts.get(header.layout_id, life.descriptor))
        if why:
            return self._refuse(folder, life, frame, begin, why)
        life.last_wall_ns = max(life.last_wall_ns, header.wall_ns)
        if isinstance(message, EndStep):
            life.last_step = header.step
        elif isinstance(message, Descriptor):
            life.refused.pop(header.layout_id, None)
            self._describe(life, header.layout_id, message, begin)
        elif isinstance(message, Heartbeat):
            life.heartbeat = message
        elif isinstance(message, Bye):
            life.bye = message
        return [SpoolRecord(life, frame, begin, message, life.layouts.get(header.layout_id), life.last_wall_ns)]

    def _describe_again(self, life: Incarnation, frame: Frame, begin: tuple[int, int]) -> None:
        try:
            message = decode_message(frame)
        except WireError:
            return
        if isinstance(message, LayoutChange):
            message = self._changed(life, frame, begin, message)
        if isinstance(message, Descriptor) and not why_descriptor(message, life.rank):
            self._describe(life, frame.header.layout_id, message, begin)

    def _refuse(
        self, folder: str, life: Incarnation | None, frame: Frame, begin: tuple[int, int], why: str
    ) -> list[SpoolRecord]:
        """Leave out a frame that says what is impossible: say so, and hand out a health record in its place.

        Where the frame described tensors, the rows that point into its table are left out too, until it comes right.
        """
        header, rank = frame.header, (parse_life_folder(folder) or (0, ""))[0]
        text = (
            f"rank {rank}: spool/{folder}/{file_name(begin[0])} at byte {begin[1]}: {why[:500]}; the frame is left out. Its "
            "checksum is right, so this rank wrote it so: restart the rank, and where it happens again report it and check "
            "the machine's memory"
        )
        self._say(f"{folder}/{IMPOSSIBLE}/{min(header.type, len(FrameType))}", text)
        if life is None:
            return []
        life.num_undecodable += 1
        if header.type in (FrameType.DESCRIPTOR, FrameType.CHANGE) and header.layout_id not in life.layouts:
            life.refused[header.layout_id] = f"its tensors were never described: {why[:200]}"
            if len(life.refused) > MAX_LAYOUTS:
                del life.refused[next(iter(life.refused))]
        stand_in = msgspec.structs.replace(
            header, type=int(FrameType.HEALTH), life=life.id, rank=life.rank, seq=life.max_seq + 1, step=life.last_step,
            row_count=0, wall_ns=life.last_wall_ns,
        )  # fmt: skip
        told = Health(code=IMPOSSIBLE, message=text, site=folder, step=life.last_step)
        held = msgspec.structs.replace(frame, header=stand_in, payload=b"")
        return [SpoolRecord(life, held, begin, told, life.descriptor, life.last_wall_ns)]

    def _changed(self, life: Incarnation, frame: Frame, begin: tuple[int, int], change: LayoutChange) -> Descriptor | None:
        """Return the descriptor that a change makes; None where it is not known of what."""
        known = life.layouts.get(frame.header.layout_id)
        if known is not None:
            return known
        base = life.layouts.get(change.base)
        if base is None and change.base_offset < begin[1]:
            place = (frame.file_index, change.base_offset)
            found = look_back(self.spool_dir / life.folder, life.id, place, life.layouts)
            # What the newest says of a tensor is right but for what was lost between.
            base = found[1] if found is not None and found[0] == change.base else life.descriptor
        if base is None:
            life.num_undecodable += 1
            return None
        return change.applied_to(base)

    @staticmethod
    def _describe(life: Incarnation, layout_id: int, descriptor: Descriptor, begin: tuple[int, int]) -> None:
        life.described_at = [*life.described_at[-(MAX_LAYOUTS - 1) :], begin]
        life.layout_id = layout_id
        # The one that was in force last is forgotten last.
        life.descriptor = life.layouts.pop(layout_id, descriptor)
        life.layouts[layout_id] = life.descriptor
        if len(life.layouts) > MAX_LAYOUTS:
            del life.layouts[next(iter(life.layouts))]

    @staticmethod
    def _is_new(life: Incarnation, seq: int) -> bool:
        if seq > life.max_seq:
            missing = seq - life.max_seq - 1
            if missing:
                life.num_lost += missing
                life.gaps.update(range(max(life.max_seq + 1, seq - MAX_GAPS), seq))
                while len(life.gaps) > MAX_GAPS:
                    life.gaps.remove(min(life.gaps))
            life.max_seq = seq
            return True
        if seq in life.gaps:
            life.gaps.remove(seq)
            life.num_lost -= 1
            return True
        life.num_duplicates += 1
        return False

    def _say_foreign(self, folder: str, reader: SpoolReader) -> None:
        rank = (parse_life_folder(folder) or (0, ""))[0]
        for protocol in reader.foreign:
            self._say(
                f"{rank}/protocol/{protocol}",
                f"record from rank {rank}: expected protocol {PROTOCOL} at most, got {protocol}; "
                f"restart the trainer with sentinel=={VERSION}, or this daemon with the trainer's version",
            )

    def _say(self, key: str, problem: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._on_problem(problem)


def _time(record: SpoolRecord) -> int:
    return record.time_ns
