"""Which attempt a life's steps belong to: what a launcher counts, what a rank repeats, and who has whose place."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping

import msgspec

from sentinel.decision import Decision, Tick
from sentinel.ingest.incarnation import Incarnation
from sentinel.ingest.parts import OpenStep, RankPartOfStep
from sentinel.messages import START
from sentinel.place import world_size_of

MAX_ATTEMPTS = 8
"""Newest attempts of which anything is remembered."""
MAX_UNHEARD = 1024
"""Ranks that are waited for, and named in each step, though nobody ever heard them (chosen)."""


@dataclasses.dataclass(slots=True)
class Stint:
    """One life while its steps rise; a life that goes back to an ended step begins another."""

    life: Incarnation
    generation: int
    attempt: int
    order: int
    """The newer stint of a rank takes its place."""


class EndedSteps(msgspec.Struct):
    """Where a life's steps stand, to tell going back from coming late."""

    step: int = -1
    seq: int = 0
    since: list[tuple[int, int]] = []
    """(first seq, generation), rising; generation 0 from the beginning is not listed."""
    health_seq: int = 0

    def hear(self, step: int, seq: int, *, is_end: bool) -> int:
        """Take note of a frame of a step, and return the generation of the life that it is of."""
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
    """What is remembered of an attempt across a restart."""

    number: int
    closed_step: int = -1
    world_size: int = 1
    spoken: dict[int, int] = {}
    """Rank -> the newest closed step that it is in."""
    table: dict[int, tuple[bytes, int]] = {}
    """Rank -> (life, layout id) of the descriptor that names were last made with."""


class Attempt:
    """One go at training: its ranks, and its steps that are open."""

    def __init__(self, state: AttemptState) -> None:
        self.state = state
        self.open: dict[int, OpenStep] = {}
        self.stints: dict[int, Stint] = {}
        """Rank -> the stint that has its place."""
        self.newest_step = state.closed_step
        self._worlds: dict[int, int] = {}
        """Rank -> of how many ranks it says that the run is."""

    @property
    def number(self) -> int:
        """As the launcher counts, or one more than the newest where it does not."""
        return self.state.number

    @property
    def oldest_open(self) -> int:
        """The first step that is open; ValueError: none is."""
        return min(self.open)

    def expected(self) -> set[int]:
        """Return the ranks that a step waits for: those that were heard, and the first of those that never were.

        Nobody can know that a world is as large as its ranks say.
        """
        unheard = (rank for rank in range(self.state.world_size) if rank not in self.stints)
        return {*self.stints, *itertools.islice(unheard, MAX_UNHEARD)}

    def take_world_size(self, rank: int, world_size: int) -> None:
        """Take note of how many ranks there are, as a rank says."""
        if self._worlds.get(rank) != world_size:
            self._worlds[rank] = world_size
            self.state.world_size = world_size_of(self._worlds)

    def has_room(self, rank: int) -> bool:
        """Whether a rank may be one of these, as any of them says."""
        return rank < max(self._worlds.values(), default=self.state.world_size)

    def is_over(self) -> bool:
        """Whether every rank that ever spoke has said bye."""
        return bool(self.stints) and all(stint.life.has_left for stint in self.stints.values())

    def heard_of(self, life: Incarnation) -> tuple[int, dict[int, int | None]]:
        """Return the newest closed step that a life's rank is in, and of the open ones the rows that came, None: all."""
        heard: dict[int, int | None] = {}
        for step, opened in self.open.items():
            for part in opened.parts.values():
                if part.life.id == life.id:
                    heard[step] = None if part.end is not None else part.num_rows
        return self.state.spoken.get(life.rank, -1), heard

    def waited_for(self, step: int, returning: Collection[int] = ()) -> list[int]:
        """Return the ranks that have not spoken for an open step, and may.

        returning: ranks with a life that has no step yet.
        """
        whole = {part.life.rank for part in self.open[step].parts.values() if part.is_whole}
        if len(whole) >= self.state.world_size and len(whole) >= len(self.stints):
            return []
        is_over = self.is_over()
        waited = []
        for rank in self.expected() - whole:
            stint = self.stints.get(rank)
            if rank in returning:
                waited.append(rank)
            elif stint is None:
                if not is_over:
                    waited.append(rank)
            elif not stint.life.has_left:
                waited.append(rank)
        return waited

    def is_heard_after(self, step: int, returning: Collection[int] = ()) -> bool:
        """Whether the next open step behind one waits for nobody."""
        later = [one for one in self.open if one > step]
        return bool(later) and not self.waited_for(min(later), returning)

    def has_spoken(self, rank: int, step: int) -> bool:
        """Whether a rank had its part in this step or a later one before all went on: then the run went back."""
        if self.state.spoken.get(rank, -1) >= step:
            return True
        return any(
            at >= step
            and any(part.life.rank == rank and part.is_whole for part in opened.parts.values())
            and not self.waited_for(at)
            for at, opened in self.open.items()
        )


class Attempts:
    """The attempts of a run, and the place of each life in them."""

    def __init__(self) -> None:
        self.by_number: dict[int, Attempt] = {}
        self.newcomers: dict[bytes, Incarnation] = {}
        """Lives that have a descriptor, and no step yet."""
        self.declared: dict[int, int] = {}
        """Attempt as the launcher counts -> the newest one here that lives of it are in."""
        self.ended_until: dict[int, float] = {}
        """Attempt -> time of the newest record when it was decided that it is over; what is heard later lives."""
        self._stints: dict[tuple[bytes, int], Stint] = {}
        self._newest_of: dict[bytes, int] = {}
        self._decided: dict[tuple[bytes, int], int] = {}
        """Stint -> attempt, as decisions to be replayed say it."""

    @property
    def newest(self) -> int:
        """The highest number; -1: there is none."""
        return max(self.by_number, default=-1)

    def arrive(self, life: Incarnation) -> None:
        """Have a life wait for its first step, unless it had one."""
        if not any((life.id, generation) in self._stints for generation in (0, 1)):
            self.newcomers[life.id] = life

    def returning(self) -> set[int]:
        """Return the ranks with a life that has no step yet."""
        return {life.rank for life in self.newcomers.values()}

    def chosen(self, attempt: Attempt, step: int) -> dict[int, RankPartOfStep]:
        """Return, per rank, the part of the newest stint that spoke of an open step; ranks rising."""
        chosen: dict[int, RankPartOfStep] = {}
        orders: dict[int, int] = {}
        for key, part in attempt.open[step].parts.items():
            rank, order = part.life.rank, self._stints[key].order
            if rank not in chosen or order > orders[rank]:
                chosen[rank], orders[rank] = part, order
        return dict(sorted(chosen.items()))

    def attempt_of(self, life: bytes) -> int | None:
        """Return the attempt of a life's newest stint; None: it has none yet."""
        return self._newest_of.get(life)

    def note_end(self, tick: Tick) -> None:
        """Remember that an attempt is over, where a tick says so."""
        if tick.ended is not None:
            self.ended_until[tick.attempt] = tick.time

    def group_of(self, life: Incarnation) -> int:
        """Return the attempt that a life's end counts for: that of its newest steps; without any, the one that it belongs to
        by its launcher or its rank, which may be one that has no number yet.
        """
        found = self._newest_of.get(life.id)
        if found is None and life.attempt is not None:
            found = self.declared.get(life.attempt, life.attempt if self.newest < 0 else self.newest + 1)
        elif found is None:
            newest = self.by_number.get(self.newest)
            found = self.newest + 1 if newest is None or life.rank in newest.stints else self.newest
        return found

    def heard_of(self, life: Incarnation, replays: Iterable[Decision | Tick]) -> tuple[int, dict[int, int | None]]:
        """Return the newest step that was judged with a life, and what is known of steps above it (`run_losses.unheard`).

        replays: decisions that are still to be made again: what they took was judged.
        """
        attempt = self.by_number.get(self._newest_of.get(life.id, -1))
        spoken, heard = (-1, {}) if attempt is None else attempt.heard_of(life)
        for one in replays:
            if isinstance(one, Decision) and any(part.life == life.id for part in one.ranks):
                heard[one.step] = None
        return spoken, heard

    def place_as_decided(self, life: bytes, generation: int, number: int) -> None:
        """Have a stint that is yet to be heard belong to the attempt that a decision says."""
        self._decided[life, generation] = number

    def place(self, life: Incarnation, generation: int, step: int) -> Stint:
        """Return the stint that a life's step is of; at its first step find its attempt, or open one."""
        known = self._stints.get((life.id, generation))
        if known is not None:
            return known
        self.newcomers.pop(life.id, None)
        number = self._decided.get((life.id, generation))
        if number is None:
            number = self._choose(life, generation, step)
        if number not in self.by_number:
            self.by_number[number] = Attempt(AttemptState(number))
            for old in sorted(self.by_number)[:-MAX_ATTEMPTS]:
                if not self.by_number[old].open:
                    del self.by_number[old]
        if life.attempt is not None:
            self.declared[life.attempt] = max(number, self.declared.get(life.attempt, number))
        stint = Stint(life, generation, number, len(self._stints))
        self._stints[life.id, generation] = stint
        self._newest_of[life.id] = number
        self.by_number[number].stints[life.rank] = stint
        return stint

    def _choose(self, life: Incarnation, generation: int, step: int) -> int:
        newest = self.newest
        former = self._stints.get((life.id, generation - 1))
        if life.attempt is not None and life.attempt not in self.declared:
            is_free = life.attempt not in self.by_number and life.attempt >= newest - MAX_ATTEMPTS // 2
            return life.attempt if is_free else newest + 1
        if former is not None:
            candidate = newest if life.attempt is None else self.declared[life.attempt]
            if candidate == former.attempt:
                return newest + 1
        elif life.attempt is not None:
            candidate = self.declared[life.attempt]
            if self._is_of_another_world(life, candidate):
                # The world shrank or grew, and its launcher calls that the same attempt: nobody waits for former ranks.
                return newest + 1
        elif newest < 0:
            return 0
        else:
            # A life that does not know its attempt has a place only where its rank's is free.
            candidate = newest
            attempt = self.by_number[newest]
            is_free = life.rank not in attempt.stints and not attempt.is_over()
            if not is_free or life.descriptor is None or self._is_of_another_world(life, newest):
                return newest + 1
        found = self.by_number.get(candidate)
        return newest + 1 if found is not None and found.has_spoken(life.rank, step) else candidate

    def _is_of_another_world(self, life: Incarnation, number: int) -> bool:
        found = self.by_number.get(number)
        if found is None or not found.stints or life.descriptor is None:
            return False
        if life.rank in found.stints or found.is_over():
            return life.descriptor.place.world_size != found.state.world_size
        if found.has_room(life.rank):
            # All would be new if they were started again: this one has its place among those that are there, and errs.
            return False
        # For them there is no such rank: either all are started again, or they err of how many they are.
        is_of_them = all(_began_together(life, stint.life) for stint in found.stints.values())
        if is_of_them and self.returning().isdisjoint(found.stints):
            return False
        return life.descriptor.place.world_size != found.state.world_size

    def states(self) -> list[AttemptState]:
        """Return what is to be remembered of each attempt, in rising order."""
        return [attempt.state for _, attempt in sorted(self.by_number.items())]

    def stints(self) -> list[tuple[bytes, int, int, int]]:
        """Return (life, generation, attempt, order) of each stint."""
        return [(life, generation, one.attempt, one.order) for (life, generation), one in self._stints.items()]

    def restore(
        self,
        states: Iterable[AttemptState],
        stints: Iterable[tuple[bytes, int, int, int]],
        declared: dict[int, int],
        lives: Mapping[bytes, Incarnation],
    ) -> None:
        """Go on from what `states`, `stints` and `declared` were."""
        self.declared = declared
        self.by_number = {one.number: Attempt(one) for one in states}
        for life_id, generation, number, order in sorted(stints, key=lambda one: one[3]):
            life = lives.get(life_id)
            if life is not None and number in self.by_number:
                stint = Stint(life, generation, number, order)
                self._stints[life_id, generation] = stint
                self._newest_of[life_id] = number
                self.by_number[number].stints[life.rank] = stint
                if life.descriptor is not None:
                    self.by_number[number].take_world_size(life.rank, life.descriptor.place.world_size)


def _began_together(life: Incarnation, other: Incarnation) -> bool:
    """Return whether two lives are of one start, whatever they say of the number of ranks.

    They agreed on their attempt with the same rank 0; or, on one machine, the other wrote on after this one had begun: a
    launcher ends all ranks before it starts them again.
    """
    if life.descriptor is None or other.descriptor is None:
        return False
    mine, others = life.descriptor.environment, other.descriptor.environment
    starts = mine.get(START, ""), others.get(START, "")
    if all(starts):
        return starts[0] == starts[1]
    machines = [(one.get("host", ""), one.get("boot", "")) for one in (mine, others)]
    is_one_clock = machines[0] == machines[1] and machines[0] != ("", "")
    return is_one_clock and 0 < life.first_wall_ns < other.last_wall_ns
