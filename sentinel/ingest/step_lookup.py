"""One step of a run, looked up in the spools of its ranks: of each rank the file that holds it is read, and no other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from sentinel.ingest.incarnation import Incarnation, SpoolRecord
from sentinel.ingest.problem_log import Problems
from sentinel.ingest.screening import Screening
from sentinel.ingest.step_parts import RankPartOfStep
from sentinel.messages import Vector, Vectors
from sentinel.step_view import RankStep
from sentinel.wire.frame import DESCRIPTIONS, NO_ATTEMPT, Frame, FrameType
from sentinel.wire.frame_hops import FoundHead, FrameHops
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import list_stored

LOOK_FRAMES = 256
"""Frames on the way to the step between two looks at the time."""
APART = 16
"""Of so many spools that lie beside each other one is read, then the next of each."""
_OF_STEPS = frozenset({int(FrameType.ROWS), int(FrameType.END_STEP), int(FrameType.VECTOR)})


@dataclasses.dataclass(slots=True)
class SpoolsSeen:
    """What of the spools of a run an answer about a step was made of."""

    folders: list[str] = dataclasses.field(default_factory=list)
    unfinished: dict[str, tuple[dict[int, str], int]] = dataclasses.field(default_factory=dict)
    """Folder of each process that had written nothing of a later step -> (its files, bytes of the newest)."""

    def is_unchanged(self, run_dir: Path) -> bool:
        """Return whether nothing was written that may belong to the step: no process began, and no unfinished one wrote."""
        spool = run_dir / "spool"
        if _folders(spool) != self.folders:
            return False
        return all(
            list_stored(spool / name) == files and _size(spool / name, files) == size
            for name, (files, size) in self.unfinished.items()
        )


class FoundPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one process recorded of a step."""

    attempt: int
    """0 where it could not learn it."""
    part: RankStep
    vectors: tuple[Vector, ...] = ()


class StepLookup:
    """The step of a run, process by process as it is read, so that nobody holds the rows of all.

    Frames pass the screening that the daemon's pass. Of a rank that trained the step twice each process comes, in no order.
    """

    def __init__(self, run_dir: Path, step: int, goes_on: Callable[[], bool] = lambda: True) -> None:
        """goes_on: asked before each spool and on the way to the step; once it says no, the other spools are left out."""
        self.step = step
        self.num_unread = 0
        """Spools that were not looked into, for want of time."""
        self.seen = SpoolsSeen()
        """What was there when it was read; whole once all was read."""
        self._spool, self._goes_on = run_dir / "spool", goes_on
        self._is_past = False
        """Whether the process whose spool is read has written of a later step."""

    def __iter__(self) -> Iterator[FoundPart]:
        names = _folders(self._spool)
        self.seen.folders = names
        # Where time runs out some ranks of each stage are there.
        for name in (one for at in range(APART) for one in names[at::APART]):
            if not self._goes_on():
                self.num_unread += 1
                continue
            try:
                found = self._of_folder(self._spool / name)
            except _NoTime:
                self.num_unread += 1
                continue
            if found is not None:
                yield found

    def _of_folder(self, folder: Path) -> FoundPart | None:
        files = list_stored(folder)
        size = _size(folder, files)
        begins = self._place_of(folder, files)
        screening = Screening(folder.parent, Problems(lambda problem: None))
        part: RankPartOfStep | None = None
        vectors: list[Vector] = []
        for record in self._records(screening, folder, {at: name for at, name in files.items() if at >= begins}):
            header = record.frame.header
            if header.step != self.step or header.type not in _OF_STEPS:
                continue
            if isinstance(record.message, Vectors):
                vectors += record.message.items
                continue
            part = part or RankPartOfStep(record.incarnation, 0, (header.seq, record.begin))
            part.add(record)
        if not self._is_past:
            self.seen.unfinished[folder.name] = (files, size)
        made = None if part is None else _rank_step(part)
        if part is None or made is None:
            return None
        return FoundPart(attempt=part.incarnation.attempt or 0, part=made, vectors=tuple(vectors))

    def _place_of(self, folder: Path, files: Mapping[int, str]) -> int:
        """Return the index of the file to begin with: the newest whose first frame of a step is of this or an earlier one.

        Where there is none, one behind all. An only file is begun with unseen: it is left at its first later step.
        """
        if len(files) == 1:
            return next(iter(files))
        for place in sorted(files, reverse=True):
            with FrameHops(f"{folder}/{files[place]}") as file:
                begins = next((one.head.step for one in self._hops(file) if one.head.type in _OF_STEPS), None)
            if begins is not None and begins <= self.step:
                return place
        return max(files, default=0) + 1

    def _records(self, screening: Screening, folder: Path, files: Mapping[int, str]) -> Iterator[SpoolRecord]:
        """Yield what the frames of the step bring, and those that say what its rows point into, until a later step's."""
        self._is_past = False
        for place, name in files.items():
            with FrameHops(f"{folder}/{name}", place) as file:
                for found in self._hops(file):
                    head = found.head
                    if head.type not in DESCRIPTIONS and (head.type not in _OF_STEPS or head.step < self.step):
                        continue
                    frame = file.frame(found)
                    if frame is None:
                        continue
                    if head.type in _OF_STEPS and head.step > self.step:
                        self._is_past = True
                        yield from screening.settle(folder.name)
                        return
                    yield from _screened(screening, folder.name, frame, (place, found.offset))
        yield from screening.settle(folder.name)

    def _hops(self, file: FrameHops) -> Iterator[FoundHead]:
        for at, found in enumerate(file.heads(), 1):
            if at % LOOK_FRAMES == 0 and not self._goes_on():
                raise _NoTime
            yield found


class _NoTime(Exception):
    """No time was left."""


def _folders(spool: Path) -> list[str]:
    try:
        names = sorted(os.listdir(spool))  # noqa: PTH208 -- names alone
    except OSError:
        return []
    return [name for name in names if parse_incarnation_folder(name) is not None]


def _size(folder: Path, files: Mapping[int, str]) -> int:
    """Return the bytes of the newest file; -1 where there is none."""
    try:
        return os.stat(f"{folder}/{files[max(files)]}", follow_symlinks=False).st_size if files else -1  # noqa: PTH116
    except OSError:
        return -1


def _screened(screening: Screening, folder: str, frame: Frame, begin: tuple[int, int]) -> list[SpoolRecord]:
    header = frame.header
    rank, digits = parse_incarnation_folder(folder) or (-1, "")
    if screening.newest_of(folder) is None and header.rank == rank and header.incarnation.hex()[: len(digits)] == digits:
        # Reading begins in the middle: the number of the first frame is no leap.
        attempt = None if header.attempt == NO_ATTEMPT else header.attempt
        screening.add(Incarnation(header.incarnation, rank, folder, attempt, max_seq=header.seq - 1))
    return screening.take(folder, frame, begin)


def _rank_step(part: RankPartOfStep) -> RankStep | None:
    """Return a rank's step; None where nothing says any more what its rows point into."""
    described = part.incarnation.layouts.get(part.layout_id, part.incarnation.descriptor)
    if described is None:
        return None
    return RankStep(
        rank=part.incarnation.rank,
        descriptor=described,
        rows=part.rows_until(part.last_seq, described),
        end_step=part.end_step,
        time=part.last_wall_ns / 1e9,
        incarnation=part.incarnation.id,
    )
