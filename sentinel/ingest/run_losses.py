"""RunLosses: sums over a run of the rows and steps that ranks measured and that were lost before they were judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from sentinel.decision import Decision
from sentinel.messages import Health


class RunLosses(msgspec.Struct):
    """A sum over the closed steps of a run; `is_complete` while it is empty."""

    num_rows: int = 0
    num_steps_gone: int = 0
    """Number of steps of which no frame is left, not even the end_step; counted on each rank."""
    first_step: int = -1
    last_step: int = -1

    @property
    def is_complete(self) -> bool:
        """Whether nothing was lost."""
        return not self.num_rows and not self.num_steps_gone

    def take(self, decision: Decision, health: Iterable[Health]) -> None:
        """Add the losses of a closed step."""
        for one in decision.ranks:
            if one.num_lost:
                self._add(one.num_lost, 0, decision.step, decision.step)
        for reported in health:
            if reported.code == "steps_dropped":
                first = reported.first_step if reported.first_step >= 0 else decision.step
                self._add(reported.num_rows, reported.count, first, max(reported.step, first))

    def _add(self, num_rows: int, num_steps_gone: int, first_step: int, last_step: int) -> None:
        self.num_rows += num_rows
        self.num_steps_gone += num_steps_gone
        self.first_step = first_step if self.first_step < 0 else min(self.first_step, first_step)
        self.last_step = max(self.last_step, last_step)

    @property
    def words(self) -> str:
        """What was lost; empty where nothing was: `40 rows of steps 3 to 9 were lost before they were judged`."""
        if self.is_complete:
            return ""
        first, last = self.first_step, self.last_step
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        gone = f", {self.num_steps_gone:,} steps whole" if self.num_steps_gone else ""
        return f"{self.num_rows:,} rows of {steps}{gone} were lost before they were judged"


def silent(reported: Health, received_until: int, received: Mapping[int, int | None]) -> Health | None:
    """Return a `steps_dropped` record without the steps that were read before they were dropped; None: all were.

    received_until: the newest step that was judged with this rank. received: step above it -> rows of it that came; None:
    it came whole.
    """
    first_step, num_steps, num_rows = -1, 0, 0
    for first, last, steps, rows in reported.runs or (
        (reported.first_step, reported.step, reported.count, reported.num_rows),
    ):
        if last <= received_until:
            continue
        begin, left = max(first, received_until + 1), steps
        if begin > first:
            left = max(steps - (begin - first), 1)
        each = rows / max(steps, 1)
        left_rows = rows if left == steps else round(each * left)
        for step, came in received.items():
            if begin <= step <= last:
                left -= came is None
                left_rows -= round(each) if came is None else came
        if left > 0:
            first_step = begin if first_step < 0 else min(first_step, begin)
            num_steps += left
            num_rows += max(left_rows, 0)
    if not num_steps:
        return None
    return msgspec.structs.replace(reported, first_step=first_step, count=num_steps, num_rows=num_rows, runs=())
