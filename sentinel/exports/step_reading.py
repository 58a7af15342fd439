"""StepReading: the steps that an export selects, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sentinel.errors import ConfigError
from sentinel.exports.request import RecordedSteps
from sentinel.exports.series import Picker, newest_attempts

if TYPE_CHECKING:
    from sentinel.exports.series import SeriesQuery
    from sentinel.step_view import StepView

KEPT = "no known placement says how their parts make a group (--per-rank has them)"
SUMMANDS = "each rank holds a summand of them, whose statistics say nothing of the sum (--per-rank has them)"
"""Why series are not merged."""


class StepReading:
    """The steps of a query, each once: of a resumed run what the newest attempt measured.

    Where no rank was started twice they are read in one pass; else a first pass finds which attempt each step is taken from.
    """

    def __init__(
        self,
        recorded: RecordedSteps,
        query: SeriesQuery,
        attempt: int | None,
        times: tuple[float, float] | None,
        to_stderr: Callable[[str], None],
    ) -> None:
        """to_stderr: called with a line about each thing that is left out."""
        self._recorded = recorded
        self.to_stderr = to_stderr
        self._query = query
        self._attempt = attempt
        self._times = times
        self.picker = Picker(query)
        self._attempts: set[int] = set()
        self._num_gone = 0
        self.num_passes = 0
        self.began = 0.0
        """Time of the first step that was yielded."""

    def views(self) -> Iterator[tuple[StepView, dict[str, float] | None]]:
        """Yield (step, logged values of the step before; None: that was not yielded)."""
        chosen = None
        if self._recorded.has_resumed and self._attempt is None:
            met = [(view.attempt, view.step) for view in self._wanted()]
            chosen = newest_attempts(met)
        done: set[int] = set()
        logged: tuple[int, dict[str, float]] = (-2, {})
        for view in self._wanted():
            if chosen is not None and chosen.get(view.step) != view.attempt:
                continue
            if view.step in done:
                continue
            if not done:
                self.began = view.time
            done.add(view.step)
            self.picker.meet(view.layout, view.scalars)
            yield view, logged[1] if logged[0] == view.step - 1 else {} if view.step - 1 in done else None
            logged = view.step, {name: one.mean for name, one in view.scalars.items()}
        if not done:
            self._report_empty()
        else:
            self.picker.check()
        if self._num_gone:
            self.to_stderr(f"{self._num_gone} steps are no longer in the spool and are left out")
        if self._recorded.damage:
            self.to_stderr(f"the spool is damaged: {self._recorded.damage}; what is whole is here")
        for (name, kind), (num, has_others) in sorted(self.picker.excluded.items()):
            rest = "the others are merged" if has_others else "nothing of it can be merged"
            self.to_stderr(f'"{name}" of {kind}: {num} series have no known placement and stay with their ranks; {rest}')

    def unmerged(self, is_ranked: bool) -> dict[str, int]:
        """Return why -> number of series of the steps yielded so far that a merged table cannot have."""
        if is_ranked:
            return {}
        kept = sum(num for num, _ in self.picker.excluded.values())
        found = {KEPT: kept, SUMMANDS: len(self.picker.partial)}
        return {why: num for why, num in found.items() if num}

    def _wanted(self) -> Iterator[StepView]:
        self.num_passes += 1
        self._num_gone = 0
        for view, _ in self._recorded.views():
            if not self._query.first_step <= view.step <= self._query.last_step:
                continue
            if not view.parts:
                self._num_gone += 1
                continue
            if self._times is not None and not self._times[0] <= view.time <= self._times[1]:
                continue
            self._attempts.add(view.attempt)
            if self._attempt is None or view.attempt == self._attempt:
                yield view

    def _report_empty(self) -> None:
        if self._attempts and self._attempt is not None and self._attempt not in self._attempts:
            known = ", ".join(map(str, sorted(self._attempts)))
            raise ConfigError(f"--attempt: expected one of {known}, got {self._attempt}")
        self.to_stderr("no steps there")

    @property
    def share(self) -> float:
        """Return how much of the spool was read, in [0, 1]."""
        num_passes = 2 if self._recorded.has_resumed and self._attempt is None else 1
        done = self._recorded.num_bytes_read / max(self._recorded.num_bytes, 1)
        return min((max(self.num_passes - 1, 0) + min(done, 1.0)) / num_passes, 1.0)
