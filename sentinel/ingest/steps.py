"""StepAssembler: turns frames of all ranks into closed steps, each with the decision that it is closed.

A decision is a value. Whoever asks for steps writes it to the journal before it judges the step, and hands decisions of the
journal back after a restart: the same steps are made again, of the same frames.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from sentinel.decision import Decision, RankFacts, Tick
from sentinel.incident import IncidentAct
from sentinel.ingest.attempts import Attempts, AttemptState, EndedSteps
from sentinel.ingest.away_rows import RowSource
from sentinel.ingest.blindness import Blindness
from sentinel.ingest.closing import LATE_AFTER_S, LATE_AFTER_STEPS, MAX_OPEN_STEPS, Closing, DueStep, decide
from sentinel.ingest.decision_replay import DecisionReplay
from sentinel.ingest.incarnation import Incarnation, SpoolPosition, SpoolRecord
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.received import Received
from sentinel.ingest.run_losses import RunLosses
from sentinel.ingest.step_intake import StepIntake
from sentinel.ingest.step_making import StepMaker
from sentinel.run_end import RunEnd


class _AssemblerState(msgspec.Struct):
    seq: int
    attempts: list[AttemptState]
    declared: dict[int, int]
    sessions: list[tuple[bytes, int, int, int]]
    """(incarnation, generation, attempt, order)"""
    ended: dict[bytes, EndedSteps]
    positions: dict[str, SpoolPosition]
    received: dict[bytes, int] = {}
    blindness: dict[str, int] = {}
    num_late_rows: dict[int, int] = {}
    losses: RunLosses = msgspec.field(default_factory=RunLosses)
    ended_until: dict[int, float] = {}
    newcomers: list[bytes] = []


class StepAssembler:
    """Yields closed steps, in rising order of (attempt, step). Has no clock and no I/O: callers pass `now`."""

    def __init__(
        self,
        run: str,
        *,
        late_after_steps: int = LATE_AFTER_STEPS,
        late_after_s: float = LATE_AFTER_S,
        max_open_steps: int = MAX_OPEN_STEPS,
        pack_hash: str = "",
        rows_from: RowSource | None = None,
    ) -> None:
        """late_after_steps, late_after_s: 0 switches the limit off. rows_from: as of `StepMaker`."""
        self.run = run
        self.pack_hash = pack_hash
        """Hash of the rules that the next decisions are judged with."""
        self.losses = RunLosses()
        """Rows and steps that ranks measured and that were lost before they were judged, since the run began."""
        self.attempts = Attempts()
        """Which attempt each incarnation belongs to, and which attempts are over."""
        self._seq = 0
        self._received = Received()
        self._blindness = Blindness()
        self._replay = DecisionReplay(self.attempts, self._received)
        self._intake = StepIntake(self.attempts, self._received, self._replay, self._blindness)
        self._closing = Closing(
            self.attempts, self._received, late_after_steps=late_after_steps, late_after_s=late_after_s,
            max_open_steps=max_open_steps,
        )  # fmt: skip
        self._maker = StepMaker(self.attempts, self._received, self._blindness, rows_from)

    def use(self, late_after_steps: int, late_after_s: float) -> None:
        """Wait for late ranks up to other limits from now on; steps that were decided stay as they are."""
        self._closing.use(late_after_steps, late_after_s)

    @property
    def num_open_steps(self) -> int:
        """Number of open steps, which wait for parts of ranks."""
        return sum(len(attempt.open) for attempt in self.attempts.by_number.values())

    @property
    def newest_step(self) -> int:
        """The newest step of which any frame came in the newest attempt; -1: none yet."""
        newest = self.attempts.by_number.get(self.attempts.newest)
        return newest.newest_step if newest is not None else -1

    @property
    def attempt(self) -> int:
        """The newest attempt; -1: none yet."""
        return self.attempts.newest

    @property
    def num_late_rows(self) -> dict[int, int]:
        """Rank -> rows that came after their step was closed."""
        return self._blindness.num_late_rows

    @property
    def num_late_rows_total(self) -> int:
        """Rows that came after their step was closed, all ranks."""
        return sum(self.num_late_rows.values())

    @property
    def num_incomplete_replays(self) -> int:
        """Decisions whose frames are no longer all there: judged again with less than before."""
        return self._maker.num_incomplete

    @property
    def is_replaying(self) -> bool:
        """Whether decisions wait to be made again: until then there are no new ones."""
        return bool(self._replay)

    def take(self, records: Iterable[SpoolRecord], now: float) -> None:
        """Take in what was received. now: monotonic seconds, the same clock at every call."""
        for record in records:
            self._intake.take(record, now)

    def close(
        self,
        now: float,
        behind: Collection[bytes] = (),
        *,
        settled_step: int | None = None,
        before_attempt: Callable[[int], Iterable[Tick]] | None = None,
    ) -> Iterator[ClosedStep | Tick]:
        """Yield the steps that can be closed, in order, each with its decision: write that down before the step is judged.

        First come the replayed ones, ticks among them, in the order in which they were decided.

        `behind`: incarnations of which more is on disk than was taken in (`RunFollower.behind`); they are not called late.
        `settled_step`: `newest_step` before the last poll. Ranks are read one after the other, so what one rank wrote
        while another had just been read makes nobody late; None: all were read at one instant.
        `before_attempt`: asked for what is to be decided before the first step of an attempt that follows another.
        Between two views, `snapshot` is the state after the one that was handed out last.
        """
        while self._replay and (not behind or self._replay.is_ready()):
            yield self._replayed()
        if not self._replay and not behind:
            self._blindness.settle()
        while not self._replay:
            due = self._closing.due(now, behind, settled_step)
            if due is None:
                return
            if before_attempt is not None and due.attempt.state.closed_step < 0 and due.attempt.number > 0:
                yield from before_attempt(due.attempt.number)
            yield self._closed(due)

    def finish(self, now: float) -> Iterator[ClosedStep | Tick]:
        """Yield the open steps: the run is over, and no frame will come any more."""
        yield from self.close(now)
        while self._replay:
            yield self._replayed()
        for _, attempt in sorted(self.attempts.by_number.items()):
            while attempt.open:
                yield self._closed(DueStep(attempt, attempt.oldest_open, "finished"))

    def tick(
        self, ranks: tuple[RankFacts, ...], now: float, acts: tuple[IncidentAct, ...] = (), *,
        attempt: int | None = None, ended: RunEnd | None = None,
    ) -> Tick:  # fmt: skip
        """Return the decision that the ranks' liveness is judged now: journal it before it is judged.

        now: seconds watched. attempt: that of these ranks; None: the newest. ended: it is over. acts: what people did about
        incidents.
        """
        assert not self._replay
        number = max(self.attempts.newest, 0) if attempt is None else attempt
        known = self.attempts.by_number.get(number)
        self._seq += 1
        tick = Tick(
            seq=self._seq, run=self.run, attempt=number, now=now, ranks=ranks, ended=ended, acts=acts,
            step=known.state.closed_step if known is not None else -1,
            time=max((one.time for one in ranks), default=0.0), pack_hash=self.pack_hash,
        )  # fmt: skip
        self.attempts.note_end(tick)
        return tick

    def replay_decisions(self, decisions: Iterable[Decision | Tick]) -> None:
        """Make exactly these steps, from exactly these frames, before any new one is decided.

        Call it before the first `take`; after `restore` where there is a snapshot, with the decisions behind it.
        """
        self._replay.add(decisions)

    def positions(self) -> dict[str, SpoolPosition]:
        """Return, per spool folder, up to where nothing is needed any more: to acknowledge, and to go on from."""
        attempts = self.attempts.by_number.values()
        return self._received.positions(
            part for attempt in attempts for opened in attempt.open.values() for part in opened.parts.values()
        )

    def snapshot(self) -> bytes:
        """Return the state after the last view; `restore` and the decisions behind it make the same views again."""
        state = _AssemblerState(
            seq=self._seq,
            attempts=self.attempts.states(),
            declared=self.attempts.declared,
            sessions=self.attempts.sessions(),
            ended=self._received.ended,
            positions=self.positions(),
            received=self._received.newest_seqs(),
            blindness=self._blindness.unreported,
            num_late_rows=self._blindness.num_late_rows,
            losses=self.losses,
            ended_until=self.attempts.ended_until,
            newcomers=list(self.attempts.newcomers),
        )
        return msgspec.msgpack.encode(state)

    def restore(self, snapshot: bytes, incarnations: Mapping[bytes, Incarnation]) -> None:
        """Go on from a snapshot. `incarnations`: those of a follower restored to `snapshot_positions(snapshot)`."""
        state = msgspec.msgpack.decode(snapshot, type=_AssemblerState)
        self._seq = state.seq
        self.losses = state.losses
        self._blindness.unreported, self._blindness.num_late_rows = state.blindness, state.num_late_rows
        self._received.restore(incarnations, state.ended, state.positions.values())
        self._intake.restore(state.attempts, state.received)
        self.attempts.restore(state.attempts, state.sessions, state.declared, state.newcomers, incarnations)
        self.attempts.ended_until = state.ended_until

    def _closed(self, due: DueStep) -> ClosedStep:
        self._seq += 1
        decision = decide(
            due, self.attempts, seq=self._seq, run=self.run, pack_hash=self.pack_hash, blindness=self._blindness.to_report()
        )
        return self._made(decision)

    def _replayed(self) -> ClosedStep | Tick:
        decision = self._replay.next()
        self._seq = max(self._seq, decision.seq)
        if isinstance(decision, Tick):
            self.attempts.note_end(decision)
            return decision
        return self._made(decision)

    def _made(self, decision: Decision) -> ClosedStep:
        self._blindness.mark_reported(decision)
        view = self._maker.make(decision)
        self.losses.take(decision, (health for _, health in view.health))
        return view


def snapshot_positions(snapshot: bytes) -> dict[str, SpoolPosition]:
    """Return where a follower must go on reading for `StepAssembler.restore`."""
    return msgspec.msgpack.decode(snapshot, type=_AssemblerState).positions
