"""LivenessTracker: when the last frame of each rank came and when it made progress last, by the daemon's own clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from sentinel.decision import RankFacts
from sentinel.ingest.arrivals import NOBODY, Unheard
from sentinel.ingest.incarnation import Incarnation, SpoolRecord
from sentinel.messages import IMPOSSIBLE, Bye, EndStep, Health, Heartbeat

MAX_LOOK_S = 1.0
"""Most seconds that one look adds to a rank's silence. Too small: a daemon that looks rarely finds stalls late; too large:
ranks are accused for time in which the daemon, or its machine, was stopped."""

BACK_S = 5.0
"""Seconds of silence after which a rank whose frames come again has the whole limit to make progress. Too small: a slow
disk resets the limit of a rank that hangs; too large: one that was stopped is accused on its return."""


@dataclasses.dataclass(slots=True)
class _IncarnationProgress:
    """Step, call and activity of one incarnation, and when each changed last."""

    incarnation: Incarnation
    order: int
    first_at: float
    received_at: float
    moved_at: float
    is_live: bool = False
    step: int = 0
    call_id: int = 0
    num_calls: int = 0
    micro_step: int = -1
    activity: str = "init"
    module: str = ""
    phase: str = ""
    is_waiting: int = -1
    waiting_at: float | None = None
    num_waits: int = 0
    site: str = ""
    has_stepped: bool = False
    has_raised: bool = False
    borders: tuple[int, frozenset[tuple[str, str]]] = (-1, frozenset())
    """Layout id, and (phase, name) of the sites behind which the rank waits for a neighbour in the pipeline."""


class LivenessTracker:
    """What is known of each incarnation beside its steps. No clock: monotonic seconds are handed in; wall clocks are not
    looked at.

    `now` counts the seconds that were watched: it stands still while nobody looks.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._mono: float | None = None
        self._is_watching = False
        self._progress: dict[bytes, _IncarnationProgress] = {}
        self._behind_since: dict[bytes, float] = {}
        """Incarnation of which more is on disk than was read -> since when."""

    def look(
        self,
        mono: float,
        behind: Collection[bytes],
        *,
        is_caught_up: bool,
        unheard: Mapping[str, Unheard] = NOBODY,
        followed: Collection[bytes] = (),
    ) -> None:
        """Let time pass; call it at each look at the spool, after `receive`. behind: incarnations with more on disk than was
        read. unheard: folders, as of `Arrivals`. followed: as of `RunFollower`.

        is_caught_up: all that was there has been read: what comes from now on is live.
        """
        if self._mono is not None:
            self.now += min(max(mono - self._mono, 0.0), MAX_LOOK_S)
        self._mono = mono
        # What is on its way for a moment says nothing of a rank: now and then there is something of each that beats.
        self._behind_since = {one: self._behind_since.get(one, self.now) for one in (*behind, *followed)}
        for incarnation, since in self._behind_since.items():
            one = self._progress.get(incarnation)
            if one is None or self.now - since < BACK_S:
                continue
            # Of a rank that has begun elsewhere the former machine may well be gone.
            if incarnation in followed or one.incarnation.folder not in unheard:
                one.received_at = one.moved_at = self.now
        self._is_watching = self._is_watching or is_caught_up

    def restore(self, incarnations: Iterable[Incarnation]) -> None:
        """Add incarnations from before a restart, as if a frame of each came now: the time in between was not watched."""
        for incarnation in incarnations:
            self._progress_of(incarnation)

    def receive(self, records: Iterable[SpoolRecord], unheard: Mapping[str, Unheard] = NOBODY) -> None:
        """Update the incarnations by the frames that were read. unheard: as of `look`."""
        for record in records:
            one = self._progress_of(record.incarnation)
            if self.now - one.received_at > BACK_S:
                # It was stopped, and goes on from where it stood: that is no standing still.
                one.moved_at = self.now
            silent = unheard.get(record.incarnation.folder) if unheard else None
            one.received_at = self.now if silent is None else max(one.received_at, self.now - silent.seconds)
            one.is_live = one.is_live or self._is_watching
            message = record.message
            if isinstance(message, Heartbeat):
                self._take_heartbeat(one, message)
            elif isinstance(message, EndStep):
                one.has_stepped, one.num_calls = True, message.num_calls
                if message.step >= one.step or message.step < one.step - 1:
                    self._move(one, message.step + 1, 0, one.activity)
            elif isinstance(message, Bye) or (isinstance(message, Health) and message.code == IMPOSSIBLE):
                # Where it stands was in a frame that was left out: that is no standing still.
                one.moved_at = self.now

    def facts(self, attempt: int, attempt_of: Callable[[bytes], int | None]) -> tuple[RankFacts, ...]:
        """Return the facts of the ranks of the newest attempt, ranks rising.

        attempt_of: the attempt that an incarnation's steps belong to; None: it has no step yet. Left out: ranks that a
        newer incarnation
        replaced, those of older attempts, and while new incarnations start, those that fell silent before them.
        """
        newest: dict[int, _IncarnationProgress] = {}
        for one in sorted(self._progress.values(), key=lambda one: one.order):
            number = attempt_of(one.incarnation.id)
            if number is None or number >= attempt:
                newest[one.incarnation.rank] = one
        began = min(
            (
                one.first_at
                for one in newest.values()
                if attempt_of(one.incarnation.id) is None and one.incarnation.bye is None
            ),
            default=None,
        )
        last = max(newest.values(), key=lambda one: one.order, default=None)
        described = last.incarnation.descriptor if last is not None else None
        world_size = described.place.world_size if described is not None else 2**31
        # A rank has its place among those of an attempt whatever the last of them to come says of how many they are.
        is_open = last is not None and attempt_of(last.incarnation.id) is None
        return tuple(
            _facts(one)
            for rank, one in sorted(newest.items())
            if (rank < world_size or not (is_open or attempt_of(one.incarnation.id) is None))
            and (began is None or one.received_at >= began)
        )

    def groups(self, group_of: Callable[[Incarnation], int]) -> dict[int, tuple[RankFacts, ...]]:
        """Return the facts of the newest incarnation of each rank, by attempt, attempts and ranks rising.

        group_of: the attempt that an incarnation's end counts for.
        """
        found: dict[int, dict[int, _IncarnationProgress]] = {}
        for one in sorted(self._progress.values(), key=lambda one: one.order):
            found.setdefault(group_of(one.incarnation), {})[one.incarnation.rank] = one
        return {number: tuple(_facts(one) for _, one in sorted(ranks.items())) for number, ranks in sorted(found.items())}

    def silence_s(self, incarnation: bytes) -> float:
        """Return the seconds since the last frame of an incarnation came; 0.0 of one that is not known."""
        one = self._progress.get(incarnation)
        return 0.0 if one is None else self.now - one.received_at

    def received_at(self) -> float | None:
        """Return the oldest of the ranks' times of the last frame, on the clock of `now`; None: no rank runs."""
        return min(
            (one.received_at for one in self._progress.values() if one.is_live and one.incarnation.bye is None), default=None
        )

    def _progress_of(self, incarnation: Incarnation) -> _IncarnationProgress:
        one = self._progress.get(incarnation.id)
        if one is None:
            one = _IncarnationProgress(incarnation, len(self._progress), self.now, self.now, self.now)
            one.step, one.has_stepped = incarnation.last_step + 1, incarnation.last_step >= 0
            if one.has_stepped:
                one.activity = "train"
            self._progress[incarnation.id] = one
        return one

    def _take_heartbeat(self, one: _IncarnationProgress, beat: Heartbeat) -> None:
        self._move(one, beat.step, beat.call_id, beat.activity)
        one.module, one.phase, one.micro_step, one.site = beat.module, beat.phase, beat.micro_step, beat.site
        if beat.num_waits != one.num_waits:
            # Ranks that hand much to one another outside of their modules wait nearly all of the time, and move.
            one.num_waits, one.moved_at = beat.num_waits, self.now
        if one.has_raised and beat.raised is None:
            one.moved_at = self.now  # It stood at a prompt, and trains again.
        one.has_raised = beat.raised is not None
        one.is_waiting = beat.is_waiting
        if beat.is_waiting < 0 and (beat.phase, beat.module) in self._borders(one):
            one.is_waiting = 2
        # That it stands at a border tells only what was seen of it last.
        if one.is_waiting != 1:
            one.waiting_at = None
        elif one.waiting_at is None or one.moved_at > one.waiting_at:
            one.waiting_at = self.now

    def _move(self, one: _IncarnationProgress, step: int, call_id: int, activity: str) -> None:
        if (step, call_id, activity) != (one.step, one.call_id, one.activity):
            one.step, one.call_id, one.activity, one.moved_at = step, call_id, activity, self.now

    @staticmethod
    def _borders(one: _IncarnationProgress) -> frozenset[tuple[str, str]]:
        incarnation = one.incarnation
        if incarnation.descriptor is None or incarnation.descriptor.place.pp_size == 1:
            return frozenset()
        if one.borders[0] != incarnation.layout_id:
            last = {chunk.vpp_stage: len(chunk.segments) for chunk in incarnation.descriptor.chunks}
            one.borders = (
                incarnation.layout_id,
                frozenset(
                    ("forward" if tensor.border_index else "backward", tensor.name)
                    for tensor in incarnation.descriptor.tensors
                    if tensor.border and tensor.border_index in (0, last.get(tensor.chunk))
                ),
            )
        return one.borders[1]


def _facts(one: _IncarnationProgress) -> RankFacts:
    incarnation = one.incarnation
    place = incarnation.descriptor.place if incarnation.descriptor is not None else None
    left = (incarnation.bye.reason or "exit") if incarnation.bye is not None else ""
    return RankFacts(
        rank=incarnation.rank,
        incarnation=incarnation.id,
        pp_stage=place.pp_rank if place is not None else 0,
        received_at=one.received_at,
        moved_at=one.moved_at,
        time=incarnation.last_wall_ns / 1e9,
        is_live=one.is_live,
        step=one.step,
        call_id=one.call_id,
        num_calls=one.num_calls,
        micro_step=one.micro_step,
        activity=one.activity,
        module=one.module,
        phase=one.phase,
        is_waiting=one.is_waiting,
        has_stepped=one.has_stepped,
        left=left,
        waiting_at=one.waiting_at,
        world_size=place.world_size if place is not None else 0,
        site=one.site,
    )
