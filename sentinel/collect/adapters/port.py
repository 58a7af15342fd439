"""What a trainer's adapter may say and ask, beside what every training loop calls on the monitor itself.

An adapter stands between one trainer and `Monitor.port`; it reaches no other part of a monitor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.parameters import WatchedParameters
from sentinel.collect.hooks.recorder import PassListener, Recorder
from sentinel.collect.hooks.sites import SitePlacements
from sentinel.collect.lifecycle.session import MonitorSession
from sentinel.collect.parallel.parameter_storage import ParameterStorage
from sentinel.collect.rows.scalars import on_its_way
from sentinel.collect.step import Boundary


class TrainerSteps:
    """When the trainer's steps end, and what becomes of its gradients, as far as no hook sees it."""

    def __init__(self, boundary: Boundary, passes: PassListener, chunks: Sequence[Chunk]) -> None:
        self._boundary = boundary
        self._passes = passes
        self._chunks = chunks

    @property
    def is_explicit(self) -> bool:
        """Whether a step ends only where the adapter says so; else also where optimizers are seen to step."""
        return self._boundary.is_explicit

    @is_explicit.setter
    def is_explicit(self, value: bool) -> None:
        self._boundary.is_explicit = value

    @property
    def was_skipped(self) -> bool:
        """Whether no optimizer has stepped since the step began, although there is one."""
        return self._boundary.was_skipped

    @property
    def has_unused_gradients(self) -> bool:
        """Whether a backward ran in a step that is not over, and no optimizer has used what it left."""
        return self._boundary.is_dirty and not self._boundary.is_over

    def begin(self) -> None:
        """A training forward of the first chunk begins that no hook sees."""
        self._passes.before_forward(self._chunks[0])

    def finish(self, *, is_skipped: bool | None) -> None:
        """The step is over; it ends when the next one begins, for it may be logged about until then.

        From now on only the adapter ends steps. is_skipped: whether the weights were left alone; None: unless an optimizer
        was seen to step.
        """
        self._boundary.finish(is_skipped=is_skipped)

    def mark_backward(self) -> None:
        """A backward ran: gradients that someone may throw away now exist."""
        self._boundary.mark_backward()

    def zeroed_by(self, optimizer: Any) -> None:
        """A wrapper's own zero_grad is about to clear the gradients of a watched optimizer."""
        self._boundary.zeroed_by(optimizer)

    def watch(self, optimizers: Iterable[Any]) -> None:
        """The trainer has exchanged its optimizers for these."""
        self._boundary.watch(optimizers, [])

    def follow(self, optimizer: Any) -> None:
        """A torch optimizer steps inside another one: it ends nothing, and its gradients are not read."""
        self._boundary.follow(optimizer)


class TrainerTensors:
    """Where the trainer keeps parameters and gradients, how its tensors are placed, and what they are multiplied by."""

    def __init__(self, parameters: WatchedParameters, recorder: Recorder, chunks: Sequence[Chunk]) -> None:
        self._parameters = parameters
        self._recorder = recorder
        self._chunks = chunks

    @property
    def storage(self) -> ParameterStorage:
        """Where parameters and gradients are looked for."""
        return self._parameters.storage

    @storage.setter
    def storage(self, value: ParameterStorage) -> None:
        self._parameters.storage = value
        self._parameters.refresh(self._chunks)

    def place_sites(self, placements: SitePlacements) -> None:
        """Ask `placements` how plain tensors at modules are placed over the ranks."""
        self._recorder.sites.placements = placements

    def gradients_written(self) -> None:
        """The trainer itself has written gradients behind autograd's end: that is no clipping."""
        self._parameters.note_versions()

    def losses_multiplied(self, factor: float) -> None:
        """The losses of the running step are multiplied by `factor`, and the gradients that are read carry it."""
        self._recorder.recording.rows.grad_scale = factor

    def losses_multiplied_on_device(self, factor: torch.Tensor, *, wgrads_carry_it: bool) -> torch.Tensor | None:
        """As `losses_multiplied`, 0-dim on any device: copied once a step, without a wait. Returns the copy when it is made.

        wgrads_carry_it: also the weight gradients when they are read, not only those of activations.
        """
        rows, copied = self._recorder.recording.rows, None
        if not isinstance(rows.grad_scale, torch.Tensor):
            copied = on_its_way("loss_scale", factor.detach())
            rows.take_scale(copied, wgrads_are_scaled=wgrads_carry_it)
        rows.wgrads_are_scaled = wgrads_carry_it
        return copied

    def wgrads_multiplied(self, factor: float | torch.Tensor) -> None:
        """Behind the last backward of the step weight gradients are multiplied by `factor`, those of activations are not."""
        copied = on_its_way("scaling", factor.detach()) if isinstance(factor, torch.Tensor) else float(factor)
        self._recorder.recording.rows.take_scaling(copied)

    def wgrads_read_early(self) -> None:
        """The weight gradients of the running step were read before the trainer's scaler divided them."""
        self._recorder.recording.rows.is_read_early = True


class AdapterPort:
    """Beside steps and tensors: what the adapter could not do, when its trainer pauses, and what is undone at the end."""

    def __init__(
        self, session: MonitorSession, recorder: Recorder, steps: TrainerSteps, tensors: TrainerTensors,
        chunks: Sequence[Chunk], name_map: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.steps = steps
        self.tensors = tensors
        self.chunks = chunks
        """The chunks of this rank, in the order in which attach was given them."""
        self.name_map = name_map
        """As `MonitorConfig.name_map`."""
        self.guard = recorder.guard
        """`guard(site, error)`: an exception of the adapter ends here; it is counted, logged once for each site, shipped."""
        self._session = session
        self._recorder = recorder

    @property
    def ended_steps(self) -> int:
        """Steps that ended so far in this process."""
        return self._recorder.ended_steps

    @property
    def undoing(self) -> Sequence[Callable[[], None]]:
        """What is called at the end."""
        return self._session.on_end

    def at_end(self, undo: Callable[[], None]) -> None:
        """Call `undo` once when the monitor ends: it takes off what the adapter put on its trainer."""
        self._session.on_end.append(undo)

    def report(self, code: str, message: str, site: str = "") -> None:
        """Say what is not measured, or not as people would expect: logged once for each site, shipped, counted."""
        self._recorder.recording.report(code, message, site)

    def pause(self) -> None:
        """Forwards are nobody's steps from now on: the trainer tries itself out, or loads a checkpoint by stepping."""
        self._recorder.is_paused = True

    def resume(self) -> None:
        """Forwards are those of training again."""
        self._recorder.is_paused = False
