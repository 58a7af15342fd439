"""Follows every rank of a run: finds spools as they appear, reads each from its last position, drops repeated frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from sentinel.ingest.arrivals import NOBODY, Arrivals, Arrived, Unheard
from sentinel.ingest.descriptor_lookup import look_back
from sentinel.ingest.incarnation import Incarnation, SpoolPosition, SpoolRecord
from sentinel.ingest.problem_log import Problems
from sentinel.ingest.screening import Screening
from sentinel.ingest.time_order import TimeOrder
from sentinel.messages import Bye
from sentinel.version import VERSION
from sentinel.wire.frame import HEADER_BYTES, PROTOCOL
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import file_name
from sentinel.wire.spool_reader import SpoolReader

WINDOW_BYTES = 2**20
"""Most bytes of one spool that are read at a time while few ranks are followed."""
MIN_WINDOW_BYTES = 128 * 2**10
POLL_BYTES = 64 * 2**20
"""Most bytes that one poll reads of all spools together, about."""
DISCOVER_POLLS = 20
"""Polls after which the folder of spools is listed even if its time stamp has not changed."""


class RunFollower:
    """Tails the spools of one run. Has no clock and no thread: `poll` reads what is new, in bounded memory."""

    def __init__(
        self,
        run_dir: Path,
        *,
        on_problem: Callable[[str], None] | None = None,
        arrivals: Callable[[], Arrivals] = Arrivals,
        first_file: Callable[[str], int] = lambda folder: 0,
    ) -> None:
        """on_problem: called once with each reason why a rank cannot be read; by default the reason is logged.

        arrivals: asked at each poll. first_file: folder of a spool -> index of the file with which reading it begins.
        """
        self.run_dir = Path(run_dir)
        self.spool_dir = self.run_dir / "spool"
        self.num_bytes = 0
        """Bytes of frames read so far."""
        self.behind: set[bytes] = set()
        """Incarnations of which more is on disk than was read, which therefore do not count as late."""
        self.followed: set[bytes] = set()
        """The newest known incarnation of each rank of which another has written, and nothing of that was read: it may be
        over, and its silence tells nothing."""
        self.unheard: Mapping[str, Unheard] = NOBODY
        """Folders of spools, as of `Arrivals`, as of the newest poll."""
        self._arrivals, self._first_file = arrivals, first_file
        self._on_the_way: frozenset[str] = frozenset()
        """As of the newest poll."""
        self._unread: dict[str, Arrived | None] = {}
        """Folders of spools that are to be looked at: they are new, something came, or more was there than was read; with
        what came, where that is all."""
        self._problems = Problems(on_problem)
        self._screening = Screening(self.spool_dir, self._problems)
        self._order = TimeOrder()
        self._readers: dict[str, SpoolReader] = {}
        self._numbers: dict[str, int] = {}
        """Folder -> its number in the order of these."""
        self._handed: dict[str, tuple[Incarnation, int, int, int]] = {}
        """Folder -> (incarnation, file index, offset behind, seq) of the last record handed out."""
        self._mtime_ns = -1
        self._polls = 0

    @property
    def incarnations(self) -> dict[bytes, Incarnation]:
        """The processes of all ranks whose frames were read, by id."""
        return self._screening.incarnations

    @property
    def num_duplicates(self) -> int:
        """Number of frames dropped because their (incarnation, seq) was read before."""
        return sum(incarnation.num_duplicates for incarnation in self.incarnations.values())

    @property
    def num_lost(self) -> int:
        """Number of sequence numbers whose frame never came."""
        return sum(incarnation.num_lost for incarnation in self.incarnations.values())

    @property
    def num_undecodable(self) -> int:
        """Number of whole frames whose payload does not have the format of their type."""
        return sum(incarnation.num_undecodable for incarnation in self.incarnations.values())

    @property
    def num_corrupt(self) -> int:
        """Number of regions of spool files that were no frame and were skipped."""
        return sum(reader.num_corrupt for reader in self._readers.values())

    @property
    def num_torn(self) -> int:
        """Number of spool files whose last frame was incomplete and was cut off."""
        return sum(reader.num_torn for reader in self._readers.values())

    @property
    def num_missing_files(self) -> int:
        """Number of spool files deleted before they were read."""
        return sum(reader.num_missing_files for reader in self._readers.values())

    @property
    def num_foreign(self) -> int:
        """Frames of another protocol version, skipped."""
        return sum(sum(reader.foreign.values()) for reader in self._readers.values())

    def poll(self, *, final: bool = False) -> list[SpoolRecord]:
        """Return what is new, in the order of its wall clocks, each incarnation's own order kept; empty when there is
        nothing.

        `final`: all writers are gone; torn tails are cut instead of waited for. Reads a bounded amount: ask again until
        it is empty. While catching up, whoever is furthest behind in time is read first, and what is ahead of it waits:
        memory holds few steps, and an incarnation that took another's place is read after it.
        """
        # Asked before anything is read: what came by then is read below.
        arrivals = Arrivals() if final else self._arrivals()
        self._discover()
        if arrivals.came is None:
            self._unread.update(dict.fromkeys(self._readers))
        else:
            for folder, arrived in arrivals.came.items():
                # What came in two times is read; and where this does not go on at, the reader sees.
                self._unread[folder] = arrived if self._unread.get(folder) is None else None
            for folder in arrivals.on_the_way ^ self._on_the_way:
                self._unread.setdefault(folder)
        self._on_the_way, self.unheard = arrivals.on_the_way, arrivals.unheard
        is_told = arrivals.came is not None
        num_bytes = 0
        order = self._order
        unread = self._in_order(self._unread)
        ahead = order.ahead(unread)
        waits = {*order.behind, *ahead}
        for folder in unread:
            if folder not in waits:
                num_bytes += self._read(folder, final=final, is_told=is_told)
        records: list[SpoolRecord] = []
        while order.behind or ahead:
            if ahead and not order.is_ahead(ahead[0]):
                # Whom it was ahead of has been read: it is next, before anything is handed out that others wrote since.
                num_bytes += self._read(ahead.popleft(), final=final, is_told=is_told)
                continue
            if num_bytes >= POLL_BYTES and (records := order.due()):
                break
            folder = order.furthest_behind()
            before = self._readers[folder].position
            num_bytes += self._read(folder, final=final, is_told=is_told)
            if self._readers[folder].position == before and folder in order.behind:
                break  # unreadable just now
        records = records or order.due()
        newest = {folder: self._screening.newest_of(folder) for folder in (*order.behind, *ahead)}
        self.behind = {incarnation.id for incarnation in newest.values() if incarnation is not None}
        self.behind |= {record.incarnation.id for record in order.waiting}
        self.followed = self._followed_by([folder for folder, incarnation in newest.items() if incarnation is None])
        for record in records:
            incarnation, frame = record.incarnation, record.frame
            self._handed[incarnation.folder] = (
                incarnation,
                frame.file_index,
                frame.offset_after,
                min(frame.header.seq, incarnation.max_seq),
            )
        return records

    def _followed_by(self, folders: Collection[str]) -> set[bytes]:
        """Return the newest known incarnation of each rank that has one of these spools."""
        ranks = {named[0] for folder in folders if (named := parse_incarnation_folder(folder)) is not None}
        if not ranks:
            return set()
        return {one.id for one in {one.rank: one for one in self.incarnations.values() if one.rank in ranks}.values()}

    def _in_order(self, folders: Collection[str]) -> list[str]:
        """Return folders in the order in which they were found; those that nobody reads are left out."""
        if 4 * len(folders) > len(self._readers):
            return [one for one in self._readers if one in folders]
        return sorted((one for one in folders if one in self._numbers), key=self._numbers.__getitem__)

    def _read(self, folder: str, *, final: bool, is_told: bool) -> int:
        """Read one window of one spool; returns the bytes of its frames. is_told: what comes behind it is announced."""
        reader, arrived = self._readers[folder], self._unread.get(folder)
        begin = reader.place
        frames = None if arrived is None else reader.take(*arrived)
        if frames is None:
            window = max(MIN_WINDOW_BYTES, min(WINDOW_BYTES, POLL_BYTES // len(self._readers)))
            frames = reader.poll(final=final, max_bytes=window)
        self._order.note(folder, is_caught_up=reader.is_caught_up and folder not in self._on_the_way)
        if reader.is_caught_up and (is_told or not frames):
            self._unread.pop(folder, None)
        elif arrived is not None:
            self._unread[folder] = None
        self._report_problems(folder, reader)
        num_bytes = 1
        for frame in frames:
            if frame.file_index != begin[0] or not frame.offset_after:
                begin = (frame.file_index, 0)
            self._order.add(folder, self._screening.take(folder, frame, begin))
            frame_bytes = HEADER_BYTES + memoryview(frame.payload).nbytes
            num_bytes += frame_bytes
            self.num_bytes += frame_bytes
            begin = (frame.file_index, frame.offset_after)
        if final and not frames:
            self._order.add(folder, self._screening.settle(folder))
        return num_bytes

    def read_until(self, folder: str) -> tuple[int, int] | None:
        """Return (file index, offset) up to where a spool was read; None: all spools were, to their ends."""
        if not (self._order.behind or self._order.waiting):
            return None
        reader = self._readers.get(folder)
        return (0, 0) if reader is None else reader.position

    def is_readable(self, folder: str) -> bool:
        """Return whether a spool folder of this name is followed."""
        return folder in self._readers

    def positions(self) -> dict[str, SpoolPosition]:
        """Return, per spool folder, the place behind the last frame handed out."""
        found = {}
        for folder, (incarnation, file_index, offset, seq) in self._handed.items():
            found[folder] = SpoolPosition(
                incarnation.id,
                incarnation.rank,
                incarnation.attempt,
                file_index,
                offset,
                seq,
                incarnation.described_before((file_index, offset)),
                incarnation.last_step,
            )
        return found

    def restore(self, positions: dict[str, SpoolPosition]) -> None:
        """Go on reading at `positions`; descriptors are read again from the spool."""
        for folder, at in positions.items():
            if parse_incarnation_folder(folder) is None:
                continue
            incarnation = Incarnation(at.incarnation, at.rank, folder, at.attempt, max_seq=at.seq, last_step=at.last_step)
            incarnation.first_wall_ns, incarnation.last_wall_ns = at.first_wall_ns, at.last_wall_ns
            incarnation.bye = at.bye if at.left is None else Bye(reason=at.left, step=at.last_step)
            incarnation.has_left = incarnation.bye is not None
            self._screening.add(incarnation)
            self._add(folder, SpoolReader(self.spool_dir / folder, file_index=at.file_index, offset=at.offset, seq=at.seq))
            # The head of the file has one too, should the other file be gone.
            for place in dict.fromkeys((at.described_at, (at.file_index, 0))):
                described = look_back(self.spool_dir / folder, at.incarnation, place, incarnation.layouts)
                if described is not None:
                    incarnation.describe(*described, place)
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
            if name not in self._readers and parse_incarnation_folder(name) is not None:
                self._add(name, SpoolReader(self.spool_dir / name, file_index=self._first_file(name)))

    def _add(self, folder: str, reader: SpoolReader) -> None:
        self._numbers.setdefault(folder, len(self._readers))
        self._readers[folder] = reader
        self._order.begin(folder)
        self._unread[folder] = None

    def _report_problems(self, folder: str, reader: SpoolReader) -> None:
        if not (reader.foreign or reader.num_missing_files or reader.num_corrupt):
            return
        rank = (parse_incarnation_folder(folder) or (0, ""))[0]
        for protocol in reader.foreign:
            self._problems.report(
                f"{rank}/protocol/{protocol}",
                f"record from rank {rank}: expected protocol {PROTOCOL} at most, got {protocol}; "
                f"restart the trainer with sentinel=={VERSION}, or this daemon with the trainer's version",
            )
        if reader.num_missing_files:
            self._problems.report(
                f"{folder}/missing",
                f"spool {folder}: files before {file_name(reader.file_index)} are gone that nobody had read here; what they "
                f"held is not judged and not counted; who deletes from the spool?",
            )
        if reader.num_corrupt:
            self._problems.report(
                f"{folder}/corrupt",
                f"spool {folder}: expected frames, got bytes that are none, before offset {reader.offset} of "
                f"{file_name(reader.file_index)}; they were skipped and are counted, check this rank's disk",
            )
