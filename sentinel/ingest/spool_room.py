"""SpoolRoom: how much of a rank's spool waits to be judged, and how long its cap still lasts at the rate it fills."""

from __future__ import annotations

import contextlib
import heapq
import os
from pathlib import Path

import msgspec

from sentinel.errors import WireError
from sentinel.messages import Descriptor
from sentinel.wire.frame import FrameType, decode_message
from sentinel.wire.spool import parse_incarnation_folder, read_ack
from sentinel.wire.spool_files import list_files, list_kept
from sentinel.wire.spool_reader import SpoolReader

MAX_SPOOLS = 64
"""Newest spools that are looked at; a bound on time: ranks of a run write about as much as each other."""
HEAD_BYTES = 2**20
"""Read of a file to learn its rank's configuration and when it was begun."""
NOTICED_SHARE = 0.25
"""Unjudged share of a spool's cap from which a notice is sent. Too small: a short delay notifies; too large: the writer may
delete frames before anyone acts."""


class SpoolRoom(msgspec.Struct, frozen=True, kw_only=True):
    """How full one rank's spool is."""

    rank: int
    waiting_bytes: int
    """Bytes on disk that the daemon has not acknowledged as judged."""
    max_bytes: int
    """spool.max_bytes of the rank."""
    is_cut: bool
    """Some of the waiting files were thinned already."""
    bytes_per_s: float
    """Mean rate at which it was filled since the oldest waiting file was begun; 0: not known."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the cap is reached if no more is judged; None: not known."""
        if self.bytes_per_s <= 0:
            return None
        return max(self.max_bytes - self.waiting_bytes, 0) / self.bytes_per_s

    @property
    def share(self) -> float:
        """Share of the cap that waits to be judged."""
        return self.waiting_bytes / max(self.max_bytes, 1)

    @property
    def words(self) -> str:
        """`rank 3: 1.2 of 4 GiB of its spool wait to be judged; at 2.1 MiB/s the rest lasts 23 min, then finite rows go`"""
        unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if self.max_bytes >= s), ("KiB", 2**10))
        used = f"{self.waiting_bytes / size:.3g} of {self.max_bytes / size:.3g} {unit} of its spool wait to be judged"
        if self.is_cut or self.share >= 0.95:
            return f"rank {self.rank}: {used}: spool.max_bytes is used up, finite rows of the oldest steps go"
        left = self.seconds_left
        rate = f"{self.bytes_per_s / 2**20:.3g} MiB/s"
        when = "" if left is None else f"; at {rate} the rest lasts {_duration(left)}, then finite rows go"
        return f"rank {self.rank}: {used}{when}"


def fullest(run_dir: Path) -> SpoolRoom | None:
    """Return the spool of a run that is nearest to its cap; None: nothing waits, or no cap is known."""
    found = [room for room in map(room_of, _newest(run_dir / "spool")) if room is not None]
    return max(found, key=lambda room: room.share, default=None)


def _newest(spool_dir: Path) -> list[Path]:
    """Return the folders of the spools to which a file was added last."""
    found = list[tuple[float, str]]()
    with contextlib.suppress(OSError), os.scandir(spool_dir) as entries:
        for entry in entries:
            if parse_incarnation_folder(entry.name) is not None:
                with contextlib.suppress(OSError):
                    found.append((entry.stat().st_mtime, entry.name))
    return [spool_dir / name for _, name in heapq.nlargest(MAX_SPOOLS, found)]


def room_of(folder: Path) -> SpoolRoom | None:
    """Return how full one incarnation's spool is; None: nothing waits, or its cap is not known."""
    index, offset = read_ack(folder)
    names = [one.name for one in list_kept(folder) if one.last >= index]
    whole = [one for one in list_files(folder) if one >= index]
    first = whole[0] if whole else index
    sizes = {path.name: _size(path) for path in [folder / name for name in names] + sorted(folder.glob("??????*.spool"))}
    whole_names = [f"{one:06d}.spool" for one in whole]
    waiting = sum(sizes.get(name, 0) for name in {*names, *whole_names})
    waiting -= offset if first == index and whole else 0
    parsed = parse_incarnation_folder(folder.name)
    if waiting <= 0 or not whole or parsed is None:
        return None
    frames = SpoolReader(folder, file_index=first).poll(max_bytes=HEAD_BYTES)
    described = [frame for frame in frames if frame.header.type == FrameType.DESCRIPTOR]
    try:
        message = decode_message(described[-1]) if described else None
    except WireError:
        return None
    if not isinstance(message, Descriptor):
        return None
    spool = message.settings.get("spool")
    limit = spool.get("max_bytes") if isinstance(spool, dict) else None
    if not isinstance(limit, int) or limit <= 0:
        return None
    seconds = _mtime(folder / whole_names[-1]) - frames[0].header.wall_ns / 1e9
    written = sum(sizes.get(name, 0) for name in whole_names)
    return SpoolRoom(
        rank=parsed[0], waiting_bytes=waiting, max_bytes=limit, is_cut=bool(names),
        bytes_per_s=written / seconds if seconds > 0 else 0.0,
    )  # fmt: skip


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
