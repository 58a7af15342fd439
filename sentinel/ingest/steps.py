"""Closes steps: decides when a step has been heard, writes the decision down, and only then hands the step to the judge."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
import numpy as np

from sentinel.errors import WireError
from sentinel.ingest.decision import Decision, Described, RankPart
from sentinel.ingest.follow import Life, Position, Record
from sentinel.ingest.merge import Layout, RankStep, StepView
from sentinel.messages import Bye, Descriptor, EndStep, Health
from sentinel.record import ROW_DTYPE
from sentinel.wire.frame import FrameType, row_dtype

LATE_AFTER_STEPS = 2
LATE_AFTER_S = 30.0
MAX_OPEN_STEPS = 64
"""Steps of one attempt that may be open at once; past it the oldest closes with what there is (chosen)."""
MAX_HEALTH = 256
"""Health records of a life that a closed step shows; more are dropped."""
MAX_WAITING_HEALTH = 16 * MAX_HEALTH
"""Health records of a life that wait for the end of their steps; more are counted and dropped."""
MAX_ATTEMPTS = 8
"""Newest attempts of which anything is remembered."""


@dataclasses.dataclass(slots=True)
class _Part:
    """What one life said of one step."""

    life: Life
    generation: int
    rows: list[tuple[int, int, Record]] = dataclasses.field(default_factory=list)
    """(seq, rows, record)"""
    end: Record | None = None
    end_step: EndStep | None = None
    first: tuple[int, tuple[int, int]] = (0, (0, 0))
    """Lowest seq and lowest place of its frames; they need not be of the same one."""

    @property
    def num_rows(self) -> int:
        return sum(count for _, count, _ in self.rows)

    @property
    def is_whole(self) -> bool:
        return self.end_step is not None and self.num_rows >= self.end_step.num_rows

    @property
    def last_seq(self) -> int:
        seqs = [seq for seq, _, _ in self.rows]
        if self.end is not None:
            seqs.append(self.end.frame.header.seq)
        return max(seqs, default=0)


@dataclasses.dataclass(slots=True)
class _OpenStep:
    first_heard: float
    parts: dict[tuple[bytes, int], _Part] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Stint:
    """One life while its steps rise; a life that goes back to an ended step begins another."""

    life: Life
    generation: int
    attempt: int
    order: int
    """The newer stint of a rank takes its place."""


class _Ended(msgspec.Struct):
    """Where a life's steps stand, to tell going back from coming late."""

    step: int = -1
    seq: int = 0
    since: list[tuple[int, int]] = []
    """(first seq, generation), rising; generation 0 from the beginning is not listed."""
    health_seq: int = 0

    def generation_of(self, seq: int) -> int:
        found = 0
        for first, generation in self.since:
            if seq >= first:
                found = generation
        return found


class _AttemptState(msgspec.Struct):
    """What is remembered of an attempt across a restart."""

    number: int
    closed_step: int = -1
    world_size: int = 1
    spoken: dict[int, int] = {}
    """Rank -> the newest closed step that it is in."""
    table: dict[int, tuple[bytes, int]] = {}
    """Rank -> (life, layout id) of the descriptor that names were last made with."""


class _State(msgspec.Struct):
    seq: int
    attempts: list[_AttemptState]
    declared: dict[int, int]
    stints: list[tuple[bytes, int, int, int]]
    """(life, generation, attempt, order)"""
    ended: dict[bytes, _Ended]
    positions: dict[str, Position]
    heard: dict[bytes, int] = {}
    blindness: dict[str, int] = {}
    num_late_rows: dict[int, int] = {}


class _Attempt:
    def __init__(self, state: _AttemptState) -> None:
        self.state = state
        self.open: dict[int, _OpenStep] = {}
        self.stints: dict[int, _Stint] = {}
        """Rank -> the stint that has its place."""
        self.newest_step = state.closed_step

    @property
    def number(self) -> int:
        return self.state.number

    def is_over(self) -> bool:
        """Whether every rank that ever spoke has said bye."""
        return bool(self.stints) and all(stint.life.bye is not None for stint in self.stints.values())


class StepAssembler:
    """Turns what is heard into closed steps, in rising order of (attempt, step). No clock, no I/O: `now` is handed in."""

    def __init__(
        self,
        run: str,
        *,
        on_decision: Callable[[Decision], None],
        late_after_steps: int = LATE_AFTER_STEPS,
        late_after_s: float = LATE_AFTER_S,
        max_open_steps: int = MAX_OPEN_STEPS,
        pack_hash: str = "",
    ) -> None:
        """late_after_steps, late_after_s: 0 switches the limit off. `on_decision` must make the decision durable."""
        self.run = run
        self.pack_hash = pack_hash
        """Hash of the rules that the next decisions are judged with."""
        self.num_late_rows: dict[int, int] = {}
        """Rank -> rows that came after their step was closed."""
        self.num_incomplete_replays = 0
        """Decisions whose frames are no longer all there: judged again with less than before."""
        self._on_decision = on_decision
        self._late_after_steps = late_after_steps
        self._late_after_s = late_after_s
        self._max_open_steps = max_open_steps
        self._seq = 0
        self._attempts: dict[int, _Attempt] = {}
        self._declared: dict[int, int] = {}
        self._stints: dict[tuple[bytes, int], _Stint] = {}
        self._placed: dict[tuple[bytes, int], int] = {}
        """Stint -> attempt, as decisions to be replayed say it."""
        self._ended: dict[bytes, _Ended] = {}
        self._lives: dict[bytes, Life] = {}
        self._newcomers: dict[bytes, Life] = {}
        """Lives that have a descriptor, and no step yet."""
        self._health: dict[bytes, list[tuple[int, Health, tuple[int, int]]]] = {}
        self._heard: dict[bytes, tuple[int, tuple[int, int]]] = {}
        """Life -> (seq, place behind) of its last frame taken."""
        self._blindness: dict[str, int] = {}
        """Untold; below zero while a replay has not met yet what its decisions told."""
        self._counted: dict[int, int] = {}
        """Attempt -> newest step that was closed at the snapshot, and life -> newest frame then: counted already."""
        self._counted_seq: dict[bytes, int] = {}
        self._replays: deque[Decision] = deque()
        self._layouts: dict[tuple[tuple[int, bytes, int], ...], Layout] = {}

    @property
    def num_open_steps(self) -> int:
        """Steps that wait for somebody."""
        return sum(len(attempt.open) for attempt in self._attempts.values())

    @property
    def newest_step(self) -> int:
        """The newest step anybody spoke of in the newest attempt; -1: none yet."""
        return self._attempts[max(self._attempts)].newest_step if self._attempts else -1

    @property
    def attempt(self) -> int:
        """The newest attempt; -1: none yet."""
        return max(self._attempts, default=-1)

    @property
    def num_late_rows_total(self) -> int:
        """Rows that came after their step was closed, all ranks."""
        return sum(self.num_late_rows.values())

    # -- in ---------------------------------------------------------------------------------------------------------

    def take(self, records: Iterable[Record], now: float) -> None:
        """Take in what was heard. now: monotonic seconds, the same clock at every call."""
        for record in records:
            self._take(record, now)

    def _take(self, record: Record, now: float) -> None:
        life, header = record.life, record.frame.header
        self._lives[life.id] = life
        seq = header.seq
        behind = (record.frame.file_index, record.frame.offset_after)
        if seq > self._heard.get(life.id, (0, (0, 0)))[0]:
            self._heard[life.id] = (seq, behind)
        if isinstance(record.message, Descriptor):
            if not any((life.id, generation) in self._stints for generation in (0, 1)):
                self._newcomers[life.id] = life
        elif isinstance(record.message, Health):
            self._take_health(life, seq, record)
        elif header.type == FrameType.ROWS or isinstance(record.message, EndStep):
            self._take_step(record, now)
        elif isinstance(record.message, Bye):
            self._newcomers.pop(life.id, None)

    def _take_health(self, life: Life, seq: int, record: Record) -> None:
        assert isinstance(record.message, Health)
        if seq <= self._ended.setdefault(life.id, _Ended()).health_seq:
            return
        waiting = self._health.setdefault(life.id, [])
        if len(waiting) >= MAX_WAITING_HEALTH:
            self._blind("lost_health", 1)
            return
        waiting.append((seq, record.message, record.begin))

    def _take_step(self, record: Record, now: float) -> None:
        life, header = record.life, record.frame.header
        step, seq = header.step, header.seq
        if record.descriptor is None and life.descriptor is None:
            if seq > self._counted_seq.get(life.id, 0):
                self._blind("unplaced_rows", header.row_count)
            return
        ended = self._ended.setdefault(life.id, _Ended())
        if step <= ended.step and seq > ended.seq:
            # Written after the end of a step that is not before it: the trainer went back.
            ended.since.append((seq, (ended.since[-1][1] if ended.since else 0) + 1))
            ended.step = step - 1
        generation = ended.generation_of(seq)
        if isinstance(record.message, EndStep) and seq > ended.seq:
            ended.step, ended.seq = step, seq
        stint = self._stints.get((life.id, generation)) or self._place(life, generation, step)
        attempt = self._attempts[stint.attempt]
        descriptor = record.descriptor or life.descriptor
        if descriptor is not None and attempt.stints.get(stint.life.rank) is stint:
            attempt.state.world_size = descriptor.place.world_size
        if step <= attempt.state.closed_step and not self._is_wanted(attempt.number, step, stint):
            closed_before, heard_before = self._counted.get(attempt.number, -1), self._counted_seq.get(life.id, 0)
            if step > closed_before or seq > heard_before:
                self._count_late(life.rank, header.row_count, 0 if header.row_count else 1)
            return
        attempt.newest_step = max(attempt.newest_step, step)
        opened = attempt.open.get(step)
        if opened is None:
            opened = attempt.open[step] = _OpenStep(now)
        part = opened.parts.get((life.id, generation))
        if part is None:
            part = opened.parts[life.id, generation] = _Part(life, generation, first=(seq, record.begin))
        else:
            part.first = _earlier(part.first, (seq, record.begin))
        if isinstance(record.message, EndStep):
            if part.end is None:
                part.end, part.end_step = record, record.message
        else:
            part.rows.append((seq, header.row_count, record))

    def _is_wanted(self, attempt: int, step: int, stint: _Stint) -> bool:
        """Whether a decision that is still to be replayed took this stint's frames of a closed step."""
        return bool(self._replays) and any(
            (one.attempt, one.step) == (attempt, step)
            and any(part.life == stint.life.id and part.generation == stint.generation for part in one.ranks)
            for one in self._replays
        )

    # -- attempts ---------------------------------------------------------------------------------------------------

    def _place(self, life: Life, generation: int, step: int) -> _Stint:
        """Find the attempt of a life's first step, or open one."""
        self._newcomers.pop(life.id, None)
        number = self._placed.get((life.id, generation))
        if number is None:
            number = self._choose(life, generation, step)
        if number not in self._attempts:
            self._attempts[number] = _Attempt(_AttemptState(number))
            for old in sorted(self._attempts)[:-MAX_ATTEMPTS]:
                if not self._attempts[old].open:
                    del self._attempts[old]
        if life.attempt is not None:
            self._declared[life.attempt] = max(number, self._declared.get(life.attempt, number))
        attempt = self._attempts[number]
        stint = _Stint(life, generation, number, len(self._stints))
        self._stints[life.id, generation] = stint
        attempt.stints[life.rank] = stint
        return stint

    def _choose(self, life: Life, generation: int, step: int) -> int:
        newest = max(self._attempts, default=-1)
        former = self._stints.get((life.id, generation - 1))
        if life.attempt is not None and life.attempt not in self._declared:
            is_free = life.attempt not in self._attempts and life.attempt >= newest - MAX_ATTEMPTS // 2
            return life.attempt if is_free else newest + 1
        if former is not None:
            candidate = newest if life.attempt is None else self._declared[life.attempt]
            if candidate == former.attempt:
                return newest + 1
        elif life.attempt is not None:
            candidate = self._declared[life.attempt]
        elif newest < 0:
            return 0
        else:
            # A life that does not know its attempt has a place only where its rank's is free.
            candidate = newest
            attempt = self._attempts[newest]
            place = life.descriptor.place if life.descriptor is not None else None
            is_free = life.rank not in attempt.stints and not attempt.is_over()
            if not is_free or place is None or place.world_size != attempt.state.world_size:
                return newest + 1
        return newest + 1 if self._has_spoken(candidate, life.rank, step) else candidate

    def _has_spoken(self, number: int, rank: int, step: int) -> bool:
        """Whether a rank had its part in this step or a later one before all went on: then the run went back."""
        attempt = self._attempts.get(number)
        if attempt is None:
            return False
        if attempt.state.spoken.get(rank, -1) >= step:
            return True
        return any(
            at >= step
            and any(part.life.rank == rank and part.is_whole for part in opened.parts.values())
            and not self._waited_for(attempt, at, newcomers=False)
            for at, opened in attempt.open.items()
        )

    # -- out --------------------------------------------------------------------------------------------------------

    def close(self, now: float, behind: Collection[bytes] = (), *, settled_step: int | None = None) -> Iterator[StepView]:
        """Yield the steps that can be closed, in order; each decision is journalled before its view is handed out.

        `behind`: lives of which more is on disk than was taken in (`RunFollower.behind`); they are not called late.
        `settled_step`: `newest_step` before the last poll. Ranks are read one after the other, so what one rank wrote
        while another had just been read makes nobody late; None: all were read at one instant.
        Between two views, `snapshot` is the state after the one that was handed out last.
        """
        yield from self._replay(behind)
        if not self._replays and not behind:
            self._blindness = {what: count for what, count in self._blindness.items() if count > 0}
        while not self._replays:
            found = self._next(now, behind, settled_step)
            if found is None:
                return
            yield self._decide(*found)

    def finish(self, now: float) -> Iterator[StepView]:
        """Yield what is left: the run is over, nobody speaks any more."""
        yield from self.close(now)
        while self._replays:
            yield self._replayed()
        for number in sorted(self._attempts):
            while self._attempts[number].open:
                yield self._decide(self._attempts[number], min(self._attempts[number].open), "finished")

    def _next(self, now: float, behind: Collection[bytes], settled_step: int | None) -> tuple[_Attempt, int, str] | None:
        numbers = sorted(number for number, attempt in self._attempts.items() if attempt.open)
        found: tuple[_Attempt, int, str] | None = None
        for number in numbers:
            attempt = self._attempts[number]
            step = min(attempt.open)
            why = self._why_closed(attempt, step, now, behind, settled_step)
            if why:
                found = (attempt, step, why)
                break
        if found is None:
            return None
        # Steps of an older attempt come first, whoever they wait for: its ranks have been replaced.
        oldest = self._attempts[numbers[0]]
        if oldest is found[0]:
            return found
        if any(stint.life.id in behind for stint in oldest.stints.values()):
            return None
        return oldest, min(oldest.open), "superseded"

    def _why_closed(
        self, attempt: _Attempt, step: int, now: float, behind: Collection[bytes], settled_step: int | None
    ) -> str:
        """Return why a step is closed now; empty: it is not."""
        waiting = self._waited_for(attempt, step)
        if not waiting:
            return "complete"
        if behind and any(life.rank in waiting and life.id in behind for life in self._lives.values()):
            return ""
        newest_step = attempt.newest_step if settled_step is None else min(attempt.newest_step, settled_step)
        if self._late_after_steps and newest_step - step >= self._late_after_steps:
            return "late_steps"
        if self._late_after_s and now - attempt.open[step].first_heard >= self._late_after_s:
            return "late_time"
        return "crowded" if len(attempt.open) > self._max_open_steps else ""

    def _waited_for(self, attempt: _Attempt, step: int, *, newcomers: bool = True) -> list[int]:
        """Return the ranks that have not spoken for an open step, and may."""
        whole = {part.life.rank for part in attempt.open[step].parts.values() if part.is_whole}
        if len(whole) >= attempt.state.world_size and len(whole) >= len(attempt.stints):
            return []
        returning = {life.rank for life in self._newcomers.values()} if newcomers else set()
        is_over = attempt.is_over()
        waited = []
        for rank in {*range(attempt.state.world_size), *attempt.stints} - whole:
            stint = attempt.stints.get(rank)
            if rank in returning:
                waited.append(rank)
            elif stint is None:
                if not is_over:
                    waited.append(rank)
            elif stint.life.bye is None:
                waited.append(rank)
        return waited

    def _chosen(self, attempt: _Attempt, step: int) -> dict[int, _Part]:
        """Return, per rank, the part of the newest stint that spoke of the step."""
        chosen: dict[int, _Part] = {}
        orders: dict[int, int] = {}
        for key, part in attempt.open[step].parts.items():
            rank, order = part.life.rank, self._stints[key].order
            if rank not in chosen or order > orders[rank]:
                chosen[rank], orders[rank] = part, order
        return dict(sorted(chosen.items()))

    def _decide(self, attempt: _Attempt, step: int, why: str) -> StepView:
        chosen = self._chosen(attempt, step)
        ranks = tuple(
            RankPart(
                rank=rank, life=part.life.id, num_rows=part.num_rows, last_seq=part.last_seq,
                layout_id=_layout_id(part), generation=part.generation, is_ended=part.end_step is not None,
            )
            for rank, part in chosen.items()
        )  # fmt: skip
        missing: dict[int, str] = {}
        for rank in sorted({*range(attempt.state.world_size), *attempt.stints}):
            if rank in chosen:
                if not chosen[rank].is_whole:
                    missing[rank] = "unfinished"
            elif rank in attempt.stints:
                missing[rank] = "ended" if attempt.stints[rank].life.bye is not None else "late"
            else:
                has_begun = any(life.rank == rank for life in self._newcomers.values())
                missing[rank] = "late" if has_begun else "never started"
        described = []
        known = {**{rank: stint.life for rank, stint in attempt.stints.items()}}
        known.update({life.rank: life for life in self._newcomers.values() if life.rank not in known})
        for rank, life in sorted(known.items()):
            if rank not in chosen and life.descriptor is not None:
                entry = (life.id, life.layout_id)
                if attempt.state.table.get(rank) != entry:
                    described.append(Described(rank=rank, life=life.id, layout_id=life.layout_id))
        self._seq += 1
        wall_ns = [_wall_ns(part, part.last_seq) for part in chosen.values()]
        decision = Decision(
            seq=self._seq, run=self.run, attempt=attempt.number, step=step, ranks=ranks, missing=missing, why=why,
            time=max(wall_ns, default=0) / 1e9, pack_hash=self.pack_hash, described=tuple(described),
            blindness={what: count for what, count in sorted(self._blindness.items()) if count > 0},
        )  # fmt: skip
        self._tell(decision)
        self._on_decision(decision)
        return self._view(decision)

    def _view(self, decision: Decision) -> StepView:
        """Make the view that a decision describes, and close the step."""
        attempt = self._attempts.setdefault(decision.attempt, _Attempt(_AttemptState(decision.attempt)))
        opened = attempt.open.pop(decision.step, None)
        attempt.state.closed_step = max(attempt.state.closed_step, decision.step)
        attempt.newest_step = max(attempt.newest_step, decision.step)
        table = attempt.state.table
        for known in decision.described:
            table[known.rank] = (known.life, known.layout_id)
        parts = []
        is_incomplete = False
        for one in decision.ranks:
            attempt.state.spoken[one.rank] = max(decision.step, attempt.state.spoken.get(one.rank, -1))
            table[one.rank] = (one.life, one.layout_id)
            part = opened.parts.get((one.life, one.generation)) if opened is not None else None
            made = self._rank_step(one, part)
            if made is None:
                is_incomplete = True
            else:
                is_incomplete |= len(made.rows) < one.num_rows
                parts.append(made)
        # Rows are also short in the first run when their descriptor was lost; then the replay is as complete as that.
        self.num_incomplete_replays += is_incomplete
        self._count_left_over(decision, opened)
        layout = self._layout(table)
        return StepView(
            run=decision.run, attempt=decision.attempt, step=decision.step, layout=layout, parts=parts, decision=decision
        )

    def _rank_step(self, one: RankPart, part: _Part | None) -> RankStep | None:
        life = self._lives.get(one.life)
        descriptor = life.layouts.get(one.layout_id, life.descriptor) if life is not None else None
        if life is None or part is None or descriptor is None:
            return None
        rows = [_rows_of(record, descriptor) for seq, _, record in sorted(part.rows, key=_by_seq) if seq <= one.last_seq]
        end_step = part.end_step if one.is_ended else None
        ended = self._ended.setdefault(life.id, _Ended())
        waiting = self._health.pop(life.id, [])
        health = tuple(message for seq, message, _ in waiting if seq <= one.last_seq)[:MAX_HEALTH]
        if left := [item for item in waiting if item[0] > one.last_seq]:
            self._health[life.id] = left
        ended.health_seq = max(ended.health_seq, one.last_seq)
        return RankStep(
            rank=one.rank,
            descriptor=descriptor,
            rows=rows[0] if len(rows) == 1 else np.concatenate([np.empty(0, ROW_DTYPE), *rows]),
            end_step=end_step,
            time=_wall_ns(part, one.last_seq) / 1e9,
            health=health,
        )

    def _count_left_over(self, decision: Decision, opened: _OpenStep | None) -> None:
        """Count what lies in a closed step without being part of it: replaced lives, and on replay what came late."""
        if opened is None:
            return
        taken = {(one.life, one.generation): one for one in decision.ranks}
        for key, part in opened.parts.items():
            one = taken.get(key)
            num_rows = sum(count for seq, count, _ in part.rows if one is None or seq > one.last_seq)
            num_frames = part.end is not None and (one is None or not one.is_ended)
            if num_rows or num_frames:
                self._count_late(part.life.rank, num_rows, int(num_frames))

    def _layout(self, table: Mapping[int, tuple[bytes, int]]) -> Layout:
        key = tuple((rank, life, layout_id) for rank, (life, layout_id) in sorted(table.items()))
        layout = self._layouts.get(key)
        if layout is None:
            descriptors = {}
            for rank, life_id, layout_id in key:
                life = self._lives.get(life_id)
                descriptor = life.layouts.get(layout_id, life.descriptor) if life is not None else None
                if descriptor is not None:
                    descriptors[rank] = descriptor
            layout = Layout(descriptors)
            while len(self._layouts) >= 2:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = layout
        return layout

    def _count_late(self, rank: int, num_rows: int, num_frames: int) -> None:
        if num_rows:
            self.num_late_rows[rank] = self.num_late_rows.get(rank, 0) + num_rows
            self._blind("late_rows", num_rows)
        if num_frames:
            self._blind("late_frames", num_frames)

    def _blind(self, what: str, count: int) -> None:
        self._blindness[what] = self._blindness.get(what, 0) + count

    def _tell(self, decision: Decision) -> None:
        """Take off what a decision tells; what it told before it was met again on a replay stands below zero until then."""
        for what, count in decision.blindness.items():
            self._blind(what, -count)

    # -- restarts ---------------------------------------------------------------------------------------------------

    def replay_decisions(self, decisions: Iterable[Decision]) -> None:
        """Make exactly these steps, from exactly these frames, before any new one is decided. They are not journalled again.

        Call it before the first `take`; after `restore` where there is a snapshot, with the decisions behind it.
        """
        for decision in decisions:
            self._replays.append(decision)
            for one in decision.ranks:
                self._placed[one.life, one.generation] = decision.attempt

    def _replay(self, behind: Collection[bytes]) -> Iterator[StepView]:
        while self._replays and (not behind or self._is_replayable(self._replays[0])):
            yield self._replayed()

    def _replayed(self) -> StepView:
        decision = self._replays.popleft()
        self._seq = max(self._seq, decision.seq)
        self._tell(decision)
        return self._view(decision)

    def _is_replayable(self, decision: Decision) -> bool:
        attempt = self._attempts.get(decision.attempt)
        opened = attempt.open.get(decision.step) if attempt is not None else None
        if opened is None:
            return not decision.ranks
        for one in decision.ranks:
            part = opened.parts.get((one.life, one.generation))
            if part is None or (one.is_ended and part.end is None):
                return False
            if sum(count for seq, count, _ in part.rows if seq <= one.last_seq) < one.num_rows:
                return False
        return all(one.life in self._lives for one in decision.described)

    def positions(self) -> dict[str, Position]:
        """Return, per spool folder, up to where nothing is needed any more: to acknowledge, and to go on from."""
        needed: dict[bytes, tuple[int, tuple[int, int]]] = {}
        for attempt in self._attempts.values():
            for opened in attempt.open.values():
                for part in opened.parts.values():
                    needed[part.life.id] = _earlier(part.first, needed.get(part.life.id, part.first))
        for life_id, waiting in self._health.items():
            if waiting:
                first = (min(seq for seq, _, _ in waiting), min(begin for _, _, begin in waiting))
                needed[life_id] = _earlier(first, needed.get(life_id, first))
        found = {}
        for life_id, (seq, behind) in self._heard.items():
            life = self._lives[life_id]
            if life_id in needed:
                seq, behind = needed[life_id][0] - 1, needed[life_id][1]
            found[life.folder] = Position(
                life_id, life.rank, life.attempt, behind[0], behind[1], seq, life.described_at, life.last_step
            )
        return found

    def snapshot(self) -> bytes:
        """Return the state after the last view; `restore` and the decisions behind it make the same views again."""
        state = _State(
            seq=self._seq,
            attempts=[attempt.state for _, attempt in sorted(self._attempts.items())],
            declared=self._declared,
            stints=[(life, generation, stint.attempt, stint.order) for (life, generation), stint in self._stints.items()],
            ended=self._ended,
            positions=self.positions(),
            heard={life: seq for life, (seq, _) in self._heard.items()},
            blindness=self._blindness,
            num_late_rows=self.num_late_rows,
        )
        return msgspec.msgpack.encode(state)

    def restore(self, snapshot: bytes, lives: Mapping[bytes, Life]) -> None:
        """Go on from a snapshot. `lives`: those of a follower restored to `snapshot_positions(snapshot)`."""
        state = msgspec.msgpack.decode(snapshot, type=_State)
        self._seq = state.seq
        self._declared = state.declared
        self._ended = state.ended
        self._blindness, self.num_late_rows = state.blindness, state.num_late_rows
        self._counted = {one.number: one.closed_step for one in state.attempts}
        self._counted_seq = state.heard
        self._lives = dict(lives)
        self._attempts = {one.number: _Attempt(one) for one in state.attempts}
        for life_id, generation, number, order in sorted(state.stints, key=lambda one: one[3]):
            life = lives.get(life_id)
            if life is not None and number in self._attempts:
                stint = _Stint(life, generation, number, order)
                self._stints[life_id, generation] = stint
                self._attempts[number].stints[life.rank] = stint
        for position in state.positions.values():
            self._heard[position.life] = (position.seq, (position.file_index, position.offset))


def snapshot_positions(snapshot: bytes) -> dict[str, Position]:
    """Return where a follower must go on reading for `StepAssembler.restore`."""
    return msgspec.msgpack.decode(snapshot, type=_State).positions


def _earlier(a: tuple[int, tuple[int, int]], b: tuple[int, tuple[int, int]]) -> tuple[int, tuple[int, int]]:
    """Return the lower seq and the lower place of two."""
    return min(a[0], b[0]), min(a[1], b[1])


def _by_seq(item: tuple[int, int, Record]) -> int:
    return item[0]


def _layout_id(part: _Part) -> int:
    """Return the id of the newest descriptor that the part's frames point into: tables only grow within a step."""
    records = [record for _, _, record in part.rows]
    if part.end is not None:
        records.append(part.end)
    newest = max(records, key=lambda record: record.frame.header.seq)
    return newest.frame.header.layout_id


def _wall_ns(part: _Part, last_seq: int) -> int:
    """Return the wall clock of a part's last frame, among those up to last_seq."""
    walls = [record.frame.header.wall_ns for seq, _, record in part.rows if seq <= last_seq]
    if part.end is not None and part.end.frame.header.seq <= last_seq:
        walls.append(part.end.frame.header.wall_ns)
    return max(walls, default=0)


def _rows_of(record: Record, descriptor: Descriptor) -> np.ndarray:
    """Return the rows of a frame as [rows] ROW_DTYPE, whatever version of the row its writer has; a view where it can be."""
    try:
        theirs = row_dtype(record.descriptor or descriptor)
        found: np.ndarray = np.frombuffer(record.frame.payload, theirs)
    except (WireError, ValueError):
        return np.empty(0, ROW_DTYPE)
    if theirs == ROW_DTYPE:
        return found
    rows = np.zeros(len(found), ROW_DTYPE)
    for name in set(theirs.names or ()) & set(ROW_DTYPE.names or ()):
        rows[name] = found[name]
    return rows
