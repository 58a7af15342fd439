"""TrainingPasses: begins, continues or ends the running step at each training forward and backward of a chunk."""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle

from sentinel.collect.hooks.backwards import graph_task
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.gradient_watch import GradientWatch
from sentinel.collect.hooks.parameter_watch import ParameterWatch
from sentinel.collect.hooks.parameters import WatchedParameters
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.probes.context import Events
from sentinel.collect.step import Boundary
from sentinel.collect.step_runner import StepRunner


class TrainingPasses:
    """Called by the hooks of chunks (`recorder.PassListener`): ends the step that is over and begins the next."""

    def __init__(
        self,
        runner: StepRunner,
        recorder: Recorder,
        boundary: Boundary,
        parameters: WatchedParameters,
        gradients: GradientWatch,
        weights: ParameterWatch,
        events: Events,
        *,
        shares_micro_steps: bool,
    ) -> None:
        """shares_micro_steps: a micro-batch may go through a chunk several times before its backward."""
        self._runner = runner
        self._recorder = recorder
        self._boundary = boundary
        self._parameters = parameters
        self._gradients = gradients
        self._weights = weights
        self._events = events
        self._shares_micro_steps = shares_micro_steps
        self._has_seen_forward = False
        self._graph_task = -1
        """Number of the backward whose end is watched; -1: none."""
        self._mark = (0, 0)
        """Rows and calls that there were when the running forward began."""

    def before_forward(self, chunk: Chunk) -> None:
        """A training forward begins: end the step that is over, begin the new one."""
        if self._boundary.is_dirty and self._parameters.are_thrown_away():
            self._boundary.thrown_away()
        if self._boundary.is_over and not self._boundary.is_turn_of_idle(chunk.root):
            self._runner.end()
        self._runner.begin_if_new()
        self._has_seen_forward = True
        chunk.begin_micro_step(shares=self._shares_micro_steps)
        self._mark = (self._recorder.recording.rows.num_rows, self._recorder.recording.call_id)

    def captured_forward(self) -> None:
        """A training forward is recorded as a CUDA graph: from now on the optimizer may be all that is seen of steps."""
        self._has_seen_forward = False

    def after_forward(self, chunk: Chunk) -> None:
        """A training forward ended well: it counts."""
        chunk.end_micro_step()

    def forward_failed(self, chunk: Chunk) -> None:
        """A training forward raised: what it showed is forgotten, it may be tried again."""
        self._recorder.recording.rewind(*self._mark)
        self._events.rewound(chunk)

    def after_backward_hook(self, chunk: Chunk) -> None:
        """A gradient arrived: a backward runs; at its end note which gradients were written how often."""
        chunk.had_backward = True
        task = graph_task()
        if task == self._graph_task and task != -1:
            return
        self._graph_task = task
        self._boundary.mark_backward()
        if task != -1:
            self._gradients.backward_began()

    def keep_until_step_ends(self, handle: RemovableHandle) -> None:
        """A hook on a leaf that must not outlive the step, whether it fires or not."""
        self._runner.running.keep(handle)

    def optimizer_steps(self) -> None:
        """An optimizer is about to step: where no forward was seen, they are compiled away, or of another copy."""
        if self._has_seen_forward or self._recorder.is_paused or not self._recorder.is_alive:
            if self._runner.leaves_out and self._recorder.recording.has_nonfinite:
                self._weights.saw_nonfinite()
            return
        if self._runner.running.is_begun and self._boundary.is_over:
            self._runner.end()
        if self._runner.begin_if_new():
            self._recorder.recording.report(
                "blind_forward",
                "an optimizer steps, but no training forward of the attached model was seen: was it compiled or copied "
                "after attach, or is it replayed as a CUDA graph? Parameters and gradients are measured, the black box is "
                "blind; attach to what is called",
            )
