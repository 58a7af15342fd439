"""RankTails: what the newest process of each rank said last, read from the ends of the spools; no step is put together."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import msgspec

from sentinel.errors import MALFORMED, WireError
from sentinel.messages import Bye, EndStep, Heartbeat
from sentinel.place import Place
from sentinel.process import ProcessId
from sentinel.wire.frame import NO_ATTEMPT, Frame, FrameType, decode_message
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import file_name, list_files
from sentinel.wire.spool_skim import SpoolSkim

TYPES = (FrameType.DESCRIPTOR, FrameType.END_STEP, FrameType.HEARTBEAT, FrameType.BYE)
MAX_RANKS = 256
"""Most ranks whose spools are read, half of them the first and half the last; a bound on time. Losses are logged by one or
the other, or by all."""
RECENT_STEPS = 20
"""Newest steps of a rank whose times are kept. Too small: one odd step moves the rate; too large: it follows slowly."""
LOOK_BYTES = 32 * 2**20
"""Most bytes that one look reads of all spools together, about."""
LEAST_BYTES = 128 * 2**10


class StepTimes(msgspec.Struct, frozen=True):
    """When a rank ended a step, and how long it took."""

    step: int
    wall_s: float
    """Seconds since the epoch, by the rank's clock."""
    time_s: float
    """`EndStep.step_time_s`; 0: not known."""
    wait_s: float
    """`EndStep.wait_s`; below 0: not known."""


class RankTail:
    """One process of a rank, by what it said last. It holds no more than the newest of everything."""

    def __init__(self, folder: Path) -> None:
        """folder: of the process's spool, named as `parse_incarnation_folder` knows."""
        parsed = parse_incarnation_folder(folder.name)
        assert parsed is not None, folder
        self.rank = parsed[0]
        self.attempt = NO_ATTEMPT
        self.newest_step: int | None = None
        """Newest step that it is in or has ended."""
        self.steps: deque[StepTimes] = deque(maxlen=RECENT_STEPS)
        self.bye: Bye | None = None
        """Its goodbye, unless it said more since."""
        self.last_wall_s = 0.0
        """When it wrote its newest frame, in seconds since the epoch by its own clock; 0: nothing was read of it."""
        self.world_size = 0
        """Ranks of its run; 0: not known."""
        self.process = ProcessId()
        self._skim = SpoolSkim(folder, TYPES)

    @property
    def written_at(self) -> float:
        """When its spool was written to last, in seconds since the epoch by the disk's clock; 0: nothing was read of it."""
        return self._skim.written_at

    def look(self, max_bytes: int) -> list[EndStep]:
        """Read what is new, and return the steps that it ended since, as far as they were read."""
        ended: list[EndStep] = []
        for frame in self._skim.read(max_bytes):
            self.attempt = frame.header.attempt
            self.last_wall_s = frame.header.wall_ns / 1e9
            if frame.header.type == FrameType.DESCRIPTOR:
                self._describe(frame)
                continue
            try:
                message = decode_message(frame)
            except WireError:
                continue
            self.bye = message if isinstance(message, Bye) else None
            if isinstance(message, Heartbeat):
                self.newest_step = message.step
            elif isinstance(message, EndStep):
                self.newest_step = message.step
                self.steps.append(StepTimes(message.step, self.last_wall_s, message.step_time_s, message.wait_s))
                ended.append(message)
        return ended

    def _describe(self, frame: Frame) -> None:
        try:
            found = msgspec.msgpack.decode(frame.payload, type=_Described)
        except MALFORMED:
            return
        self.world_size, self.process = found.place.world_size, ProcessId.reported_by(found.environment)
        # Each file begins with one: what it says of the process stays the same.
        self._skim.types = frozenset(TYPES) - {FrameType.DESCRIPTOR}


class RankTails:
    """The newest process of each rank of a run. Each look reads what is new, in bounded time."""

    def __init__(self, run_dir: Path, most: int = MAX_RANKS) -> None:
        self.num_unread = 0
        """Ranks that have a spool and are not read, for there are too many."""
        self._spool_dir, self._most = run_dir / "spool", most
        self._names: frozenset[str] = frozenset()
        self._tails: dict[str, RankTail] = {}

    def look(self) -> list[tuple[RankTail, list[EndStep]]]:
        """Return each rank that is read, ranks rising, with the steps that it ended since the last look."""
        self._discover()
        share = max(LEAST_BYTES, LOOK_BYTES // max(1, len(self._tails)))
        return [(tail, tail.look(share)) for tail in self._tails.values()]

    def _discover(self) -> None:
        try:
            names = frozenset(name for name in os.listdir(self._spool_dir) if parse_incarnation_folder(name) is not None)  # noqa: PTH208
        except OSError:
            names = frozenset()
        if names == self._names:
            return
        self._names = names
        newest: dict[int, tuple[float, str]] = {}
        for name in names:
            rank, _ = parse_incarnation_folder(name) or (0, "")
            newest[rank] = max(newest.get(rank, (-1.0, "")), (_written_at(self._spool_dir / name), name))
        ranks = sorted(newest)
        if len(ranks) > self._most:
            ranks = ranks[: self._most // 2] + ranks[-(self._most - self._most // 2) :]
        self.num_unread = len(newest) - len(ranks)
        chosen = [newest[rank][1] for rank in ranks]
        self._tails = {name: self._tails.get(name) or RankTail(self._spool_dir / name) for name in chosen}


def _written_at(folder: Path) -> float:
    indices = list_files(folder)
    try:
        return (folder / file_name(indices[-1])).stat().st_mtime if indices else 0.0
    except OSError:
        return 0.0


class _Described(msgspec.Struct):
    place: Place
    environment: dict[str, str] = {}
