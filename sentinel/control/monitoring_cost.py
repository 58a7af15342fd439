"""MonitoringCost: how much of an hour a run lost because more of it was measured, by the durations of its own steps."""

from __future__ import annotations

from collections import deque
from statistics import median

HOUR_S = 3600.0
MINUTE_S = 60.0
NUM_STEPS = 33
"""Steps without, whose median is what a step usually takes."""
OTHERWISE_SLOW = 5.0
"""A step that took this many times the usual did something else: a checkpoint, an evaluation."""


class MonitoringCost:
    """Compares steps with and without. The clock is handed in."""

    def __init__(self) -> None:
        self.state: dict[int, float] = {}
        """Minute since the epoch -> seconds lost in it."""
        self._usual: deque[float] = deque(maxlen=NUM_STEPS)
        self._newest_step: int | None = None

    def note(self, newest_step: int, step_time_s: float | None, now: float, *, is_on: bool) -> None:
        """Take in how long the newest steps took. now: seconds since the epoch; is_on: more was measured in them."""
        num_steps = newest_step - (newest_step if self._newest_step is None else self._newest_step)
        self._newest_step = newest_step
        if num_steps <= 0 or step_time_s is None or not step_time_s > 0:
            return
        if not is_on:
            self._usual.append(step_time_s)
        elif self._usual:
            usual = median(self._usual)
            if usual < step_time_s < OTHERWISE_SLOW * usual:
                minute = int(now // MINUTE_S)
                self.state[minute] = self.state.get(minute, 0.0) + num_steps * (step_time_s - usual)
        self._forget(now)

    def lost_s(self, now: float) -> float:
        """Return the seconds lost within the last hour."""
        self._forget(now)
        return sum(self.state.values())

    def _forget(self, now: float) -> None:
        minute = int(now // MINUTE_S)
        # Also what a clock that was set back left in the future.
        for old in [one for one in self.state if not minute - 60 < one <= minute]:
            del self.state[old]
