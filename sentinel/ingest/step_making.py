"""StepMaker: makes the view of the step that a decision describes, from the frames that it names and from no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sentinel.decision import Decision, RankPart
from sentinel.ingest.attempts import Attempt, Attempts, AttemptState
from sentinel.ingest.away_rows import AwayParts, AwayRankStep, RowSource
from sentinel.ingest.blindness import Blindness
from sentinel.ingest.digested_step import DigestedStep
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import LayoutCache, ModelLayout
from sentinel.ingest.node_digest import NodeDigest
from sentinel.ingest.node_share import by_machine
from sentinel.ingest.received import Received
from sentinel.ingest.step_digests import StepDigests
from sentinel.ingest.step_parts import OpenStep, RankPartOfStep
from sentinel.messages import Descriptor
from sentinel.record import ROW_DTYPE
from sentinel.step_view import RankStep

_NO_ROWS = np.empty(0, ROW_DTYPE)


class StepMaker:
    """Closes the steps of `Attempts` that decisions name, each with the frames of its decision."""

    def __init__(
        self, attempts: Attempts, received: Received, blindness: Blindness, rows_from: RowSource | None = None
    ) -> None:
        """rows_from: where rows are that spools here have not got; None: none of these are read."""
        self.num_incomplete = 0
        """Decisions whose frames were not all there: replayed with less than before."""
        self._attempts, self._received, self._blindness = attempts, received, blindness
        self._rows_from = rows_from
        self._layouts = LayoutCache()

    def make(self, decision: Decision) -> ClosedStep:
        """Close the step of a decision, and return it."""
        attempt = self._attempts.by_number.get(decision.attempt)
        if attempt is None:
            attempt = self._attempts.by_number[decision.attempt] = Attempt(AttemptState(decision.attempt))
        opened = attempt.open.pop(decision.step, None)
        attempt.state.closed_step = max(attempt.state.closed_step, decision.step)
        attempt.newest_step = max(attempt.newest_step, decision.step)
        table = attempt.state.table
        for known in decision.described:
            table[known.rank] = (known.incarnation, known.layout_id)
        parts = []
        away = AwayParts(self._rows_from) if self._rows_from is not None else None
        is_incomplete = False
        for one in decision.ranks:
            attempt.state.reported[one.rank] = max(decision.step, attempt.state.reported.get(one.rank, -1))
            table[one.rank] = (one.incarnation, one.layout_id)
            part = opened.parts.get((one.incarnation, one.generation)) if opened is not None else None
            made = self._rank_step(one, part, away)
            if made is None:
                is_incomplete = True
            else:
                is_incomplete |= made.num_rows < one.num_rows
                parts.append(made)
        # Rows are also short in the first run when their descriptor was lost; then the replay is as complete as that.
        self.num_incomplete += is_incomplete
        if opened is not None:
            self._count_left_over(decision, opened)
        layout = self._layout(table)
        digests = self._digests(decision, parts, layout)
        if digests is None:
            return ClosedStep(
                run=decision.run, attempt=decision.attempt, step=decision.step, layout=layout, parts=parts, decision=decision
            )
        return DigestedStep(
            run=decision.run, attempt=decision.attempt, step=decision.step, layout=layout, parts=parts, decision=decision,
            digests=digests,
        )  # fmt: skip

    def _digests(self, decision: Decision, parts: Sequence[RankStep], layout: ModelLayout) -> StepDigests | None:
        """Return what the digests of all machines say; None: not all are there, or no rows are away."""
        if self._rows_from is None or not any(isinstance(part, AwayRankStep) for part in parts):
            return None
        of = {one.rank: (one.incarnation, one.last_seq, one.num_rows) for one in decision.ranks}
        known = self._received.incarnations
        there, machines = list[NodeDigest](), by_machine(parts)
        if len(machines) > 1 and decision.is_by_machine is not True:
            return None
        for own in machines:
            folders = [known[part.incarnation].folder for part in own]
            found = self._rows_from.digest(decision.step, tuple(of[part.rank] for part in own), folders)
            # Of the same frames it may say that they are other ranks'.
            if found is None or [one.rank for one in found.ranks] != [part.rank for part in own]:
                return None
            there.append(found)
        return StepDigests.of(layout, there, [[part.rank for part in own] for own in machines])

    def _rank_step(self, one: RankPart, part: RankPartOfStep | None, away: AwayParts | None) -> RankStep | None:
        incarnation = self._received.incarnations.get(one.incarnation)
        descriptor = incarnation.layouts.get(one.layout_id, incarnation.descriptor) if incarnation is not None else None
        if incarnation is None or part is None or descriptor is None:
            return None
        last_seq, is_ended = one.last_seq, one.is_ended and part.end is not None
        end_step = part.end_step if is_ended else None
        time, health = part.wall_ns(last_seq) / 1e9, self._received.take_health(incarnation, last_seq)
        ended_mono_s = part.end.frame.header.mono_ns / 1e9 if part.end is not None and is_ended else 0.0
        if away is not None and away.add(part, last_seq):
            return AwayRankStep(
                rank=one.rank, descriptor=descriptor, rows=_NO_ROWS, end_step=end_step, time=time, health=health,
                incarnation=one.incarnation, ended_mono_s=ended_mono_s, part=part, last_seq=last_seq, away=away,
            )  # fmt: skip
        return RankStep(
            rank=one.rank, descriptor=descriptor, rows=part.rows_until(last_seq, descriptor), end_step=end_step, time=time,
            health=health, incarnation=one.incarnation, ended_mono_s=ended_mono_s,
        )  # fmt: skip

    def _count_left_over(self, decision: Decision, opened: OpenStep) -> None:
        """Count what lies in a closed step without being part of it: replaced processes, and on replay what came late."""
        taken = {(one.incarnation, one.generation): one for one in decision.ranks}
        for key, part in opened.parts.items():
            one = taken.get(key)
            if one is not None and part.last_seq <= one.last_seq and (one.is_ended or part.end is None):
                continue
            num_rows = sum(count for seq, count, _ in part.rows if one is None or seq > one.last_seq)
            num_frames = part.end is not None and (one is None or not one.is_ended)
            if num_rows or num_frames:
                self._blindness.add_late(part.incarnation.rank, num_rows, int(num_frames))

    def _layout(self, table: Mapping[int, tuple[bytes, int]]) -> ModelLayout:
        key = tuple([(rank, incarnation, layout_id) for rank, (incarnation, layout_id) in sorted(table.items())])
        return self._layouts.of(key, lambda: self._descriptors(key))

    def _descriptors(self, key: Iterable[tuple[int, bytes, int]]) -> dict[int, Descriptor]:
        incarnations = (
            (rank, self._received.incarnations.get(incarnation), layout_id) for rank, incarnation, layout_id in key
        )
        found = (
            (rank, incarnation.layouts.get(at, incarnation.descriptor))
            for rank, incarnation, at in incarnations
            if incarnation is not None
        )
        return {rank: descriptor for rank, descriptor in found if descriptor is not None}
