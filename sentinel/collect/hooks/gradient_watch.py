"""Reads weight gradients at the last moment at which they are whole: before clipping, stepping or zeroing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sentinel.collect.hooks.clipping import ClipWatch
from sentinel.collect.hooks.parameters import Parameter, WatchedParameters
from sentinel.collect.parallel.waiting import WaitClock
from sentinel.collect.rows.recording import Recording
from sentinel.collect.rows.scalars import Scalars, number_of
from sentinel.record import Kind


class GradientWatch:
    """Reads each weight gradient of a step once; boundary, clipping, pipelines and backward call it."""

    def __init__(
        self,
        parameters: WatchedParameters,
        recording: Recording,
        scalars: Scalars,
        waits: WaitClock,
        *,
        is_wanted: Callable[[], bool],
        before_reading: Callable[[], None],
        on_backward_ended: Callable[[], None],
        on_nonfinite: Callable[[], None],
        guard: Callable[[str, Exception], None],
    ) -> None:
        """is_wanted: returns whether the running step measures weight gradients. before_reading: called before each reading,
        for a step that has not begun yet.

        on_backward_ended: called when all gradients of a backward are written. on_nonfinite: called when their norm is NaN
        or infinite.
        """
        self.clips = ClipWatch(self._before_clip, self._before_clip_by_value)
        self._parameters = parameters
        self._recording = recording
        self._scalars = scalars
        self._waits = waits
        self._is_wanted = is_wanted
        self._before_reading = before_reading
        self._on_backward_ended = on_backward_ended
        self._on_nonfinite = on_nonfinite
        self._guard = guard
        self._was_mine = False
        """The parameters clipped last were this model's."""
        self._has_clipped = False
        """This trainer clips through torch: gradients are read there, and their versions need not be watched."""

    def ready(self, params: list[torch.Tensor] | None) -> None:
        """Read the gradients of these parameters (None: of all): an optimizer is about to step by them."""
        self._before_reading()
        self._read(params, is_before_zeroing=False)

    def zeroing(self, params: list[torch.Tensor] | None) -> None:
        """Read the gradients of these parameters (None: of all), about to be zeroed.

        A later reading of the step replaces this.
        """
        self._read(params, is_before_zeroing=True)

    def backward_began(self) -> None:
        """Have the running backward note at its end the version of each gradient: a later write is not part of it."""
        queue = torch.autograd.Variable._execution_engine.queue_callback

        # Twice: a callback queued by a callback runs after DDP's, which finishes its buckets in one.
        def own_part_ended() -> None:
            self._waits.begin_backward_end()
            queue(self._backward_ended)

        queue(own_part_ended)

    def rewritten(self, stage: Any = None) -> None:
        """Note the versions again: a pipeline stage or a GradScaler rescaled the gradients, which is no clipping."""
        if not self._has_clipped and self._is_wanted():
            self._note_versions()

    def _backward_ended(self) -> None:
        try:
            self._waits.end_backward_end()
            self._parameters.note_grads()
            self._on_backward_ended()
            if not self._has_clipped and self._is_wanted():
                self._parameters.note_versions()
        except Exception as error:
            self._guard("backward", error)

    def _note_versions(self) -> None:
        try:
            self._parameters.note_versions()
        except Exception as error:
            self._guard("backward", error)

    def _read(self, params: list[torch.Tensor] | None, *, is_before_zeroing: bool) -> None:
        if self._is_wanted():
            self._measure(self._parameters.of(params), is_before_zeroing=is_before_zeroing)

    def _measure(self, which: list[Parameter], *, is_before_zeroing: bool) -> None:
        costs = self._recording.costs
        former = costs.turn_to(Kind.WGRAD)
        try:
            self._recording.read_gradients(self._parameters, which, is_before_zeroing=is_before_zeroing)
        finally:
            costs.turn_to(former)

    def _before_clip(self, params: list[torch.Tensor], total_norm: torch.Tensor | None) -> None:
        try:
            if self._parameters.holds_any(params):
                self._before_reading()
                self._has_clipped = self._was_mine = True
                if total_norm is not None and _is_known_nonfinite(total_norm):
                    self._on_nonfinite()
                if self._is_wanted():
                    self._measure(self._parameters.of(params), is_before_zeroing=False)
            elif params:
                self._was_mine = False
            if total_norm is not None and self._was_mine:
                self._scalars.note_total_norm(total_norm)
        except Exception as error:
            self._guard("clip_grad", error)

    def _before_clip_by_value(self, grads: list[torch.Tensor]) -> None:
        try:
            if self._is_wanted():
                mine = self._parameters.of_grads(grads)
                if mine:
                    self._measure(mine, is_before_zeroing=False)
        except Exception as error:
            self._guard("clip_grad", error)


def _is_known_nonfinite(norm: torch.Tensor) -> bool:
    """Return whether a norm on the host is NaN or infinite; False for DTensors and device tensors, which are not read."""
    number = number_of(norm)
    return number is not None and not math.isfinite(number)
