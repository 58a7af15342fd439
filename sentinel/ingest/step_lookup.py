"""One step of a run, looked up in the spools of its ranks: of each rank the file that holds it is read, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.ingest.incarnation import Incarnation, SpoolRecord
from sentinel.ingest.problem_log import Problems
from sentinel.ingest.screening import Screening
from sentinel.ingest.step_parts import RankPartOfStep
from sentinel.messages import Vector, Vectors
from sentinel.step_view import RankStep
from sentinel.wire.frame import NO_ATTEMPT, Frame, FrameType
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import list_files, list_kept
from sentinel.wire.spool_reader import SpoolReader

HEAD_BYTES = 256 * 2**10
"""Bytes of a file that are read to learn with which step it begins."""
WINDOW_BYTES = 2**20
"""Bytes that are read at a time on the way to the step."""
APART = 16
"""Of so many spools that lie beside each other one is read, then the next of each."""
_OF_STEPS = frozenset({int(FrameType.ROWS), int(FrameType.END_STEP), int(FrameType.VECTOR)})


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks recorded of one step."""

    step: int
    attempt: int
    """The newest of those that its ranks were in; 0 where none says."""
    parts: tuple[RankStep, ...] = ()
    """Ranks rising; of one that trained the step twice the newest attempt. Empty: nothing of it is in the spool any more."""
    vectors: dict[int, tuple[Vector, ...]] = {}
    """Rank -> its vectors."""
    num_unread: int = 0
    """Spools that were not looked into, for want of time."""


def read_step(run_dir: Path, step: int, goes_on: Callable[[], bool] = lambda: True) -> RecordedStep:
    """Return what the spool of a run has of a step. Frames pass the screening that the daemon's pass.

    goes_on: asked before each spool and each window; once it says no, the other spools are counted and left out.
    """
    newest: dict[int, tuple[tuple[int, float], RankStep, tuple[Vector, ...]]] = {}
    num_unread = 0
    folders = [one for one in sorted((run_dir / "spool").glob("r*")) if parse_incarnation_folder(one.name) is not None]
    # Where time runs out some ranks of each stage are there.
    for folder in (one for at in range(APART) for one in folders[at::APART]):
        found = _of_folder(folder, step, goes_on) if goes_on() else None
        if found is None:
            num_unread += 1
            continue
        attempt, part, vectors = found
        if part is not None:
            age = (attempt, part.time)
            if part.rank not in newest or newest[part.rank][0] < age:
                newest[part.rank] = (age, part, vectors)
    ranks = sorted(newest)
    return RecordedStep(
        step=step,
        attempt=max((newest[rank][0][0] for rank in ranks), default=0),
        parts=tuple(newest[rank][1] for rank in ranks),
        vectors={rank: newest[rank][2] for rank in ranks if newest[rank][2]},
        num_unread=num_unread,
    )


def _of_folder(
    folder: Path, step: int, goes_on: Callable[[], bool]
) -> tuple[int, RankStep | None, tuple[Vector, ...]] | None:
    """Return (attempt, the step or None, its vectors) of one process; None: no time was left to look."""
    place = _place_of(folder, step)
    if place is None:
        return 0, None, ()
    reader, screening = SpoolReader(folder, file_index=place), Screening(folder.parent, Problems(lambda problem: None))
    part: RankPartOfStep | None = None
    vectors: list[Vector] = []
    begin, is_past = reader.position, False
    while not is_past:
        if not goes_on():
            return None
        frames = reader.poll(final=True, max_bytes=WINDOW_BYTES)
        if not frames:
            break
        for frame in frames:
            for record in _screened(screening, folder.name, frame, begin):
                header = record.frame.header
                is_past = is_past or (header.type in _OF_STEPS and header.step > step)
                if header.step != step or header.type not in _OF_STEPS:
                    continue
                if isinstance(record.message, Vectors):
                    vectors += record.message.items
                    continue
                part = part or RankPartOfStep(record.incarnation, 0, (header.seq, record.begin))
                part.add(record)
            begin = (frame.file_index, frame.offset_after)
    return (0, None, ()) if part is None else (part.incarnation.attempt or 0, _rank_step(part), tuple(vectors))


def _place_of(folder: Path, step: int) -> int | None:
    """Return the index of the file to begin with: the newest whose first frame of a step is of this or an earlier one."""
    places = sorted({*list_files(folder), *(one.last for one in list_kept(folder))}, reverse=True)
    for place in places:
        begins = _first_step(folder, place)
        if begins is not None and begins <= step:
            return place
    return None


def _first_step(folder: Path, place: int) -> int | None:
    reader = SpoolReader(folder, file_index=place)
    while frames := reader.poll(final=True, max_bytes=HEAD_BYTES):
        for frame in frames:
            if frame.header.type in _OF_STEPS:
                return frame.header.step
    return None


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
