"""Measures the weights: when a step begins, and within it where a value that is not finite was seen."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.parameters import REFRESH_STEPS, WatchedParameters
from sentinel.collect.rows.running_step import RunningStep
from sentinel.collect.schedule.pacing import Pacing
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.step_count import StepCount
from sentinel.record import Kind


class ParameterWatch:
    """Decides at which moments of a step all weights are read, and when the model is looked through for new ones."""

    def __init__(
        self,
        parameters: WatchedParameters,
        chunks: Sequence[Chunk],
        plan: Plan,
        pacing: Pacing,
        running: RunningStep,
        count: StepCount,
    ) -> None:
        """chunks: filled while the monitor is installed."""
        self._parameters = parameters
        self._chunks = chunks
        self._plan = plan
        self._pacing = pacing
        self._running = running
        self._count = count

    def refresh(self) -> None:
        """Add parameters that were registered in the chunks since the last look."""
        self._parameters.refresh(self._chunks)

    def begin_step(self, *, has_plan_changed: bool) -> None:
        """Forget what was read in the last step, and measure the weights where they are due."""
        parameters = self._parameters
        parameters.begin_step()
        if not self._plan.is_due:
            return
        if has_plan_changed or self._count.num_begun % REFRESH_STEPS == 0 or not parameters.all:
            self.refresh()
        if self._plan.takes(Kind.PARAM):
            self._measure()

    def end_step(self) -> None:
        """Note how many gradients were read in the step that ends."""
        self._running.due["wgrad"] = len(self._parameters.read)

    def saw_nonfinite(self) -> None:
        """Called when the running step holds a NaN or an infinity: measure its weights and gradients, and all later steps
        whole."""
        self._pacing.saw_nonfinite(self._count.current)
        lacks_parameters = Kind.PARAM in self._plan.left_out
        if self._running.is_measuring and self._plan.take_in((Kind.PARAM, Kind.WGRAD)) and lacks_parameters:
            self._measure()

    def _measure(self) -> None:
        recording = self._running.recording
        former = recording.costs.turn_to(Kind.PARAM)
        entries, tensors = self._parameters.measurable(self._parameters.all)
        recording.observe_all(entries, tensors, [0] * len(entries))
        self._running.count({"param": len(entries)})
        recording.costs.turn_to(former)
