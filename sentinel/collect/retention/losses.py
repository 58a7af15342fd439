"""Losses: which steps lost rows, and how many, until a health record of them can be written."""

from __future__ import annotations

from sentinel.messages import Health
from sentinel.wire.frame import NO_STEP

MAX_RUNS = 4096
"""Most stretches of lost steps in the list; a bound on memory, past which neighbours become one with their rows added."""

Run = tuple[int, int, int, int]
"""(first step, last step, steps, rows of all of them)"""


class Losses:
    """A sum over steps, in the order in which they were lost; false while it is empty."""

    def __init__(self, *runs: Run) -> None:
        self._runs: list[Run] = list(runs)

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def first_step(self) -> int:
        """The lowest of the steps; NO_STEP: there is none."""
        return min((first for first, _, _, _ in self._runs), default=NO_STEP)

    @property
    def last_step(self) -> int:
        """The highest of the steps; NO_STEP: there is none."""
        return max((last for _, last, _, _ in self._runs), default=NO_STEP)

    @property
    def num_steps(self) -> int:
        """How many steps."""
        return sum(steps for _, _, steps, _ in self._runs)

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return sum(rows for _, _, _, rows in self._runs)

    def add(self, step: int, num_rows: int) -> None:
        """Add a step."""
        self._append((step, step, 1, num_rows))

    def merge(self, other: Losses) -> None:
        """Add what another sum holds."""
        for run in other._runs:
            self._append(run)

    def _append(self, run: Run) -> None:
        first, last, steps, rows = self._runs[-1] if self._runs else (0, 0, 0, 0)
        # Stretches of steps that each lost as many are one; a reader that knows some of them knows what the others lost.
        if steps and run[0] == last + 1 and rows * run[2] == run[3] * steps:
            self._runs[-1] = (first, run[1], steps + run[2], rows + run[3])
            return
        self._runs.append(run)
        if len(self._runs) > MAX_RUNS:
            self._runs = [_joined(self._runs[at : at + 2]) for at in range(0, len(self._runs), 2)]

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
            runs=tuple(self._runs),
        )


def _joined(runs: list[Run]) -> Run:
    firsts, lasts, steps, rows = zip(*runs, strict=True)
    return min(firsts), max(lasts), sum(steps), sum(rows)
