"""RunWatch: looks who lives, who moves and who is gone, and decides the moments at which that is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from sentinel.daemon.command_note import CommandNote
from sentinel.decision import RankFacts, Tick
from sentinel.ingest.ends import REPLACED_S, Ends, is_settled, left_early, run_end
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import Incarnation
from sentinel.ingest.liveness import LivenessTracker
from sentinel.ingest.memory_kills import MemoryKills
from sentinel.ingest.processes import ProcessTable
from sentinel.ingest.steps import StepAssembler
from sentinel.ingest.witnesses import Witnesses
from sentinel.run_end import SILENCE, RankEnd
from sentinel.wire.pulse import read_pulse
from sentinel.wire.witness import read_witness

WATCH_S = 0.25
"""Least seconds between two looks at who lives."""


class RunWatch:
    """Who lives, of one run. What it decides it yields: whoever judges a tick writes it down before."""

    def __init__(
        self,
        follower: RunFollower,
        assembler: StepAssembler,
        note: Callable[[], CommandNote],
        processes: ProcessTable | None = None,
    ) -> None:
        """note: what is known of the command that the daemon runs beside; an empty one where it runs beside none."""
        self.tracker = LivenessTracker()
        self._follower, self._assembler, self._note = follower, assembler, note
        self._processes = processes or ProcessTable()
        witnesses = Witnesses(
            lambda: follower.incarnations, lambda incarnation: read_witness(follower.spool_dir / incarnation.folder)
        )
        self._ends = Ends(self._processes, self._pulse_ns, self.tracker.silence_s, witnesses, MemoryKills())
        self._due = 0.0
        self._looked: float | None = None
        """When the look began that is not over."""

    def look(self, mono: float, wall: float, has_news: Callable[[Sequence[RankFacts], float], bool]) -> Iterator[Tick]:
        """Yield the ticks that are due; each is to be judged before the next is asked for.

        mono: monotonic seconds; wall: seconds since the epoch. has_news: whether rules would say anything of these facts.
        """
        behind, is_replaying = self._follower.behind, self._assembler.is_replaying
        # Where many ranks write there is always something new: caught up is who left nothing unread.
        self.tracker.look(
            mono, behind, is_caught_up=not behind and not is_replaying, unheard=self._follower.unheard,
            followed=self._follower.followed,
        )  # fmt: skip
        if is_replaying:
            return
        now = self.tracker.now
        self._ends.look(self._follower.incarnations.values(), behind, now)
        if mono < self._due:
            return
        self._looked = mono
        groups = self._groups()
        newest = max(groups, default=0)
        for number, ranks in groups.items():
            if not any(one.incarnation in behind for one in ranks) and is_settled(ranks, now):
                ranks = self._ends.silenced(ranks, self._follower.incarnations, now)
                yield from self._ended(number, ranks, now, wall, is_restarted=number < newest)
        ranks = self.facts()
        if has_news(ranks, now):
            yield self._assembler.tick(ranks, now)

    def facts(self) -> tuple[RankFacts, ...]:
        """Return what is known of the ranks of the newest attempt."""
        attempts, now = self._assembler.attempts, self.tracker.now
        ranks = self._reported(self.tracker.facts(attempts.newest, attempts.attempt_of), now)
        if self._is_over(max(attempts.newest, 0), ranks):
            ranks = self._ends.silenced(ranks, self._follower.incarnations, now)
        return ranks

    def rest(self, mono: float) -> None:
        """Say when a look is over: the next comes after twenty times as long: many ranks must not cost a core."""
        if self._looked is not None:
            self._due = mono + max(WATCH_S, 20.0 * (mono - self._looked))
        self._looked = None

    def before_attempt(self, number: int, wall: float) -> Iterator[Tick]:
        """Yield the ends of the attempts before this one, which begins: who was silent by then is gone."""
        now = self.tracker.now
        groups = self._groups()
        newest = max((one.time for ranks in groups.values() for one in ranks), default=0.0)
        for former, ranks in groups.items():
            if former < number:
                ranks = tuple(_replaced(one, newest, number) for one in ranks)
                yield from self._ended(former, ranks, now, wall, is_restarted=True)

    def finish(self, wall: float) -> Iterator[Tick]:
        """Yield the ends of what is over, now that the command is."""
        now, note, incarnations = self.tracker.now, self._note(), self._follower.incarnations
        self._ends.look(incarnations.values(), (), now, is_forced=True)
        for number, ranks in self._groups().items():
            if note.code is not None and note.covers(max(one.time for one in ranks)):
                ranks = tuple(self._ends.by_code(one, incarnations[one.incarnation], note.pid, note.code) for one in ranks)
                ranks = left_early(ranks, note.code)
            yield from self._ended(number, ranks, now, wall)

    def close(self) -> None:
        """Look at nobody any more."""
        self._processes.close()

    def _ended(
        self, number: int, ranks: tuple[RankFacts, ...], now: float, wall: float, *, is_restarted: bool = False
    ) -> Iterator[Tick]:
        ended = run_end(ranks, wall, is_restarted=is_restarted)
        if ended is not None:
            yield self._assembler.tick(ranks, now, attempt=number, ended=ended)

    def _groups(self) -> dict[int, tuple[RankFacts, ...]]:
        """Return the ranks of each attempt that is not known to be over, with what is known of their ends."""
        groups = self.tracker.groups(self._assembler.attempts.group_of)
        return {
            number: self._reported(ranks, self.tracker.now)
            for number, ranks in groups.items()
            if not self._is_over(number, ranks)
        }

    def _is_over(self, number: int, ranks: Sequence[RankFacts]) -> bool:
        """Return whether it was decided that an attempt is over, and no frame of it came since."""
        newest = max((one.time for one in ranks), default=0.0)
        return newest <= self._assembler.attempts.ended_until.get(number, -1.0)

    def _reported(self, ranks: tuple[RankFacts, ...], now: float) -> tuple[RankFacts, ...]:
        known, unheard = self._follower.incarnations, self._follower.unheard
        found = self._ends.reported(ranks, known, now, self._note().asked_by)
        if not unheard:
            return found
        nodes = [unheard.get(known[one.incarnation].folder) for one in found]
        return tuple(
            one if node is None else msgspec.structs.replace(one, unheard_node=node.node)
            for one, node in zip(found, nodes, strict=True)
        )

    def _pulse_ns(self, incarnation: Incarnation) -> int:
        return read_pulse(self._follower.spool_dir / incarnation.folder)


def _replaced(one: RankFacts, newest: float, number: int) -> RankFacts:
    if one.end is not None or newest - one.time < REPLACED_S:
        return one
    end = RankEnd(how=SILENCE, detail=f"nothing more was heard before attempt {number} began", time=one.time, step=one.step)
    return msgspec.structs.replace(one, end=end)
