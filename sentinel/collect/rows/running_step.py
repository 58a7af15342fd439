"""The step that runs: what is due in it, and how it is handed over to the writer when it ends."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from sentinel.collect.hooks.loss_scale import LossScale
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.lifecycle.memory import MemoryUse
from sentinel.collect.lifecycle.notebook import CELLS
from sentinel.collect.lifecycle.standstill import Standstill
from sentinel.collect.parallel.waiting import WaitClock
from sentinel.collect.rows.scalars import Scalars, on_its_way, resolver
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.writing.handover import Handover
from sentinel.collect.writing.step_batch import StepBatch
from sentinel.kinds import KINDS, Phase
from sentinel.messages import Bye, Descriptor, EndStep, Heartbeat
from sentinel.record import ROW_DTYPE, Flag, Kind

_NO_ROWS = np.empty(0, ROW_DTYPE)
_PHASE_WORDS = {
    Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.WGRAD_UNREDUCED: "backward", Phase.WGRAD: "backward",
}  # fmt: skip
"""What a heartbeat says of where the step stands; of the other phases nothing."""


class RunningStep:
    """Begun by the first training forward, or an optimizer that steps without one; ended by the boundary."""

    def __init__(
        self,
        recorder: Recorder,
        scalars: Scalars,
        loss_scale: LossScale,
        waits: WaitClock,
        memory: MemoryUse,
        plan: Plan,
        *,
        gradient_divisor: Callable[[], float],
        descriptor: Callable[[], Descriptor | None],
        handover: Callable[[], Handover],
    ) -> None:
        """gradient_divisor: by what gradients are divided after the backward, where ranks are averaged.

        descriptor: what has to travel before the rows of the step that ends; None: nothing is new. handover: the writer's,
        which is there when the first step ends.
        """
        self.recording = recorder.recording
        self._recorder = recorder
        self._plan = plan
        self._gradient_divisor = gradient_divisor
        self._descriptor = descriptor
        self._handover = handover
        self.is_begun = False
        self.activity = "init"
        """What the trainer does now: init, train, eval or checkpoint."""
        self.raised: Bye | None = None
        """What a notebook's cell raised in which this trained; None: nothing, or it has trained since."""
        self.due: dict[str, int] = {}
        """Kind to the number of tensors measured."""
        self._scalars = scalars
        self._loss_scale = loss_scale
        self._waits = waits
        self._standstill = Standstill()
        self.thread_id = threading.get_ident()
        """The thread that trains; until it does, the one that attached."""
        self._memory = memory
        self._began_at = time.perf_counter()
        self._leaf_handles: list[RemovableHandle] = []
        self._activities: list[str] = []
        """What else the trainer did than train since the step began."""

    @property
    def is_measuring(self) -> bool:
        """Whether a step runs whose tensors are measured."""
        return self.is_begun and self._recorder.is_alive

    @property
    def is_measuring_gradients(self) -> bool:
        """Whether a step runs that measures weight gradients."""
        return self.is_measuring and self._plan.takes(Kind.WGRAD)

    @property
    def logged(self) -> frozenset[str]:
        """Names of the scalars of the running step, whoever noted them."""
        return self._scalars.names

    @property
    def is_scaled(self) -> bool:
        """Whether the loss of the running step was multiplied by a loss scale."""
        return self._loss_scale.value is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to hand over: no forward, and nothing logged."""
        return not self.is_begun and not self._scalars

    def begin(self) -> None:
        """The step's first forward begins."""
        self.recording.rows.dgrad_divisor = self._gradient_divisor()
        self.is_begun, self.activity, self.thread_id = True, "train", threading.get_ident()
        CELLS.note_step(self)
        self._began_at = time.perf_counter()
        self._waits.begin_step()

    def count(self, due: dict[str, int]) -> None:
        """Take note of tensors measured: kind to number."""
        for kind, number in due.items():
            self.due[kind] = self.due.get(kind, 0) + number

    def keep(self, handle: RemovableHandle) -> None:
        """A hook on a leaf that must not outlive the step, whether it fires or not."""
        self._leaf_handles.append(handle)

    def note_activity(self, name: str) -> None:
        """Set the trainer's activity, which the next heartbeat and the end_step of the current step carry."""
        self.activity = name
        if name != "train" and name not in self._activities:
            self._activities.append(name)

    def position(self, step: int, num_forwards: int) -> Heartbeat:
        """Return where this rank stands: what was observed last, and whether it waits. Asked by the writer thread."""
        entry = self.recording.at
        phase = _PHASE_WORDS.get(KINDS[Kind(entry.kind)].phase or Phase.FREE, "") if entry is not None else ""
        return Heartbeat(
            step=step,
            call_id=self.recording.call_id,
            activity=self.activity,
            module=entry.name if entry is not None else "",
            phase=phase,
            micro_step=num_forwards - 1 if phase == "forward" else -1,
            is_waiting=self._waits.is_waiting,
            raised=self.raised,
            site=self._standstill.site((step, self.recording.call_id, self.activity, self._waits.num_waits), self.thread_id),
            num_waits=self._waits.num_waits,
        )

    def hand_over(
        self, step: int, *, is_skipped: bool, was_skipped: torch.Tensor | None, is_partial: bool, num_micro_steps: int
    ) -> None:
        """Give rows, scalars and the end of the step to the writer, and begin with nothing. Does not wait.

        was_skipped: 0-dim, on any device: above 0, the optimizer skipped the step by itself; the writer looks.
        """
        recording, handover, descriptor = self.recording, self._handover(), self._descriptor()
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles = []
        rows = recording.rows
        if is_skipped:
            rows.array["flags"][: rows.num_rows] |= np.uint16(Flag.SKIPPED)
        scale, is_scaled = self._loss_scale.take()
        if scale is not None:
            self._scalars.note_default("loss_scale", scale)
        scalars = self._scalars.take()
        samples, num_samples_cut = self._scalars.samples.take()
        wait_s, reading = self._waits.take()
        end = EndStep(
            step=step,
            num_rows=rows.num_rows,
            num_calls=recording.call_id,
            num_micro_steps=num_micro_steps,
            is_skipped=is_skipped,
            is_partial=is_partial,
            num_folded_rows=recording.num_folded,
            step_time_s=time.perf_counter() - self._began_at,
            due=self.due,
            wait_s=wait_s,
            activities=tuple(self._activities),
            samples=samples,
            num_samples_cut=num_samples_cut,
            left_out=tuple(sorted(kind.label for kind in self._plan.left_out)),
        )
        self.is_begun, self.due, self._activities = False, {}, []
        full, vectors = recording.swap(handover.free_buffer), recording.take_vectors()
        batch = StepBatch(
            step=step, rows=_NO_ROWS, num_rows=0, end_step=end, per_micro_step=self._plan.per_micro_step,
            descriptor=descriptor,
            prepare=resolver(scalars, self._memory), vectors=vectors.finish if len(vectors) else None,
            vector_bytes=vectors.num_bytes, health=recording.take_health(),
            was_skipped=_copied(was_skipped),
            stream_times=reading,
        )  # fmt: skip
        if full is None:
            batch.num_dropped = end.num_rows
        else:
            full.take_scale(scale, wgrads_are_scaled=is_scaled)
            full.begin_copy()
            batch.rows, batch.num_rows = full.array, full.num_rows
            batch.complete, batch.complete_early = full.finish, full.finish_arrived
            batch.release = functools.partial(recording.give_back, full)
        handover.submit(batch)


def _copied(was_skipped: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy on its way to the host; None: there is nothing to copy, or the device has failed."""
    try:
        return None if was_skipped is None else on_its_way("is_skipped", was_skipped.detach())
    except RuntimeError:
        return None
