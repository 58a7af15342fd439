"""Assigns the steps of each incarnation to an attempt, by the launcher's count, repeated steps, and replaced ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from sentinel.decision import Decision, Tick
from sentinel.ingest.incarnation import Incarnation
from sentinel.ingest.step_parts import OpenStep, RankPartOfStep
from sentinel.messages import START
from sentinel.place import world_size_of

MAX_ATTEMPTS = 8
"""Newest attempts whose state is kept; a bound on memory."""
MAX_SILENT = 1024
"""Ranks without any frame that are waited for, and named as missing in each step; a bound on the size of a step's record."""


@dataclasses.dataclass(slots=True)
class Session:
    """One incarnation while its steps rise; an incarnation that goes back to an ended step begins another."""

    incarnation: Incarnation
    generation: int
    attempt: int
    order: int
    """Rises with each session: of two sessions of a rank the one with the higher order counts."""


class EndedSteps(msgspec.Struct):
    """The newest steps of an incarnation, by which a return to an ended step is distinguished from a late frame."""

    step: int = -1
    seq: int = 0
    since: list[tuple[int, int]] = []
    """(first seq, generation), rising; generation 0 from the beginning is not listed."""
    health_seq: int = 0

    def receive(self, step: int, seq: int, *, is_end: bool) -> int:
        """Record a frame of a step, and return the generation of the incarnation to which it belongs."""
        if step <= self.step and seq > self.seq:
            # Written after the end of a step that is not before it: the trainer went back.
            self.since.append((seq, (self.since[-1][1] if self.since else 0) + 1))
            self.step = step - 1
        if is_end and seq > self.seq:
            self.step, self.seq = step, seq
        found = 0
        for first, generation in self.since:
            if seq >= first:
                found = generation
        return found


class AttemptState(msgspec.Struct):
    """The state of an attempt that a snapshot keeps across a restart of the daemon."""

    number: int
    closed_step: int = -1
    world_size: int = 1
    reported: dict[int, int] = msgspec.field(name="spoken", default_factory=dict)
    """Rank -> the newest closed step that includes rows of it."""
    table: dict[int, tuple[bytes, int]] = {}
    """Rank -> (incarnation, layout id) of the descriptor that names were last made with."""


class Attempt:
    """One start of the training: its ranks, and its steps that are not closed yet."""

    def __init__(self, state: AttemptState) -> None:
        self.state = state
        self.open: dict[int, OpenStep] = {}
        self.sessions: dict[int, Session] = {}
        """Rank -> the newest session of that rank, whose frames count."""
        self.newest_step = state.closed_step
        self._worlds: dict[int, int] = {}
        """Rank -> number of ranks of the run by its descriptor."""
        self._num_worlds = Counter[int]()
        """Such a number -> ranks whose descriptor has it."""
        self._last_rank = -1
        """The highest of these."""

    @property
    def number(self) -> int:
        """The launcher's count, or one more than the newest attempt where the launcher does not count."""
        return self.state.number

    @property
    def oldest_open(self) -> int:
        """The first step that is open; ValueError: none is."""
        return min(self.open)

    def expected(self) -> set[int]:
        """Return the ranks that a step waits for: those of which a frame came, and the first `MAX_SILENT` of which none did.

        Nobody can know that a world is as large as its ranks say.
        """
        silent = (rank for rank in range(self.state.world_size) if rank not in self.sessions)
        return {*self.sessions, *itertools.islice(silent, MAX_SILENT)}

    def take_world_size(self, rank: int, world_size: int) -> None:
        """Record the number of ranks by a rank's descriptor."""
        former = self._worlds.get(rank)
        if former == world_size:
            return
        if former is not None:
            self._num_worlds[former] -= 1
        self._worlds[rank] = world_size
        self._num_worlds[world_size] += 1
        self._last_rank = max(self._last_rank, rank)
        self.state.world_size = world_size_of(+self._num_worlds, self._last_rank)

    def has_room(self, rank: int) -> bool:
        """Whether a rank's number is below the number of ranks by any descriptor of the attempt."""
        return rank < max(+self._num_worlds, default=self.state.world_size)

    def is_over(self) -> bool:
        """Whether every rank of which a frame came has left: its bye was read, or its process is gone."""
        return bool(self.sessions) and all(session.incarnation.has_left for session in self.sessions.values())

    def received_of(self, incarnation: Incarnation) -> tuple[int, dict[int, int | None]]:
        """Return the newest closed step that an incarnation's rank is in, and of the open ones the rows that came, None:
        all."""
        received: dict[int, int | None] = {}
        for step, opened in self.open.items():
            for part in opened.of_rank.get(incarnation.rank, ()):
                if part.incarnation.id == incarnation.id:
                    received[step] = None if part.end is not None else part.num_rows
        return self.state.reported.get(incarnation.rank, -1), received

    def waited_for(self, step: int, returning: Collection[int] = ()) -> list[int]:
        """Return the ranks whose part of an open step is missing and may still come.

        returning: ranks with an incarnation that has no step yet.
        """
        whole = {part.incarnation.rank for part in self.open[step].parts.values() if part.is_whole}
        if len(whole) >= self.state.world_size and len(whole) >= len(self.sessions):
            return []
        is_over = self.is_over()
        return [rank for rank in self.expected() - whole if rank in returning or self._may_come(rank, is_over=is_over)]

    def surely_waits(self, step: int, ranks: Iterable[int], returning: Collection[int] = ()) -> bool:
        """Return whether any of these ranks is one of `waited_for`, where that is seen without a look at all others."""
        opened = self.open[step]
        if len(opened.of_rank) >= max(self.state.world_size, len(self.sessions)):
            return False
        return any(
            rank in self.sessions
            and not any(part.is_whole for part in opened.of_rank.get(rank, ()))
            and (rank in returning or self._may_come(rank, is_over=False))
            for rank in ranks
        )

    def _may_come(self, rank: int, *, is_over: bool) -> bool:
        session = self.sessions.get(rank)
        return not is_over if session is None else not session.incarnation.has_left

    def is_received_after(self, step: int, returning: Collection[int] = ()) -> bool:
        """Whether the next open step after this one waits for no rank."""
        later = [one for one in self.open if one > step]
        return bool(later) and not self.waited_for(min(later), returning)

    def has_reported(self, rank: int, step: int) -> bool:
        """Whether a rank had its part in this step or a later one before all went on: then the run went back."""
        if self.state.reported.get(rank, -1) >= step:
            return True
        return any(
            at >= step and any(part.is_whole for part in opened.of_rank.get(rank, ())) and not self.waited_for(at)
            for at, opened in self.open.items()
        )


class Attempts:
    """The attempts of a run, and the place of each incarnation in them."""

    def __init__(self) -> None:
        self.by_number: dict[int, Attempt] = {}
        self.newcomers: dict[bytes, Incarnation] = {}
        """Incarnations of which a descriptor came and no frame of a step."""
        self._newcomer_of: dict[int, bytes] = {}
        """Rank -> the last that was one of these."""
        self.declared: dict[int, int] = {}
        """The launcher's count of an attempt -> number of the newest attempt that has incarnations of it."""
        self.ended_until: dict[int, float] = {}
        """Attempt -> time of the newest record when it was declared over; incarnations with later records are not over."""
        self._sessions: dict[tuple[bytes, int], Session] = {}
        self._newest_of: dict[bytes, int] = {}
        self._decided: dict[tuple[bytes, int], int] = {}
        """Session -> attempt, from the decisions that are still to be replayed."""
        self._dropped: set[int] = set()
        """Attempts whose state is not kept any more."""
        self._next_order = 0

    @property
    def newest(self) -> int:
        """The highest number; -1: there is none."""
        return max(self.by_number, default=-1)

    def arrive(self, incarnation: Incarnation) -> None:
        """Add an incarnation to `newcomers`, unless a step of it has come; one of its rank that began none is gone."""
        if any((incarnation.id, generation) in self._sessions for generation in (0, 1)):
            return
        former = self._newcomer_of.get(incarnation.rank, incarnation.id)
        if former != incarnation.id:
            self.newcomers.pop(former, None)
        self.newcomers[incarnation.id] = incarnation
        self._newcomer_of[incarnation.rank] = incarnation.id

    def returning(self) -> set[int]:
        """Return the ranks with an incarnation that has no step yet."""
        return {incarnation.rank for incarnation in self.newcomers.values()}

    def chosen(self, attempt: Attempt, step: int) -> dict[int, RankPartOfStep]:
        """Return, per rank, the part of an open step of the newest session that has one; ranks rising."""
        chosen: dict[int, RankPartOfStep] = {}
        orders: dict[int, int] = {}
        for key, part in attempt.open[step].parts.items():
            rank, order = part.incarnation.rank, self._sessions[key].order
            if rank not in chosen or order > orders[rank]:
                chosen[rank], orders[rank] = part, order
        return dict(sorted(chosen.items()))

    def attempt_of(self, incarnation: bytes) -> int | None:
        """Return the attempt of an incarnation's newest session; None: it has none yet."""
        return self._newest_of.get(incarnation)

    def note_end(self, tick: Tick) -> None:
        """Record that an attempt is over, where a tick has the run's end."""
        if tick.ended is not None:
            self.ended_until[tick.attempt] = tick.time

    def group_of(self, incarnation: Incarnation) -> int:
        """Return the attempt that an incarnation's end counts for: that of its newest steps; without any, the one that it
        belongs to
        by its launcher or its rank, which may be one that has no number yet.
        """
        found = self._newest_of.get(incarnation.id)
        if found is None and incarnation.attempt is not None and incarnation.attempt in self.declared:
            found = self.declared[incarnation.attempt]
        elif found is None and incarnation.attempt is not None:
            found = incarnation.attempt if self.newest < 0 else self.newest + (not self._lacks(incarnation, self.newest))
        elif found is None:
            newest = self.by_number.get(self.newest)
            found = self.newest + 1 if newest is None or incarnation.rank in newest.sessions else self.newest
        return found

    def is_of(self, newcomer: Incarnation, number: int) -> bool:
        """Return whether an incarnation that has no step yet is one of an attempt's, as far as is known."""
        return self.group_of(newcomer) == number and not self._is_of_another_world(newcomer, number)

    def received_of(self, incarnation: Incarnation, replays: Iterable[Decision | Tick]) -> tuple[int, dict[int, int | None]]:
        """Return the newest step that was judged with an incarnation, and what is known of steps above it
        (`run_losses.silent`).

        replays: decisions that are still to be made again: what they took was judged.
        """
        attempt = self.by_number.get(self._newest_of.get(incarnation.id, -1))
        reported, received = (-1, {}) if attempt is None else attempt.received_of(incarnation)
        for one in replays:
            if isinstance(one, Decision) and any(part.incarnation == incarnation.id for part in one.ranks):
                received[one.step] = None
        return reported, received

    def place_as_decided(self, incarnation: bytes, generation: int, number: int) -> None:
        """Assign a session of which no frame was read yet to the attempt of a decision that is replayed."""
        self._decided[incarnation, generation] = number

    def place(self, incarnation: Incarnation, generation: int, step: int) -> Session | None:
        """Return the session that an incarnation's step is of; at its first step find its attempt, or open one.

        None: the attempt is so long over that its state is not kept any more.
        """
        known = self._sessions.get((incarnation.id, generation))
        if known is not None:
            return known if known.attempt in self.by_number else None
        self.newcomers.pop(incarnation.id, None)
        decided = self._decided.get((incarnation.id, generation))
        number = self._choose(incarnation, generation, step) if decided is None else decided
        if number in self._dropped and decided is None:
            return None
        if number not in self.by_number:
            self._open(number)
        if incarnation.attempt is not None:
            self.declared[incarnation.attempt] = max(number, self.declared.get(incarnation.attempt, number))
        return self._add(Session(incarnation, generation, number, self._next_order))

    def _open(self, number: int) -> None:
        self.by_number[number] = Attempt(AttemptState(number))
        self._dropped.discard(number)
        for old in sorted(self.by_number)[:-MAX_ATTEMPTS]:
            if old != number and not self.by_number[old].open:
                del self.by_number[old]
                self._dropped.add(old)

    def _add(self, session: Session) -> Session:
        incarnation, attempt = session.incarnation, self.by_number.get(session.attempt)
        self._next_order = max(self._next_order, session.order + 1)
        self._sessions[incarnation.id, session.generation] = session
        self._newest_of[incarnation.id] = session.attempt
        if attempt is None:
            self._dropped.add(session.attempt)
        else:
            attempt.sessions[incarnation.rank] = session
        return session

    def _choose(self, incarnation: Incarnation, generation: int, step: int) -> int:
        newest = self.newest
        former = self._sessions.get((incarnation.id, generation - 1))
        if incarnation.attempt is not None and incarnation.attempt not in self.declared:
            if self._lacks(incarnation, newest):
                return newest
            is_free = incarnation.attempt not in self.by_number and incarnation.attempt >= newest - MAX_ATTEMPTS // 2
            return incarnation.attempt if is_free else newest + 1
        if former is not None:
            candidate = newest if incarnation.attempt is None else self.declared[incarnation.attempt]
            if former.attempt in self._dropped:
                return former.attempt
            if candidate == former.attempt:
                return newest + 1
        elif incarnation.attempt is not None:
            candidate = self.declared[incarnation.attempt]
            if candidate in self._dropped and self._is_begun_behind(incarnation, newest):
                # A job that is submitted again: its launcher counts from 0 once more.
                return newest + 1
            if self._is_of_another_world(incarnation, candidate):
                # The world shrank or grew, and its launcher calls that the same attempt: nobody waits for former ranks.
                return newest + 1
        elif newest < 0:
            return 0
        else:
            # An incarnation that does not know its attempt has a place only where its rank's is free.
            candidate = newest
            attempt = self.by_number[newest]
            is_free = incarnation.rank not in attempt.sessions and not attempt.is_over()
            if not is_free or incarnation.descriptor is None or self._is_of_another_world(incarnation, newest):
                return newest + 1
        found = self.by_number.get(candidate)
        return newest + 1 if found is not None and found.has_reported(incarnation.rank, step) else candidate

    def _lacks(self, incarnation: Incarnation, number: int) -> bool:
        """Return whether an attempt is of ranks that could not learn its number, and has the place of this one free: rank 0,
        who tells it, came late to them.
        """
        found = self.by_number.get(number)
        if found is None or incarnation.descriptor is None or incarnation.rank in found.sessions or found.is_over():
            return False
        is_of_unknown = all(one.incarnation.attempt is None for one in found.sessions.values())
        return is_of_unknown and bool(found.sessions) and not self._is_of_another_world(incarnation, number)

    def _is_begun_behind(self, incarnation: Incarnation, number: int) -> bool:
        """Return whether an incarnation began when those of an attempt wrote no more."""
        last_ns = max((one.incarnation.last_wall_ns for one in self.by_number[number].sessions.values()), default=0)
        return incarnation.first_wall_ns > last_ns

    def _is_of_another_world(self, incarnation: Incarnation, number: int) -> bool:
        found = self.by_number.get(number)
        if found is None or not found.sessions or incarnation.descriptor is None:
            return False
        if incarnation.rank in found.sessions or found.is_over():
            return incarnation.descriptor.place.world_size != found.state.world_size
        if found.has_room(incarnation.rank):
            # All would be new if they were started again: this one has its place among those that are there, and errs.
            return False
        # For them there is no such rank: either all are started again, or they err of how many they are.
        is_of_them = all(_began_together(incarnation, session.incarnation) for session in found.sessions.values())
        if is_of_them and self.returning().isdisjoint(found.sessions):
            return False
        return incarnation.descriptor.place.world_size != found.state.world_size

    def states(self) -> list[AttemptState]:
        """Return the state of each attempt for a snapshot, in rising order."""
        return [attempt.state for _, attempt in sorted(self.by_number.items())]

    def sessions(self) -> list[tuple[bytes, int, int, int]]:
        """Return (incarnation, generation, attempt, order) of each session."""
        return [
            (incarnation, generation, one.attempt, one.order) for (incarnation, generation), one in self._sessions.items()
        ]

    def restore(
        self,
        states: Iterable[AttemptState],
        sessions: Iterable[tuple[bytes, int, int, int]],
        declared: dict[int, int],
        newcomers: Iterable[bytes],
        incarnations: Mapping[bytes, Incarnation],
    ) -> None:
        """Go on from what `states`, `sessions`, `declared` and `newcomers` were."""
        self.declared = declared
        self.by_number = {one.number: Attempt(one) for one in states}
        self._dropped = set(declared.values()) - self.by_number.keys()
        for one in newcomers:
            if one in incarnations:
                self.arrive(incarnations[one])
        for incarnation_id, generation, number, order in sorted(sessions, key=lambda one: one[3]):
            incarnation, attempt = incarnations.get(incarnation_id), self.by_number.get(number)
            if incarnation is None:
                continue
            self._add(Session(incarnation, generation, number, order))
            if attempt is not None and incarnation.descriptor is not None:
                attempt.take_world_size(incarnation.rank, incarnation.descriptor.place.world_size)


def _began_together(incarnation: Incarnation, other: Incarnation) -> bool:
    """Return whether two incarnations are of one start, whatever they say of the number of ranks.

    They agreed on their attempt with the same rank 0; or, on one machine, the other wrote on after this one had begun: a
    launcher ends all ranks before it starts them again.
    """
    if incarnation.descriptor is None or other.descriptor is None:
        return False
    mine, others = incarnation.descriptor.environment, other.descriptor.environment
    starts = mine.get(START, ""), others.get(START, "")
    if all(starts):
        return starts[0] == starts[1]
    machines = [(one.get("host", ""), one.get("boot", "")) for one in (mine, others)]
    is_one_clock = machines[0] == machines[1] and machines[0] != ("", "")
    return is_one_clock and 0 < incarnation.first_wall_ns < other.last_wall_ns
