"""One step of one rank on its way to the spool, and what is cut from it when the writer is late and memory short."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

import msgspec
import numpy as np

from sentinel.collect.retention.losses import Losses
from sentinel.collect.retention.worth import is_precious
from sentinel.messages import Descriptor, EndStep, Health, Vectors
from sentinel.record import ROW_DTYPE


@dataclasses.dataclass(slots=True)
class StepBatch:
    """One step of one rank. After `submit` it belongs to the hand-over; whoever works on it holds `claim`."""

    step: int
    rows: np.ndarray
    """[>= num_rows] ROW_DTYPE; folded in place."""
    num_rows: int
    end_step: EndStep | None = None
    """`num_rows` and what was dropped are filled in by the writer; None: the step goes on."""
    per_micro_step: bool = False
    """Keep one row per micro-step instead of folding them; true as well once they are folded."""
    descriptor: Descriptor | None = None
    """Sent before the rows, when tensors, placements or chunks changed."""
    prepare: Callable[[], Mapping[str, float] | None] | None = None
    """Called in the writer thread before the end_step is made: returns scalars to add to it."""
    complete: Callable[[], object] | None = None
    """Called in the writer thread before the rows are read: waits for those on their way from an accelerator."""
    complete_early: Callable[[], bool] | None = None
    """Called in the training thread when room is short, where there is `complete`: completes the rows without waiting;
    False: some are still on their way, nothing was done."""
    release: Callable[[], None] | None = None
    """Called when the rows are no longer needed, dropped ones included: give the buffer back."""
    health: Sequence[Health] = ()
    vectors: Callable[[], Vectors | None] | None = None
    """Called in the writer thread after `complete`: what is to be sent beside the rows."""
    vector_bytes: int = 0
    """Bytes that `vectors` keeps alive."""
    was_skipped: SupportsFloat | None = None
    """Not 0: the trainer skipped this step; read after `complete`, for only the device knew when the step ended.
    NaN: it failed before it said so."""
    stream_times: Callable[[], tuple[float, float] | None] | None = None
    """Called in the writer thread after `complete`: seconds of the step, and of its waits for other ranks, on the stream of
    an accelerator that trains; None: not known. They take the place of the host's."""
    num_cut: int = 0
    """Rows of this step, all finite, that were cut for want of room."""
    num_dropped: int = 0
    """Rows of this step that were dropped whatever they held."""
    refused: Losses | None = None
    """Steps before this one for which there was no room at all."""
    is_taken: bool = False
    """The writer has begun to write it."""
    claim: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows and vectors that this step keeps in memory; what a buffer has more belongs to the pool."""
        return self.num_rows * ROW_DTYPE.itemsize + self.vector_bytes

    def detach(self) -> bool:
        """Move the rows, complete, to memory of their own and give their buffer back; False: some have not arrived yet.

        Does not wait. Costs a copy of the rows that there are.
        """
        if self.release is None and self.complete is None:
            return True
        if self.complete is not None and (self.complete_early is None or not self.complete_early()):
            return False
        self.rows = self.rows[: self.num_rows].copy()
        self.complete = self.complete_early = None
        self.give_back()
        return True

    def fold(self) -> None:
        """Make one row of those of a tensor's micro-steps, in place, where that is wanted. Once the rows are complete."""
        if not self.per_micro_step:
            from sentinel.native import fold_rows  # the C library is loaded where it is first needed

            self.num_rows, self.per_micro_step = int(fold_rows(self.rows, self.num_rows)), True

    def cut(self) -> bool:
        """Keep only non-finite rows and those of borders, without vectors; False: some rows have not arrived yet."""
        if not self.detach():
            return False
        # Folded as the writer would: what is cut is counted in the rows that would have been sent.
        self.fold()
        rows = self.rows[: self.num_rows]
        kept = rows[is_precious(rows)]
        self.num_cut += len(rows) - len(kept)
        self.rows, self.num_rows = kept, len(kept)
        self.vectors, self.vector_bytes = None, 0
        return True

    def cut_all(self) -> None:
        """Keep the step without any rows."""
        self.num_dropped += self.num_rows
        self.num_rows, self.rows = 0, np.empty(0, ROW_DTYPE)
        self.vectors, self.vector_bytes = None, 0
        self.complete = self.complete_early = None
        self.give_back()

    def ended(self, end: EndStep, num_written: int, num_lost: int, lost_to: str) -> EndStep:
        """Return the end_step with what was written of the step, and what was lost of it on the way.

        num_lost: rows that the writer could not write, and lost_to why; beside them what was cut before.
        """
        whys = {why for why in end.lost_to.split(",") if why}
        if self.num_cut or self.num_dropped:
            whys.add("writer")
        if num_lost:
            whys.add(lost_to)
        return msgspec.structs.replace(
            end,
            num_rows=num_written,
            num_dropped_rows=end.num_dropped_rows + self.num_cut + self.num_dropped + num_lost,
            num_finite_dropped=end.num_finite_dropped + self.num_cut,
            lost_to=",".join(sorted(whys)),
        )

    def give_back(self) -> None:
        """Let go of the buffer, once."""
        release, self.release = self.release, None
        if release is not None:
            release()
