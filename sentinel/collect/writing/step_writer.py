"""StepWriter: makes frames of steps and small records, in the writer thread, and owes the disk no end of a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from sentinel.collect.writing.loss_report import LossReport
from sentinel.collect.writing.step_batch import StepBatch
from sentinel.collect.writing.step_queue import MAX_STEPS
from sentinel.collect.writing.writer_failures import WriterFailures
from sentinel.messages import Descriptor, EndStep
from sentinel.record import Flag
from sentinel.wire.frame import FRAME_TYPES, NO_STEP, FrameType, Message, encode_message
from sentinel.wire.spool import SpoolWriter


class StepWriter:
    """Completes a step, folds it and appends it to the spool. Writer thread only."""

    def __init__(
        self,
        spool: SpoolWriter,
        queue_bytes: int,
        failures: WriterFailures,
        on_descriptor: Callable[[Descriptor], None],
    ) -> None:
        """queue_bytes: the room that steps have while they wait. on_descriptor: called before one is written."""
        self._spool, self._failures, self._on_descriptor = spool, failures, on_descriptor
        self._losses = LossReport(spool.rank, queue_bytes, self.write)
        self._owed: deque[EndStep] = deque()
        """Ends that the disk did not take."""

    def write(self, message: Message) -> bool:
        """Write one small record; False when the disk did not take it."""
        if isinstance(message, Descriptor):
            self._on_descriptor(message)
            return self._spool.describe(message)
        step = getattr(message, "step", NO_STEP)
        return self._spool.append(FRAME_TYPES[type(message)], encode_message(message), step=step)

    def write_step(self, batch: StepBatch, *, is_late: bool) -> None:
        """Write a step: what describes it, what was lost before it, its rows, its vectors, its end.

        is_late: others wait behind it. What raises is counted as rows lost in the step's own end.
        """
        if batch.descriptor is not None:
            self.write(batch.descriptor)
        self._losses.before(batch, is_late=is_late)
        for health in batch.health:
            self.write(health)
        end = batch.end_step
        num_sent, num_written, lost_to = batch.num_rows, 0, "error"
        try:
            if batch.complete is not None:
                batch.complete()
            end = _with_scalars(batch, end)
            end = _with_skip(batch, end)
            end = _with_stream_times(batch, end)
            batch.fold()
            num_sent, lost_to = batch.num_rows, "disk"
            if end is not None and self._write_whole(batch, end):
                end = None
            else:
                num_written = self._spool.append_rows(batch.rows[:num_sent], step=batch.step)
        finally:
            if batch.vectors is not None:
                self._failures.guard("vectors", lambda: self._write_vectors(batch))
            if end is not None:
                self._write_end(batch.ended(end, num_written, num_sent - num_written, lost_to))

    def write_owed(self) -> None:
        """Write the ends that the disk has not taken yet, until it refuses again."""
        while self._owed:
            end = self._owed[0]
            if not self._spool.append(FrameType.END_STEP, encode_message(end), step=end.step):
                return
            self._owed.popleft()

    def write_losses(self) -> None:
        """Write what was lost and is not yet said: no step comes any more."""
        self._losses.at_the_end()

    def _write_whole(self, batch: StepBatch, end: EndStep) -> bool:
        """Write rows and end of a step at once, which is the usual case; False: nothing was written, write one by one."""
        if batch.vectors is not None or self._owed:
            return False
        whole = encode_message(batch.ended(end, batch.num_rows, 0, ""))
        return self._spool.append_step(batch.rows[: batch.num_rows], whole, step=batch.step)

    def _write_vectors(self, batch: StepBatch) -> None:
        assert batch.vectors is not None
        vectors = batch.vectors()
        if vectors is not None:
            self._spool.append(FrameType.VECTOR, encode_message(vectors), step=batch.step)

    def _write_end(self, end: EndStep) -> None:
        """Write an end_step; one that the disk does not take is written before the next that it does."""
        self._owed.append(end)
        self.write_owed()
        if len(self._owed) > MAX_STEPS:
            gone = self._owed.popleft()
            self._losses.lost(gone.step, gone.num_rows + gone.num_dropped_rows)


def _with_scalars(batch: StepBatch, end: EndStep | None) -> EndStep | None:
    """Return the end of a step with the scalars that only the writer thread may wait for."""
    scalars = batch.prepare() if batch.prepare is not None else None
    return msgspec.structs.replace(end, scalars={**end.scalars, **scalars}) if end is not None and scalars else end


def _with_skip(batch: StepBatch, end: EndStep | None) -> EndStep | None:
    """Return the end of a step, marked like its rows where the device says that the trainer skipped it."""
    if end is None or end.is_partial or batch.was_skipped is None:
        return end
    was_skipped = float(batch.was_skipped)
    if was_skipped == 0 or math.isnan(was_skipped):
        return end
    batch.rows["flags"][: batch.num_rows] |= np.uint16(Flag.SKIPPED)
    return msgspec.structs.replace(end, is_skipped=True)


def _with_stream_times(batch: StepBatch, end: EndStep | None) -> EndStep | None:
    """Return the end of a step with the times of the stream that trains, where they are known by now."""
    times = batch.stream_times() if batch.stream_times is not None else None
    if end is None or times is None:
        return end
    step_s, wait_s = times
    return msgspec.structs.replace(end, step_time_s=step_s, wait_s=wait_s)
