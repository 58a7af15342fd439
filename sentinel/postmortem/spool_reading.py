"""What ranks said in their spools about some steps: values that were logged, samples, checkpoints, and where they ran.

A spool may have gigabytes, nearly all of them rows, which are passed over by their headers. Of each process the files are
looked at that can hold a wanted step, and then the others where all are wanted, up to a bound; that there is more is said.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from sentinel.errors import WireError
from sentinel.ingest.incarnation import Incarnation
from sentinel.messages import Descriptor, EndStep, Heartbeat, LayoutChange
from sentinel.wire.frame import DESCRIPTIONS, NO_ATTEMPT, Frame, FrameType, decode_message
from sentinel.wire.frame_hops import FrameHops
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import list_stored

MOST_FRAMES = 150_000
"""Frames whose headers are looked at for one report; a bound on time, some 5 us each."""
MOST_DECODED = 30_000
"""Messages that are decoded; a bound on time, some 15 us each."""
CHECKPOINT = "checkpoint"
_WANTED = frozenset({int(FrameType.END_STEP), int(FrameType.HEARTBEAT), *DESCRIPTIONS})


class StepSaid(msgspec.Struct, frozen=True):
    """What one rank said at the end of a step."""

    attempt: int
    rank: int
    time: float
    """Seconds since the epoch, by its own clock."""
    end: EndStep


class CheckpointSaid(msgspec.Struct, frozen=True, order=True):
    """That a rank said it was at a checkpoint."""

    attempt: int
    step: int
    time: float
    rank: int


class _SpoolFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a process."""

    path: Path
    index: int
    begins: int
    """First step of which it says anything."""


class SpoolReading:
    """What was read of the spools of a run. Never raises for what it reads."""

    def __init__(
        self,
        run_dir: Path,
        spans: Iterable[tuple[int, int]],
        ranks_first: Collection[int] = (),
        *,
        takes_all: bool = False,
    ) -> None:
        """spans: (first, last) of the steps that are wanted, both included. ranks_first: these before the others.

        takes_all: every step is wanted, as far as the bounds reach; of a long run every `stride` steps one.
        """
        self.steps: list[StepSaid] = []
        self.checkpoints: list[CheckpointSaid] = []
        self.stride = 1
        """Of the steps outside of the spans those are here that are multiples of it."""
        self.is_cut = False
        """There may be more of the wanted steps than was read."""
        self._spans, self._takes_all = tuple(spans), takes_all
        self._num_frames = self._num_decoded = 0
        self._incarnations: dict[Path, Incarnation] = {}
        folders = _folders(run_dir / "spool", ranks_first)
        files = {folder: _files_of(folder) for _, folder in folders}
        newest = max((one.begins for given in files.values() for one in given), default=0)
        self.stride = 1 + newest * len(folders) // (MOST_DECODED // 2)
        later: list[tuple[int, int, int, Path, _SpoolFile]] = []
        for at, (rank, folder) in enumerate(folders):
            for number, one in enumerate(files[folder]):
                behind = files[folder][number + 1].begins if number + 1 < len(files[folder]) else None
                if self._may_hold(one, behind) or (behind is None and not self._takes_all):
                    self._read(folder, rank, one.path)
                elif takes_all:
                    # The newest files of all processes come before older ones of any.
                    later.append((-one.index, at, rank, folder, one))
        for _, _, rank, folder, one in sorted(later, key=lambda entry: entry[:2]):
            self._read(folder, rank, one.path)

    @property
    def incarnations(self) -> list[Incarnation]:
        """The processes of which anything was read, each with a descriptor of it."""
        return sorted(self._incarnations.values(), key=lambda one: (one.rank, one.first_wall_ns))

    @property
    def attempts(self) -> dict[int, list[Incarnation]]:
        """Attempt -> its processes that were read; -1: of those that could not learn it."""
        found: dict[int, list[Incarnation]] = {}
        for one in self.incarnations:
            found.setdefault(-1 if one.attempt is None else one.attempt, []).append(one)
        return dict(sorted(found.items()))

    def of_step(self, step: int, attempt: int) -> list[StepSaid]:
        """Return what each rank said of a step in an attempt, in rising order of rank."""
        found = {one.rank: one for one in self.steps if one.end.step == step and one.attempt in (attempt, -1)}
        return [found[rank] for rank in sorted(found)]

    def _may_hold(self, file: _SpoolFile, behind: int | None) -> bool:
        """Return whether a file may hold a step of the spans.

        behind: the first step of the next file; None: it is the last.
        """
        return any(file.begins <= last and (behind is None or behind >= first) for first, last in self._spans)

    def _read(self, folder: Path, rank: int, path: Path) -> None:
        for frame in self._wanted_frames(path):
            if frame.header.rank == rank:
                self._take(folder, frame)

    def _wanted_frames(self, path: Path) -> Iterator[Frame]:
        """Yield the frames of a file that are wanted, whole and checked; what is no frame is passed over."""
        with FrameHops(path) as file:
            for found in file.heads():
                self._num_frames += 1
                if self._num_frames > MOST_FRAMES:
                    self.is_cut = True
                    return
                head = found.head
                if head.type in _WANTED and (head.type in DESCRIPTIONS or self._is_wanted(head.step)):
                    frame = file.frame(found)
                    if frame is not None:
                        yield frame

    def _take(self, folder: Path, frame: Frame) -> None:
        header = frame.header
        if self._num_decoded >= MOST_DECODED and header.type not in DESCRIPTIONS:
            self.is_cut = True
            return
        try:
            message = decode_message(frame)
        except WireError:
            return
        self._num_decoded += 1
        attempt = None if header.attempt == NO_ATTEMPT else header.attempt
        one = self._incarnations.get(folder)
        if one is None:
            one = Incarnation(header.incarnation, header.rank, folder.name, attempt, first_wall_ns=header.wall_ns)
            self._incarnations[folder] = one
        one.first_wall_ns = min(one.first_wall_ns, header.wall_ns)
        number, time = -1 if attempt is None else attempt, header.wall_ns / 1e9
        if isinstance(message, Descriptor):
            one.describe(header.layout_id, message, (0, 0))
        elif isinstance(message, LayoutChange) and message.base in one.layouts:
            one.describe(header.layout_id, message.applied_to(one.layouts[message.base]), (0, 0))
        elif isinstance(message, EndStep):
            self.steps.append(StepSaid(number, one.rank, time, message))
            if CHECKPOINT in message.activities:
                self.checkpoints.append(CheckpointSaid(number, message.step, time, one.rank))
        elif isinstance(message, Heartbeat) and message.activity == CHECKPOINT:
            self.checkpoints.append(CheckpointSaid(number, message.step, time, one.rank))

    def _is_wanted(self, step: int) -> bool:
        if self._takes_all and step % self.stride == 0:
            return True
        return any(first <= step <= last for first, last in self._spans)


def _folders(spool: Path, ranks_first: Collection[int]) -> list[tuple[int, Path]]:
    """Return (rank, folder) of the processes, in the order in which they are read."""
    try:
        names = sorted(os.listdir(spool))  # noqa: PTH208 -- names alone
    except OSError:
        return []
    parsed = [(found[0], spool / name) for name in names if (found := parse_incarnation_folder(name)) is not None]
    return sorted(parsed, key=lambda one: (one[0] not in ranks_first, one[0], one[1].name))


def _files_of(folder: Path) -> list[_SpoolFile]:
    """Return the files of a process in the order in which they were written; what is kept of several is one file."""
    return [
        _SpoolFile(path=folder / name, index=index, begins=_first_step(folder / name))
        for index, name in list_stored(folder).items()
    ]


def _first_step(path: Path) -> int:
    """Return the first step of which a file says anything; 0 where it cannot be told: it may hold any."""
    with FrameHops(path) as file:
        # A file begins with what it describes; rows come a few frames behind that.
        for found in itertools.islice(file.heads(), 64):
            if found.head.type in (FrameType.ROWS, FrameType.END_STEP) and found.head.step >= 0:
                return found.head.step
    return 0
