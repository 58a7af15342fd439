"""Closes steps: decides when a step has been heard, writes the decision down, and only then hands the step to the judge."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from sentinel.decision import Decision, DescribedRank, RankFacts, RankPart, Tick
from sentinel.incident import IncidentAct
from sentinel.ingest.attempts import Attempt, Attempts, AttemptState, EndedSteps, Stint
from sentinel.ingest.follow import Incarnation, SpoolPosition, SpoolRecord
from sentinel.ingest.merge import ClosedStep, LayoutCache, ModelLayout
from sentinel.ingest.parts import OpenStep, RankPartOfStep, earlier
from sentinel.ingest.run_losses import RunLosses, unheard
from sentinel.ingest.waiting_health import WaitingHealth
from sentinel.messages import Bye, Descriptor, EndStep, Health
from sentinel.run_end import RunEnd
from sentinel.step_view import RankStep
from sentinel.wire.frame import FrameType

LATE_AFTER_STEPS = 2
LATE_AFTER_S = 30.0
MAX_OPEN_STEPS = 64
"""Steps of one attempt that may be open at once; past it the oldest closes with what there is (chosen)."""

_ROWS = int(FrameType.ROWS)


class _AssemblerState(msgspec.Struct):
    seq: int
    attempts: list[AttemptState]
    declared: dict[int, int]
    stints: list[tuple[bytes, int, int, int]]
    """(life, generation, attempt, order)"""
    ended: dict[bytes, EndedSteps]
    positions: dict[str, SpoolPosition]
    heard: dict[bytes, int] = {}
    blindness: dict[str, int] = {}
    num_late_rows: dict[int, int] = {}
    losses: RunLosses = msgspec.field(default_factory=RunLosses)
    ended_until: dict[int, float] = {}


class StepAssembler:
    """Turns what is heard into closed steps, in rising order of (attempt, step). No clock, no I/O: `now` is handed in."""

    def __init__(
        self,
        run: str,
        *,
        on_decision: Callable[[Decision | Tick], None],
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
        self.losses = RunLosses()
        """What ranks measured and nobody judged, since the run began."""
        self._on_decision = on_decision
        self._late_after_steps = late_after_steps
        self._late_after_s = late_after_s
        self._max_open_steps = max_open_steps
        self._seq = 0
        self.attempts = Attempts()
        """Which attempt each life belongs to, and which attempts are over."""
        self._ended: dict[bytes, EndedSteps] = {}
        self._lives: dict[bytes, Incarnation] = {}
        self._health = WaitingHealth()
        self._heard: dict[bytes, tuple[int, tuple[int, int]]] = {}
        """Life -> (seq, place behind) of its last frame taken."""
        self._blindness: dict[str, int] = {}
        """Untold; below zero while a replay has not met yet what its decisions told."""
        self._counted: dict[int, int] = {}
        """Attempt -> newest step that was closed at the snapshot, and life -> newest frame then: counted already."""
        self._counted_seq: dict[bytes, int] = {}
        self._replays: deque[Decision | Tick] = deque()
        self._layouts = LayoutCache()

    @property
    def num_open_steps(self) -> int:
        """Steps that wait for somebody."""
        return sum(len(attempt.open) for attempt in self.attempts.by_number.values())

    @property
    def newest_step(self) -> int:
        """The newest step anybody spoke of in the newest attempt; -1: none yet."""
        newest = self.attempts.by_number.get(self.attempts.newest)
        return newest.newest_step if newest is not None else -1

    @property
    def attempt(self) -> int:
        """The newest attempt; -1: none yet."""
        return self.attempts.newest

    @property
    def num_late_rows_total(self) -> int:
        """Rows that came after their step was closed, all ranks."""
        return sum(self.num_late_rows.values())

    # -- in ---------------------------------------------------------------------------------------------------------

    def take(self, records: Iterable[SpoolRecord], now: float) -> None:
        """Take in what was heard. now: monotonic seconds, the same clock at every call."""
        for record in records:
            self._take(record, now)

    def _take(self, record: SpoolRecord, now: float) -> None:
        life, header = record.life, record.frame.header
        self._lives[life.id] = life
        seq = header.seq
        behind = (record.frame.file_index, record.frame.offset_after)
        if seq > self._heard.get(life.id, (0, (0, 0)))[0]:
            self._heard[life.id] = (seq, behind)
        if header.type == _ROWS or isinstance(record.message, EndStep):
            self._take_step(record, now)
        elif isinstance(record.message, Descriptor):
            self.attempts.arrive(life)
        elif isinstance(record.message, Health):
            self._take_health(life, seq, record)
        elif isinstance(record.message, Bye):
            life.has_left = True
            self.attempts.newcomers.pop(life.id, None)

    def _take_health(self, life: Incarnation, seq: int, record: SpoolRecord) -> None:
        assert isinstance(record.message, Health)
        if seq <= self._ended_of(life).health_seq:
            return
        message: Health | None = record.message
        if record.message.code == "steps_dropped":
            message = unheard(record.message, *self.attempts.heard_of(life, self._replays))
        if message is not None and not self._health.add(life.id, seq, message, record.begin):
            self._blind("lost_health", 1)

    def _ended_of(self, life: Incarnation) -> EndedSteps:
        found = self._ended.get(life.id)
        if found is None:
            found = self._ended[life.id] = EndedSteps()
        return found

    def _take_step(self, record: SpoolRecord, now: float) -> None:
        life, header = record.life, record.frame.header
        step, seq = header.step, header.seq
        if record.descriptor is None and life.descriptor is None:
            if seq > self._counted_seq.get(life.id, 0):
                self._blind("unplaced_rows", header.row_count)
            return
        ended = self._ended_of(life)
        generation = ended.hear(step, seq, is_end=isinstance(record.message, EndStep))
        stint = self.attempts.place(life, generation, step)
        attempt = self.attempts.by_number[stint.attempt]
        descriptor = record.descriptor or life.descriptor
        if descriptor is not None and attempt.stints.get(stint.life.rank) is stint:
            attempt.take_world_size(life.rank, descriptor.place.world_size)
        if step <= attempt.state.closed_step and not self._is_wanted(attempt.number, step, stint):
            closed_before, heard_before = self._counted.get(attempt.number, -1), self._counted_seq.get(life.id, 0)
            if step > closed_before or seq > heard_before:
                self._count_late(life.rank, header.row_count, 0 if header.row_count else 1)
            return
        attempt.newest_step = max(attempt.newest_step, step)
        opened = attempt.open.get(step)
        if opened is None:
            opened = attempt.open[step] = OpenStep(now)
        opened.add(record, generation)

    def _is_wanted(self, attempt: int, step: int, stint: Stint) -> bool:
        """Whether a decision that is still to be replayed took this stint's frames of a closed step."""
        return bool(self._replays) and any(
            isinstance(one, Decision)
            and (one.attempt, one.step) == (attempt, step)
            and any(part.life == stint.life.id and part.generation == stint.generation for part in one.ranks)
            for one in self._replays
        )

    # -- out --------------------------------------------------------------------------------------------------------

    def close(
        self,
        now: float,
        behind: Collection[bytes] = (),
        *,
        settled_step: int | None = None,
        before_attempt: Callable[[int], Iterable[Tick]] | None = None,
    ) -> Iterator[ClosedStep | Tick]:
        """Yield the steps that can be closed, in order; each decision is journalled before its view is handed out.

        Ticks are among them only on a replay, where they were decided.

        `behind`: lives of which more is on disk than was taken in (`RunFollower.behind`); they are not called late.
        `settled_step`: `newest_step` before the last poll. Ranks are read one after the other, so what one rank wrote
        while another had just been read makes nobody late; None: all were read at one instant.
        `before_attempt`: asked for what is to be decided before the first step of an attempt that follows another.
        Between two views, `snapshot` is the state after the one that was handed out last.
        """
        yield from self._replay(behind)
        if not self._replays and not behind:
            self._blindness = {what: count for what, count in self._blindness.items() if count > 0}
        while not self._replays:
            found = self._next(now, behind, settled_step)
            if found is None:
                return
            if before_attempt is not None and found[0].state.closed_step < 0 and found[0].number > 0:
                yield from before_attempt(found[0].number)
            yield self._decide(*found)

    def finish(self, now: float) -> Iterator[ClosedStep | Tick]:
        """Yield what is left: the run is over, nobody speaks any more."""
        yield from self.close(now)
        while self._replays:
            yield self._replayed()
        for _, attempt in sorted(self.attempts.by_number.items()):
            while attempt.open:
                yield self._decide(attempt, attempt.oldest_open, "finished")

    @property
    def is_replaying(self) -> bool:
        """Whether decisions wait to be made again: until then there are no new ones."""
        return bool(self._replays)

    def tick(
        self, ranks: tuple[RankFacts, ...], now: float, acts: tuple[IncidentAct, ...] = (), *,
        attempt: int | None = None, ended: RunEnd | None = None,
    ) -> Tick:  # fmt: skip
        """Decide that this is a moment to judge who lives: journalled like the decision on a step. now: seconds watched.

        attempt: that of these ranks; None: the newest. ended: it is over. acts: what people did about incidents.
        """
        assert not self._replays
        number = max(self.attempts.newest, 0) if attempt is None else attempt
        known = self.attempts.by_number.get(number)
        self._seq += 1
        tick = Tick(
            seq=self._seq, run=self.run, attempt=number, now=now, ranks=ranks, ended=ended, acts=acts,
            step=known.state.closed_step if known is not None else -1,
            time=max((one.time for one in ranks), default=0.0), pack_hash=self.pack_hash,
        )  # fmt: skip
        self.attempts.note_end(tick)
        self._on_decision(tick)
        return tick

    def _next(self, now: float, behind: Collection[bytes], settled_step: int | None) -> tuple[Attempt, int, str] | None:
        attempts = [attempt for _, attempt in sorted(self.attempts.by_number.items()) if attempt.open]
        found: tuple[Attempt, int, str] | None = None
        for attempt in attempts:
            step = attempt.oldest_open
            why = self._why_closed(attempt, step, now, behind, settled_step)
            if why:
                found = (attempt, step, why)
                break
        if found is None:
            return None
        # Steps of an older attempt come first, whoever they wait for: its ranks have been replaced.
        oldest = attempts[0]
        if oldest is found[0]:
            return found
        if any(stint.life.id in behind for stint in oldest.stints.values()):
            return None
        return oldest, oldest.oldest_open, "superseded"

    def _why_closed(
        self, attempt: Attempt, step: int, now: float, behind: Collection[bytes], settled_step: int | None
    ) -> str:
        """Return why a step is closed now; empty: it is not."""
        waiting = attempt.waited_for(step, self.attempts.returning())
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

    def _decide(self, attempt: Attempt, step: int, why: str) -> ClosedStep:
        chosen = self.attempts.chosen(attempt, step)
        ranks = tuple(part.decided(rank) for rank, part in chosen.items())
        self._seq += 1
        decision = Decision(
            seq=self._seq, run=self.run, attempt=attempt.number, step=step, ranks=ranks, why=why,
            missing=self._missing(attempt, chosen), described=self._described(attempt, chosen),
            time=max([part.last_wall_ns for part in chosen.values()], default=0) / 1e9, pack_hash=self.pack_hash,
            blindness={what: count for what, count in sorted(self._blindness.items()) if count > 0},
            is_catching_up=any(one.num_lost for one in ranks) and attempt.is_heard_after(step, self.attempts.returning()),
        )  # fmt: skip
        self._tell(decision)
        self._on_decision(decision)
        return self._view(decision)

    def _missing(self, attempt: Attempt, chosen: Mapping[int, RankPartOfStep]) -> dict[int, str]:
        """Return why ranks are not whole in a step, ranks rising."""
        missing = {rank: "unfinished" for rank, part in chosen.items() if not part.is_whole}
        returning = self.attempts.returning()
        for rank in attempt.expected().difference(chosen):
            if rank in attempt.stints:
                missing[rank] = "ended" if attempt.stints[rank].life.has_left else "late"
            else:
                missing[rank] = "late" if rank in returning else "never started"
        return dict(sorted(missing.items()))

    def _described(self, attempt: Attempt, chosen: Mapping[int, RankPartOfStep]) -> tuple[DescribedRank, ...]:
        """Return what the table does not say yet of ranks that are not in a step, ranks rising."""
        if not self.attempts.newcomers and len(chosen) == len(attempt.stints):
            return ()
        absent = {life.rank: life for life in self.attempts.newcomers.values() if life.rank not in chosen}
        absent |= {rank: stint.life for rank, stint in attempt.stints.items() if rank not in chosen}
        return tuple(
            DescribedRank(rank=rank, life=life.id, layout_id=life.layout_id)
            for rank, life in sorted(absent.items())
            if life.descriptor is not None and attempt.state.table.get(rank) != (life.id, life.layout_id)
        )

    def _view(self, decision: Decision) -> ClosedStep:
        """Make the view that a decision describes, and close the step."""
        attempt = self.attempts.by_number.get(decision.attempt)
        if attempt is None:
            attempt = self.attempts.by_number[decision.attempt] = Attempt(AttemptState(decision.attempt))
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
        self.losses.take(decision, (told for part in parts for told in part.health))
        # Rows are also short in the first run when their descriptor was lost; then the replay is as complete as that.
        self.num_incomplete_replays += is_incomplete
        self._count_left_over(decision, opened)
        layout = self._layout(table)
        return ClosedStep(
            run=decision.run, attempt=decision.attempt, step=decision.step, layout=layout, parts=parts, decision=decision
        )

    def _rank_step(self, one: RankPart, part: RankPartOfStep | None) -> RankStep | None:
        life = self._lives.get(one.life)
        descriptor = life.layouts.get(one.layout_id, life.descriptor) if life is not None else None
        if life is None or part is None or descriptor is None:
            return None
        end_step = part.end_step if one.is_ended else None
        ended = self._ended_of(life)
        health = self._health.take(life.id, one.last_seq)
        ended.health_seq = max(ended.health_seq, one.last_seq)
        return RankStep(
            rank=one.rank,
            descriptor=descriptor,
            rows=part.rows_until(one.last_seq, descriptor),
            end_step=end_step,
            time=part.wall_ns(one.last_seq) / 1e9,
            health=health,
            life=one.life,
            ended_mono_s=part.end.frame.header.mono_ns / 1e9 if part.end is not None and end_step is not None else 0.0,
        )

    def _count_left_over(self, decision: Decision, opened: OpenStep | None) -> None:
        """Count what lies in a closed step without being part of it: replaced lives, and on replay what came late."""
        if opened is None:
            return
        taken = {(one.life, one.generation): one for one in decision.ranks}
        for key, part in opened.parts.items():
            one = taken.get(key)
            if one is not None and part.last_seq <= one.last_seq and (one.is_ended or part.end is None):
                continue
            num_rows = sum(count for seq, count, _ in part.rows if one is None or seq > one.last_seq)
            num_frames = part.end is not None and (one is None or not one.is_ended)
            if num_rows or num_frames:
                self._count_late(part.life.rank, num_rows, int(num_frames))

    def _layout(self, table: Mapping[int, tuple[bytes, int]]) -> ModelLayout:
        key = tuple([(rank, life, layout_id) for rank, (life, layout_id) in sorted(table.items())])
        return self._layouts.of(key, lambda: self._descriptors(key))

    def _descriptors(self, key: Iterable[tuple[int, bytes, int]]) -> dict[int, Descriptor]:
        lives = ((rank, self._lives.get(life), layout_id) for rank, life, layout_id in key)
        found = ((rank, life.layouts.get(at, life.descriptor)) for rank, life, at in lives if life is not None)
        return {rank: descriptor for rank, descriptor in found if descriptor is not None}

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

    def replay_decisions(self, decisions: Iterable[Decision | Tick]) -> None:
        """Make exactly these steps, from exactly these frames, before any new one is decided. They are not journalled again.

        Call it before the first `take`; after `restore` where there is a snapshot, with the decisions behind it.
        """
        for decision in decisions:
            self._replays.append(decision)
            for one in decision.ranks if isinstance(decision, Decision) else ():
                self.attempts.place_as_decided(one.life, one.generation, decision.attempt)

    def _replay(self, behind: Collection[bytes]) -> Iterator[ClosedStep | Tick]:
        while self._replays and (not behind or self._is_replayable(self._replays[0])):
            yield self._replayed()

    def _replayed(self) -> ClosedStep | Tick:
        decision = self._replays.popleft()
        self._seq = max(self._seq, decision.seq)
        if isinstance(decision, Tick):
            self.attempts.note_end(decision)
            return decision
        self._tell(decision)
        return self._view(decision)

    def _is_replayable(self, decision: Decision | Tick) -> bool:
        if isinstance(decision, Tick):
            return True
        attempt = self.attempts.by_number.get(decision.attempt)
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

    def positions(self) -> dict[str, SpoolPosition]:
        """Return, per spool folder, up to where nothing is needed any more: to acknowledge, and to go on from."""
        needed: dict[bytes, tuple[int, tuple[int, int]]] = {}
        for attempt in self.attempts.by_number.values():
            for opened in attempt.open.values():
                for part in opened.parts.values():
                    needed[part.life.id] = earlier(part.first, needed.get(part.life.id, part.first))
        for life_id, first in self._health.oldest():
            needed[life_id] = earlier(first, needed.get(life_id, first))
        found = {}
        for life_id, (seq, behind) in self._heard.items():
            life = self._lives[life_id]
            if life_id in needed:
                seq, behind = needed[life_id][0] - 1, needed[life_id][1]
            found[life.folder] = SpoolPosition(
                life_id, life.rank, life.attempt, behind[0], behind[1], seq, life.described_before(behind), life.last_step,
                life.bye.reason if life.bye is not None and life.has_left and life_id not in needed else None,
            )  # fmt: skip
        return found

    def snapshot(self) -> bytes:
        """Return the state after the last view; `restore` and the decisions behind it make the same views again."""
        state = _AssemblerState(
            seq=self._seq,
            attempts=self.attempts.states(),
            declared=self.attempts.declared,
            stints=self.attempts.stints(),
            ended=self._ended,
            positions=self.positions(),
            heard={life: seq for life, (seq, _) in self._heard.items()},
            blindness=self._blindness,
            num_late_rows=self.num_late_rows,
            losses=self.losses,
            ended_until=self.attempts.ended_until,
        )
        return msgspec.msgpack.encode(state)

    def restore(self, snapshot: bytes, lives: Mapping[bytes, Incarnation]) -> None:
        """Go on from a snapshot. `lives`: those of a follower restored to `snapshot_positions(snapshot)`."""
        state = msgspec.msgpack.decode(snapshot, type=_AssemblerState)
        self._seq = state.seq
        self._ended = state.ended
        self._blindness, self.num_late_rows = state.blindness, state.num_late_rows
        self.losses = state.losses
        self._counted = {one.number: one.closed_step for one in state.attempts}
        self._counted_seq = state.heard
        self._lives = dict(lives)
        self.attempts.restore(state.attempts, state.stints, state.declared, lives)
        self.attempts.ended_until = state.ended_until
        for position in state.positions.values():
            self._heard[position.life] = (position.seq, (position.file_index, position.offset))


def snapshot_positions(snapshot: bytes) -> dict[str, SpoolPosition]:
    """Return where a follower must go on reading for `StepAssembler.restore`."""
    return msgspec.msgpack.decode(snapshot, type=_AssemblerState).positions
