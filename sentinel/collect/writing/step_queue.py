"""StepQueue: whole steps that wait for the writer thread, in bounded memory.

Past so many bytes the oldest steps that wait lose their finite rows, never their ends: the training thread cuts them, for
the writer does not come round. What a step lost is counted in its own end.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from sentinel.collect.retention.losses import Losses
from sentinel.collect.writing.step_batch import StepBatch
from sentinel.collect.writing.writer_failures import WriterFailures
from sentinel.messages import Descriptor
from sentinel.wire.frame import Message

QUEUE_BYTES = 128 * 2**20
"""Most bytes of rows that wait for the writer, unless said otherwise: two seconds of steps of 5 ms and 2,400 rows."""
LEAST_STEPS = 4
"""So many steps may wait whatever they weigh."""
MAX_STEPS = 16 * 1024
"""Most steps that wait for the writer, with rows or without; a bound on memory: their ends alone take some 40 MB."""
MAX_NOTES = 256
"""Small records (health, answers) that may wait for the disk."""

Item: TypeAlias = StepBatch | Message


class StepQueue:
    """Filled by the training thread, emptied by the writer thread; each counter has one that writes it: there is no lock."""

    def __init__(self, failures: WriterFailures, max_bytes: int = QUEUE_BYTES) -> None:
        """failures: counts the small records for which there was no room."""
        self.max_bytes = max_bytes
        self.num_cut_steps = 0
        """Steps that lost rows because the writer was late."""
        self._failures = failures
        self._items: deque[Item] = deque()
        self._whole: deque[StepBatch] = deque()
        """Steps that wait with all their rows, oldest first. Training thread only."""
        self._buffered: deque[StepBatch] = deque()
        """Steps that wait in the buffer that they were measured in, oldest first. Training thread only."""
        self._num_in = self._num_out = 0
        self._num_notes_in = self._num_notes_out = 0
        self._bytes_in = self._bytes_out = 0
        self._refused = Losses()
        """Steps for which there was no room at all; training thread only, until the next batch carries them."""
        self._owed: Descriptor | None = None
        """Found no room; goes with the next step that does: its rows point into it."""

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def is_done_with(self) -> bool:
        """Whether the writer has written all that was put in."""
        return self._num_in <= self._num_out and self._num_notes_in <= self._num_notes_out

    # The training thread.

    def put(self, batch: StepBatch) -> bool:
        """Add a step; False when there is no room at all for it: the next one that has room tells of it."""
        if self._num_in - self._num_out >= MAX_STEPS:
            self._refuse(batch)
            return False
        if self._owed is not None:
            batch.descriptor, self._owed = batch.descriptor or self._owed, None
        if self._refused:
            batch.refused, self._refused = self._refused, Losses()
        self._num_in += 1
        self._bytes_in += batch.num_bytes
        for waiting in (self._whole, self._buffered):
            while waiting and waiting[0].is_taken:
                waiting.popleft()
            waiting.append(batch)
        self._items.append(batch)
        return True

    def put_note(self, message: Message) -> bool:
        """Add one small record; False: no room, counted."""
        if self._num_notes_in - self._num_notes_out >= MAX_NOTES:
            self._failures.count("note_dropped")
            if isinstance(message, Descriptor):
                self._owed = message
            return False
        if isinstance(message, Descriptor):
            self._owed = None
        self._num_notes_in += 1
        self._items.append(message)
        return True

    def free_buffer(self) -> bool:
        """Have the oldest step that waits give its buffer back, its rows copied; False: none can."""
        while self._buffered:
            with _claimed(self._buffered[0]) as batch:
                if batch is not None and batch.release is not None:
                    before = batch.num_bytes
                    if not batch.detach():
                        return False
                    self._bytes_in -= before - batch.num_bytes
                    self._buffered.popleft()
                    return True
            self._buffered.popleft()
        return False

    def make_room(self) -> bool:
        """Cut the oldest steps that wait until the others have room; False when a step lost rows for it."""
        is_whole = True
        while self._whole and len(self._whole) > LEAST_STEPS and self._is_full:
            # Whom the writer has needs no room much longer.
            with _claimed(self._whole[0]) as batch:
                if batch is not None:
                    before = batch.num_bytes
                    if not batch.cut():
                        break
                    is_whole = False
                    self.num_cut_steps += 1
                    self._bytes_in -= before - batch.num_bytes
            self._whole.popleft()
        if is_whole or not self._is_full:
            return is_whole
        # What is left is worth keeping, and the oldest of it is worth most: the newest goes.
        with _claimed(self._whole[-1]) as newest:
            if newest is not None:
                before = newest.num_bytes
                newest.cut_all()
                self._bytes_in -= before - newest.num_bytes
        return False

    def clear(self) -> None:
        """Forget what waits: in a forked child, where nobody will take it."""
        self._items.clear()

    @property
    def _is_full(self) -> bool:
        return self._bytes_in - self._bytes_out > self.max_bytes

    def _refuse(self, batch: StepBatch) -> None:
        """Drop a step for which there is no room at all; the next step that has room counts it as lost."""
        self._refused.add(batch.step, batch.num_rows)
        if batch.descriptor is not None:
            self._owed = batch.descriptor
        for health in batch.health:
            self.put_note(health)
        batch.give_back()

    # The writer thread.

    def take(self) -> Item:
        """Return what has waited longest; nobody cuts a step any more once it was returned. IndexError: nothing waits."""
        item = self._items.popleft()
        if isinstance(item, StepBatch):
            with item.claim:
                item.is_taken = True
        else:
            self._num_notes_out += 1
        return item

    def written(self, num_bytes: int) -> None:
        """Take note that a step was written which weighed so many bytes when it was taken."""
        self._num_out += 1
        self._bytes_out += num_bytes


@contextlib.contextmanager
def _claimed(batch: StepBatch) -> Iterator[StepBatch | None]:
    """Hold a step so that the writer does not take it; None where it has it, or takes it just now."""
    if not batch.claim.acquire(blocking=False):
        yield None
        return
    try:
        yield None if batch.is_taken else batch
    finally:
        batch.claim.release()
