"""RunDigests: what the ranks of one machine come to, step by step, made beside their spools for the join to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sentinel.fleet.packed_digest import encode_digest
from sentinel.ingest.arrivals import Arrivals
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import Incarnation, SpoolRecord
from sentinel.ingest.model_layout import LayoutCache
from sentinel.ingest.node_digest import DigestedRank, DigestMaker
from sentinel.ingest.node_share import machine_of
from sentinel.ingest.step_parts import RankPartOfStep
from sentinel.messages import Bye, EndStep
from sentinel.step_view import RankStep
from sentinel.wire.frame import FrameType

LATE_AFTER_STEPS = 2
"""A digest is made without a rank that is so many steps behind another of its machine: its join closes the step too."""
GONE_AFTER_S = 30.0
"""A process of which no frame came for so long, by its machine's clock, while another went on for so many steps, is waited
for no more: it was killed. Chosen, as long as the join waits for one; each that lives writes a heartbeat a second."""
MAX_OPEN_STEPS = 64
"""Steps of which parts are held; a bound on memory. Of what is dropped the rows are asked for."""
_ROWS = int(FrameType.ROWS)


class RunDigests:
    """Follows the spools of one run on this machine. Has no clock and no thread."""

    def __init__(
        self,
        run_dir: Path,
        kinds: frozenset[str],
        arrivals: Callable[[], Arrivals] = Arrivals,
        committed: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """kinds: as of `DigestMaker`. arrivals: as of `RunFollower`.

        committed: folder of a spool -> (file index, offset) behind what whom they are for has judged: of steps that end
        before it no digests are made. Of others all.
        """
        self.num_rows = 0
        """Rows that are in digests."""
        self.num_loud = 0
        """Steps of a machine of which none was made: copies differ."""
        committed = self._committed = dict(committed or {})
        self._follower = RunFollower(
            run_dir, on_problem=_nobody, arrivals=arrivals, first_file=lambda folder: committed.get(folder, (0, 0))[0]
        )
        self._maker = DigestMaker(kinds)
        self._layouts: dict[str, LayoutCache] = {}
        self._open: dict[tuple[bytes, int], RankPartOfStep] = {}
        self._ended: dict[str, dict[int, dict[int, RankPartOfStep]]] = {}
        """Machine -> step -> rank -> its part, which is whole."""
        self._newest: dict[bytes, int] = {}
        """Process that trains -> newest step that it ended."""

    def read_until(self, folder: str) -> tuple[int, int] | None:
        """As of `RunFollower`: no digest is made yet of what lies behind."""
        return self._follower.read_until(folder)

    def next(self) -> Iterator[bytes]:
        """Yield the digests of the steps that have ended since."""
        for record in self._follower.poll():
            self._take(record)
        for machine, steps in self._ended.items():
            for step in sorted(steps):
                if self._is_due(machine, step):
                    found = self._made(machine, step, steps.pop(step))
                    if found is not None:
                        yield found
            while len(steps) > MAX_OPEN_STEPS:
                del steps[min(steps)]
        while len(self._open) > MAX_OPEN_STEPS * max(1, len(self._newest)):
            del self._open[next(iter(self._open))]

    def _take(self, record: SpoolRecord) -> None:
        incarnation, header = record.incarnation, record.frame.header
        if isinstance(record.message, Bye):
            self._newest.pop(incarnation.id, None)
        if header.type != _ROWS and not isinstance(record.message, EndStep):
            return
        key = (incarnation.id, header.step)
        part = self._open.get(key)
        if part is None:
            part = self._open[key] = RankPartOfStep(incarnation, 0, (header.seq, record.begin))
        part.add(record)
        if part.end_step is not None and incarnation.descriptor is not None:
            machine = machine_of(incarnation.descriptor)
            self._ended.setdefault(machine, {}).setdefault(header.step, {})[incarnation.rank] = self._open.pop(key)
            self._newest[incarnation.id] = header.step
            for other in [one for one in self._newest if self._is_gone(one, incarnation, header.step, record.time_ns)]:
                del self._newest[other]

    def _is_gone(self, one: bytes, other: Incarnation, step: int, time_ns: int) -> bool:
        """Return whether a process trains no more, though it may have said no bye. other: one that has ended a step.

        time_ns: when, nanoseconds since the epoch by its machine's clock.
        """
        known = self._follower.incarnations[one]
        if known is other:
            return False
        if known.rank == other.rank:
            return True
        if _machine(known) != _machine(other):
            return False
        if known.attempt is not None and other.attempt is not None and known.attempt < other.attempt:
            # Ranks may be numbered otherwise: nobody takes its place.
            return True
        is_silent = time_ns - known.last_wall_ns >= GONE_AFTER_S * 1e9
        return is_silent and self._newest[one] + LATE_AFTER_STEPS <= step

    def _is_due(self, machine: str, step: int) -> bool:
        known = self._follower.incarnations
        newest = [ended for one, ended in self._newest.items() if _machine(known[one]) == machine]
        return not newest or min(newest) >= step or max(newest) >= step + LATE_AFTER_STEPS

    def _is_wanted(self, ended: dict[int, RankPartOfStep]) -> bool:
        """Return whether any of it is not judged yet."""
        ends = [(part.incarnation.folder, part.end.begin) for part in ended.values() if part.end is not None]
        return any(begin >= self._committed.get(folder, (0, 0)) for folder, begin in ends)

    def _made(self, machine: str, step: int, ended: dict[int, RankPartOfStep]) -> bytes | None:
        parts, ranks, key = [], [], []
        for rank, part in sorted(ended.items()):
            incarnation = part.incarnation
            descriptor = incarnation.layouts.get(part.layout_id, incarnation.descriptor)
            if descriptor is None:
                continue
            rows = part.rows_until(part.last_seq, descriptor)
            parts.append(RankStep(rank=rank, descriptor=descriptor, rows=rows, end_step=part.end_step, time=0.0))
            ranks.append(DigestedRank(rank, incarnation.id, part.layout_id, part.last_seq, part.num_rows))
            key.append((rank, incarnation.id, part.layout_id))
        if not parts or not self._is_wanted(ended):
            return None
        descriptors = {part.rank: part.descriptor for part in parts}
        layout = self._layouts.setdefault(machine, LayoutCache()).of(tuple(key), lambda: descriptors)
        found = self._maker.make(step, layout.share_of(tuple(descriptors)), parts, ranks)
        if found is None:
            self.num_loud += 1
            return None
        self.num_rows += sum(len(part.rows) for part in parts)
        return encode_digest(found)


def _machine(incarnation: Incarnation) -> str | None:
    return None if incarnation.descriptor is None else machine_of(incarnation.descriptor)


def _nobody(problem: str) -> None:
    """What is wrong with a spool the daemon of the join says, which reads it too."""
