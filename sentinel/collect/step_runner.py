"""Begins and ends each step: calls the parts of the monitor in the order in which they work on a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.parameter_watch import ParameterWatch
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.parallel.locator import Locator
from sentinel.collect.probes.context import Events
from sentinel.collect.rows.running_step import RunningStep
from sentinel.collect.schedule.applying import Planning
from sentinel.collect.schedule.costs import OWN
from sentinel.collect.step import Boundary
from sentinel.collect.step_count import StepCount
from sentinel.collect.understanding import Understanding
from sentinel.messages import Heartbeat

log = logging.getLogger("sentinel")


class StepRunner:
    """Runs the steps of one process. When one ends, `step.Boundary` decides; what is due in it, the plan."""

    def __init__(
        self,
        count: StepCount,
        running: RunningStep,
        recorder: Recorder,
        boundary: Boundary,
        locator: Locator,
        planning: Planning,
        weights: ParameterWatch,
        events: Events,
        understanding: Understanding,
        chunks: Sequence[Chunk],
    ) -> None:
        """chunks: filled while the monitor is installed."""
        self.count = count
        self.running = running
        self._recorder = recorder
        self._boundary = boundary
        self._locator = locator
        self._planning = planning
        self._weights = weights
        self._events = events
        self._understanding = understanding
        self._chunks = chunks

    @property
    def is_between(self) -> bool:
        """Whether no step runs, or the one that runs is over."""
        return not self.running.is_begun or self._boundary.is_over

    @property
    def next_step(self) -> int:
        """Number of the step that the next forward belongs to, as far as is known now."""
        return self.count.current + (1 if self._boundary.is_over else 0)

    @property
    def leaves_out(self) -> bool:
        """Whether the running step leaves kinds out because of their cost."""
        return bool(self._planning.plan.left_out)

    @property
    def num_forwards(self) -> int:
        """Training forwards of the running step, of the chunk that has had most."""
        return max((chunk.num_forwards for chunk in self._chunks), default=0)

    def position(self) -> Heartbeat:
        """Return the rank's step, call and activity for a heartbeat. Called on the writer thread."""
        return self.running.position(self.count.current, self.num_forwards)

    def begin_if_new(self) -> bool:
        """Begin a step; False where one runs already."""
        if self.running.is_begun:
            return False
        if self.count.num_begun == 0:
            self._locator.locate_at_first_step()
        costs = self._recorder.recording.costs
        costs.begin(self.count.current)
        former = costs.turn_to(OWN)
        self.running.begin()
        has_plan_changed = self._planning.begin(self.count.current)
        self._weights.begin_step(has_plan_changed=has_plan_changed)
        if self._events.is_wide:
            self._events.narrow(self._planning.plan.wants)
        self._events.begun()
        self.count.num_begun += 1
        costs.turn_to(former)
        return True

    def end(self, *, is_partial: bool = False, is_skipped: bool | torch.Tensor | None = None) -> None:
        """Hand the step over to the writer and count on.

        is_partial: it was not over. is_skipped: as `Monitor.step` takes it.
        """
        if self.running.is_empty:
            return
        self._recorder.recording.costs.turn_to(OWN)
        self._events.ending()
        is_known, is_asked = self._outcome(is_skipped)
        if not is_partial:
            self._understanding.step_ends(logged=self.running.logged, is_skipped=is_known, is_scaled=self.running.is_scaled)
        self._weights.end_step()
        self.running.hand_over(
            self.count.current, is_skipped=is_known and not is_partial, was_skipped=is_asked,
            is_partial=is_partial, num_micro_steps=self.num_forwards,
        )  # fmt: skip
        for chunk in self._chunks:
            chunk.end_step()
        self._boundary.close()
        self._planning.step_ended()
        self.count.current += 1
        self._recorder.ended_steps += 1

    def end_explicitly(self, *, is_skipped: bool | torch.Tensor | None) -> None:
        """End the step by the trainer's call; from the first call on steps end in no other way. is_skipped: as `end`."""
        if not self._boundary.is_explicit:
            self._boundary.is_explicit = True
            log.info("sentinel: step boundary: %s", self._boundary.name)
        self._boundary.ending()
        self.end(is_skipped=is_skipped)

    def end_early(self) -> None:
        """Hand the rows of the running step to the writer, as a partial step where it is not over."""
        if self.running.is_begun:
            self.end(is_partial=not self._boundary.is_over)

    def _outcome(self, said: bool | torch.Tensor | None) -> tuple[bool, torch.Tensor | None]:
        """Return whether the step was skipped, as far as the host knows, and the tensor that says so on the device."""
        if said is None:
            was_skipped = self._boundary.was_skipped and any(chunk.num_forwards for chunk in self._chunks)
            return was_skipped, self._boundary.found_inf
        return (False, said) if isinstance(said, torch.Tensor) else (said is True, None)
