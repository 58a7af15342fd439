"""Losses: which steps lost rows, and how many, until it can be told."""

from __future__ import annotations

import dataclasses

from sentinel.messages import Health
from sentinel.wire.frame import NO_STEP


@dataclasses.dataclass(slots=True)
class Losses:
    """A sum over steps; false while it is empty."""

    first_step: int = NO_STEP
    last_step: int = NO_STEP
    num_steps: int = 0
    num_rows: int = 0

    def __bool__(self) -> bool:
        return self.num_steps > 0

    def add(self, step: int, num_rows: int, num_steps: int = 1) -> None:
        """Add a step, or so many steps up to this one."""
        self.first_step = step if not self.num_steps else min(self.first_step, step)
        self.last_step = max(self.last_step, step)
        self.num_steps += num_steps
        self.num_rows += num_rows

    def merge(self, other: Losses | None) -> None:
        """Add what another sum holds."""
        if other:
            self.add(other.first_step, other.num_rows, other.num_steps)
            self.last_step = max(self.last_step, other.last_step)

    def as_health(self, rank: int, code: str, lost_to: str) -> Health:
        """Return the record that tells it. code: `rows_dropped` (the ends of the steps count them), or `steps_dropped`.

        lost_to: why, as in `EndStep.lost_to`.
        """
        steps = f"step {self.first_step}" if self.num_steps == 1 else f"steps {self.first_step} to {self.last_step}"
        what = "of them nothing is left" if code == "steps_dropped" else "each step's end tells its own"
        return Health(
            code=code,
            message=f"rank {rank}: {self.num_rows} rows of {self.num_steps} steps ({steps}) were dropped; {what}",
            count=self.num_steps,
            step=self.last_step,
            first_step=self.first_step,
            num_rows=self.num_rows,
            lost_to=lost_to,
        )
