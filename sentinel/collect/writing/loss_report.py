"""LossReport: says which steps the writer lost, whole or in part, because it was late."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sentinel.collect.retention.losses import Losses
from sentinel.collect.writing.step_batch import StepBatch
from sentinel.messages import Health

log = logging.getLogger("sentinel")


class LossReport:
    """Sums of steps that were lost and are not yet said. Writer thread only."""

    def __init__(self, rank: int, queue_bytes: int, write: Callable[[Health], bool]) -> None:
        """queue_bytes: the room that steps have while they wait. write: returns False when the disk did not take it."""
        self._rank, self._queue_bytes, self._write = rank, queue_bytes, write
        self._gone = Losses()
        """Steps lost whole."""
        self._cut = Losses()
        """Steps that lost rows."""

    def lost(self, step: int, num_rows: int) -> None:
        """Take note of a step of which nothing is left, not even its end."""
        self._gone.add(step, num_rows)

    def before(self, batch: StepBatch, *, is_late: bool) -> None:
        """Say what there is to say before a step is written. is_late: others wait behind it."""
        if batch.refused is not None:
            self._gone.merge(batch.refused)
        self._report_dropped()
        num_rows = batch.num_cut + batch.num_dropped
        if not num_rows:
            self._report_cut(is_late=is_late)
            return
        if not self._cut:
            log.warning(
                "sentinel: rank %d: the writer thread is late by more than spool.queue_bytes (%d): finite rows are cut "
                "from step %d on; is the disk slow, or the machine short of processors?",
                self._rank, self._queue_bytes, batch.step,
            )  # fmt: skip
        self._cut.add(batch.step, num_rows)

    def at_the_end(self) -> None:
        """Say what is left: no step comes any more."""
        self._report_dropped()
        self._report_cut(is_late=False)

    def _report_dropped(self) -> None:
        if self._gone and self._write(self._gone.as_health(self._rank, "steps_dropped", "writer")):
            self._gone = Losses()

    def _report_cut(self, *, is_late: bool) -> None:
        """Once the writer is no longer late, say which steps were cut."""
        if not self._cut or is_late:
            return
        reported = self._cut.as_health(self._rank, "rows_dropped", "writer")
        if self._write(reported):
            log.warning("sentinel: %s", reported.message)
            self._cut = Losses()
