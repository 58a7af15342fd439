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
    """Told by boundary, clipping, pipelines and backward; reads each gradient of a step once."""

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
        """is_wanted: whether this step's gradients are measured; before_reading: the step may have to begin first.

        on_backward_ended: all gradients of a backward are there. on_nonfinite: they hold a NaN or an infinity.
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
        """An optimizer is about to use these gradients; None: all."""
        self._before_reading()
        self._read(params, is_doomed=False)

    def doomed(self, params: list[torch.Tensor] | None) -> None:
        """These gradients are about to be zeroed; None: all. A later reading in the same step replaces this one."""
        self._read(params, is_doomed=True)

    def backward_began(self) -> None:
        """Note at the end of this backward how often each gradient was written: a write after it is somebody else's."""
        queue = torch.autograd.Variable._execution_engine.queue_callback

        # Twice: a callback queued by a callback runs after DDP's, which finishes its buckets in one.
        def own_part_ended() -> None:
            self._waits.begin_backward_end()
            queue(self._backward_ended)

        queue(own_part_ended)

    def rewritten(self, stage: Any = None) -> None:
        """A pipeline stage or a GradScaler changed the gradients, as a part of the backward: that is no clipping."""
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

    def _read(self, params: list[torch.Tensor] | None, *, is_doomed: bool) -> None:
        if self._is_wanted():
            self._measure(self._parameters.of(params), is_doomed=is_doomed)

    def _measure(self, which: list[Parameter], *, is_doomed: bool) -> None:
        costs = self._recording.costs
        former = costs.turn_to(Kind.WGRAD)
        try:
            self._recording.read_gradients(self._parameters, which, is_doomed=is_doomed)
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
                    self._measure(self._parameters.of(params), is_doomed=False)
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
                    self._measure(mine, is_doomed=False)
        except Exception as error:
            self._guard("clip_grad", error)


def _is_known_nonfinite(norm: torch.Tensor) -> bool:
    """Tell whether a norm is no number, where its memory says so: a DTensor's would take a collective, a device's a wait."""
    number = number_of(norm)
    return number is not None and not math.isfinite(number)
