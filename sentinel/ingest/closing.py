"""Decides which open step closes next, why, and with which frames; returns the decision, and neither closes nor writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from sentinel.decision import Decision, DescribedRank, RankPart
from sentinel.ingest.attempts import Attempt, Attempts
from sentinel.ingest.node_share import machine_of
from sentinel.ingest.received import Received
from sentinel.ingest.step_parts import RankPartOfStep

LATE_AFTER_STEPS = 2
LATE_AFTER_S = 30.0
MAX_OPEN_STEPS = 64
"""Steps of one attempt that may be open at once; a bound on memory, past which the oldest closes with what there is."""


class DueStep(msgspec.Struct, frozen=True):
    """An open step that closes now."""

    attempt: Attempt
    step: int
    why: str
    """As `Decision.why`."""


class Closing:
    """The limits up to which an open step waits for ranks whose part is missing. Has no clock: callers pass `now`."""

    def __init__(
        self,
        attempts: Attempts,
        received: Received,
        *,
        late_after_steps: int = LATE_AFTER_STEPS,
        late_after_s: float = LATE_AFTER_S,
        max_open_steps: int = MAX_OPEN_STEPS,
    ) -> None:
        """late_after_steps, late_after_s: 0 switches the limit off."""
        self._attempts, self._received = attempts, received
        self._late_after_steps = late_after_steps
        self._late_after_s = late_after_s
        self._max_open_steps = max_open_steps

    def use(self, late_after_steps: int, late_after_s: float) -> None:
        """Wait up to other limits from now on."""
        self._late_after_steps, self._late_after_s = late_after_steps, late_after_s

    def due(self, now: float, behind: Collection[bytes], settled_step: int | None) -> DueStep | None:
        """Return the step that closes next; None: all wait. behind, settled_step: as of `StepAssembler.close`."""
        attempts = [attempt for _, attempt in sorted(self._attempts.by_number.items()) if attempt.open]
        found: DueStep | None = None
        for attempt in attempts:
            step = attempt.oldest_open
            why = self._why_closed(attempt, step, now, behind, settled_step)
            if why:
                found = DueStep(attempt, step, why)
                break
        if found is None:
            return None
        # Steps of an older attempt come first, whoever they wait for: its ranks have been replaced.
        oldest = attempts[0]
        if oldest is found.attempt:
            return found
        if any(session.incarnation.id in behind for session in oldest.sessions.values()):
            return None
        if any(self._attempts.attempt_of(one) is None for one in behind):
            # None of its steps was read yet, and the first may be one of these.
            return None
        return DueStep(oldest, oldest.oldest_open, "superseded")

    def _why_closed(
        self, attempt: Attempt, step: int, now: float, behind: Collection[bytes], settled_step: int | None
    ) -> str:
        """Return why a step is closed now, as of `Decision.why`; empty: it still waits."""
        known, returning = self._received.incarnations, self._attempts.returning()
        if attempt.surely_waits(step, (known[one].rank for one in behind if one in known), returning):
            # As at each look while a step of thousands of ranks comes.
            return ""
        waiting = set(attempt.waited_for(step, returning))
        if not waiting:
            return "complete"
        # Of one that is behind and of which nothing was handed out nobody knows here whose rank it is.
        if any(one not in known or known[one].rank in waiting for one in behind):
            return ""
        newest_step = attempt.newest_step if settled_step is None else min(attempt.newest_step, settled_step)
        if self._late_after_steps and newest_step - step >= self._late_after_steps:
            return "late_steps"
        if self._late_after_s and now - attempt.open[step].first_received >= self._late_after_s:
            return "late_time"
        return "crowded" if len(attempt.open) > self._max_open_steps else ""


def decide(due: DueStep, attempts: Attempts, *, seq: int, run: str, pack_hash: str, blindness: dict[str, int]) -> Decision:
    """Return the decision that closes a due step with the frames received of each rank."""
    attempt, chosen = due.attempt, attempts.chosen(due.attempt, due.step)
    ranks = tuple(part.decided(rank) for rank, part in chosen.items())
    # As of the step: of what was read further a process may say that it runs elsewhere.
    described = (one.incarnation.layouts.get(one.layout_id, one.incarnation.descriptor) for one in chosen.values())
    machines = {machine_of(one) for one in described if one is not None}
    return Decision(
        seq=seq, run=run, attempt=attempt.number, step=due.step, ranks=ranks, why=due.why,
        missing=_missing(attempts, attempt, chosen), described=_described(attempts, attempt, chosen),
        time=max([part.last_wall_ns for part in chosen.values()], default=0) / 1e9, pack_hash=pack_hash,
        blindness=blindness,
        is_catching_up=_is_catching_up(attempts, attempt, due.step, ranks),
        is_by_machine=True if len(machines) > 1 else msgspec.UNSET,
    )  # fmt: skip


def _is_catching_up(attempts: Attempts, attempt: Attempt, step: int, ranks: Sequence[RankPart]) -> bool:
    losing = [one for one in ranks if one.num_lost]
    # What was cut at a cap was written while nobody read, in however small pieces it is read now.
    is_cut = any("cap" in one.lost_to.split(",") for one in losing)
    return is_cut or (bool(losing) and attempt.is_received_after(step, attempts.returning()))


def _missing(attempts: Attempts, attempt: Attempt, chosen: Mapping[int, RankPartOfStep]) -> dict[int, str]:
    """Return, for each rank whose part of a step is missing or incomplete, why; ranks rising."""
    missing = {rank: "unfinished" for rank, part in chosen.items() if not part.is_whole}
    returning = attempts.returning()
    for rank in attempt.expected().difference(chosen):
        if rank in attempt.sessions:
            missing[rank] = "ended" if attempt.sessions[rank].incarnation.has_left else "late"
        else:
            missing[rank] = "late" if rank in returning else "never started"
    return dict(sorted(missing.items()))


def _described(attempts: Attempts, attempt: Attempt, chosen: Mapping[int, RankPartOfStep]) -> tuple[DescribedRank, ...]:
    """Return the ranks that are not in a step and whose descriptor no earlier decision has, ranks rising."""
    if not attempts.newcomers and len(chosen) == len(attempt.sessions):
        return ()
    # One of a later attempt describes another world: of this one it would be said that its ranks disagree.
    absent = {
        incarnation.rank: incarnation
        for incarnation in attempts.newcomers.values()
        if incarnation.rank not in chosen and attempts.is_of(incarnation, attempt.number)
    }
    absent |= {rank: session.incarnation for rank, session in attempt.sessions.items() if rank not in chosen}
    return tuple(
        DescribedRank(rank=rank, incarnation=incarnation.id, layout_id=incarnation.layout_id)
        for rank, incarnation in sorted(absent.items())
        if incarnation.descriptor is not None and attempt.state.table.get(rank) != (incarnation.id, incarnation.layout_id)
    )
