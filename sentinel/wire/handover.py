"""From the training thread to the thread that writes: a bounded queue of whole steps, handed over by reference.

The training thread appends to a deque and releases a lock: no copy, no wait, no system call that can stall. Everything
else (folding, checksums, the disk, the control folder) happens in the writer thread, in calls that release the GIL.

Where the writer is late the queue grows to a number of bytes. Past it the oldest steps that wait lose their finite rows,
never their ends: the training thread cuts them, for the writer does not come round. What a step lost is told in its own end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from sentinel.command import Command
from sentinel.messages import Ack, Bye, Descriptor, EndStep, Health, Heartbeat
from sentinel.record import Flag
from sentinel.wire.clock import Clock, SystemClock
from sentinel.wire.control import ControlFolder
from sentinel.wire.frame import FRAME_TYPES, NO_ATTEMPT, NO_STEP, FrameType, Message, encode_message, run_id_of
from sentinel.wire.losses import Losses
from sentinel.wire.pulse import PulseWriter
from sentinel.wire.spool import FILE_BYTES, SPOOL_BYTES, SpoolWriter, life_folder
from sentinel.wire.step_batch import StepBatch
from sentinel.wire.witness import ExitWitness

log = logging.getLogger("sentinel")

QUEUE_BYTES = 128 * 2**20
"""Most bytes of rows that wait for the writer, unless said otherwise: two seconds of steps of 5 ms and 2,400 rows."""
LEAST_STEPS = 4
"""So many steps may wait whatever they weigh."""
MAX_STEPS = 16 * 1024
"""Most steps that wait for the writer, rows or not: their ends alone take some 40 MB (chosen)."""
MAX_NOTES = 256
"""Small records (health, answers) that may wait for the disk."""
HEARTBEAT_S = 1.0
CONTROL_POLL_S = 0.05
"""Between looks into the control folder while something is trained."""
PULSE_S = 0.02
"""Longest time without a beat while something is trained. Steps that follow each other faster need no waking for it."""
IDLE_POLL_S = 0.25
"""How often the control folder is looked at while nobody trains."""

_NS = 1_000_000_000
_living: weakref.WeakSet[Handover] = weakref.WeakSet()


_Item: TypeAlias = StepBatch | Message


class Handover:
    """Owns the writer thread and the spool of one life. Nothing here makes the training thread wait, except close."""

    def __init__(
        self,
        directory: Path,
        *,
        life: bytes,
        run: str,
        rank: int,
        attempt: int | None = None,
        descriptor: Descriptor | None = None,
        position: Callable[[], Heartbeat | None] | None = None,
        on_command: Callable[[Command], Ack | None] | None = None,
        on_refused: Callable[[str], None] | None = None,
        max_bytes: int = SPOOL_BYTES,
        file_bytes: int = FILE_BYTES,
        heartbeat_s: float = HEARTBEAT_S,
        control_poll_s: float = CONTROL_POLL_S,
        queue_bytes: int = QUEUE_BYTES,
        clock: Clock | None = None,
        start: bool = True,
    ) -> None:
        """`directory` is the run's. With start=False no thread runs and `turn()` does one round of its work.

        `position`, `on_command` (whose answer is sent) and `on_refused` are called in the writer thread.
        """
        self._clock = clock or SystemClock()
        self.spool = SpoolWriter(
            life_folder(directory, rank, life), life, rank, run_id_of(run), NO_ATTEMPT if attempt is None else attempt,
            max_bytes=max_bytes, file_bytes=file_bytes, clock=self._clock,
        )  # fmt: skip
        self._pulse = PulseWriter(self.spool.directory)
        self._witness = ExitWitness(self.spool.directory)
        self._control = ControlFolder(Path(directory) / "control", on_refused or _log_refused)
        self._position = position
        self._on_command = on_command
        self._heartbeat_ns = int(heartbeat_s * _NS)
        self._control_poll_ns = int(control_poll_s * _NS)
        self._queue_bytes = queue_bytes
        self._queue: deque[_Item] = deque()
        self._whole: deque[StepBatch] = deque()
        """Steps that wait with all their rows, oldest first. Training thread only."""
        self._buffered: deque[StepBatch] = deque()
        """Steps that wait in the buffer that they were measured in, oldest first. Training thread only."""
        self._wake = threading.Lock()
        self._wake.acquire()
        # Each counter has one writing thread, so that no lock is needed.
        self._num_in = self._num_out = 0
        self._num_notes_in = self._num_notes_out = 0
        self._bytes_in = self._bytes_out = 0
        self.num_cut_steps = 0
        """Steps that lost rows because the writer was late."""
        self._refused = Losses()
        """Steps for which there was no room at all; training thread only, until the next batch carries them."""
        self._owed: deque[EndStep] = deque()
        """Ends that the disk did not take. Writer thread only."""
        self._losses = Losses()
        """Steps lost whole, untold. Writer thread only."""
        self._cut = Losses()
        """Steps that were cut, untold. Writer thread only."""
        self._untold: Descriptor | None = None
        """Found no room; goes with the next step that does: its rows point into it."""
        self._last_step = NO_STEP
        self._busy_until_ns = 0
        self._activity = "init"
        self._next_heartbeat_ns = 0
        self._next_poll_ns = 0
        self._bye: Bye | None = None
        self._failures: dict[str, int] = {}
        self._is_alive = True
        self._thread: threading.Thread | None = None
        if descriptor is not None:
            self.post(descriptor)
        if start:
            self._thread = threading.Thread(target=self._run, name="sentinel-writer", daemon=True)
            self._thread.start()
        _living.add(self)

    def submit(self, batch: StepBatch) -> bool:
        """Hand a step over; never blocks. False when a step had to lose rows for it, counted in that step's own end."""
        if not self._is_alive:
            return False
        self._last_step = batch.step
        if self._num_in - self._num_out >= MAX_STEPS:
            self._refuse(batch)
            return False
        if self._untold is not None:
            batch.descriptor, self._untold = batch.descriptor or self._untold, None
        if self._refused:
            batch.refused, self._refused = self._refused, Losses()
        self._num_in += 1
        self._bytes_in += batch.num_bytes
        for waiting in (self._whole, self._buffered):
            while waiting and waiting[0].is_taken:
                waiting.popleft()
            waiting.append(batch)
        self._queue.append(batch)
        self._ring()
        return self._make_room()

    def free_buffer(self) -> bool:
        """Have the oldest step that waits give its buffer back, its rows copied; False: none can. Training thread only."""
        while self._buffered:
            batch = self._buffered[0]
            if batch.claim.acquire(blocking=False):
                try:
                    if not batch.is_taken and batch.release is not None:
                        before = batch.num_bytes
                        if not batch.detach():
                            return False
                        self._bytes_in -= before - batch.num_bytes
                        self._buffered.popleft()
                        return True
                finally:
                    batch.claim.release()
            self._buffered.popleft()
        return False

    def _make_room(self) -> bool:
        """Cut the oldest steps that wait until the others have room."""
        is_whole = True
        while self._whole and len(self._whole) > LEAST_STEPS and self._bytes_in - self._bytes_out > self._queue_bytes:
            batch = self._whole[0]
            # Whom the writer has needs no room much longer.
            if batch.claim.acquire(blocking=False):
                try:
                    if not batch.is_taken:
                        before = batch.num_bytes
                        if not batch.cut(_fold):
                            break
                        is_whole = False
                        self.num_cut_steps += 1
                        self._bytes_in -= before - batch.num_bytes
                finally:
                    batch.claim.release()
            self._whole.popleft()
        if is_whole or self._bytes_in - self._bytes_out <= self._queue_bytes:
            return is_whole
        # What is left is worth keeping, and the oldest of it is worth most: the newest goes.
        newest = self._whole[-1]
        if newest.claim.acquire(blocking=False):
            try:
                if not newest.is_taken:
                    before = newest.num_bytes
                    newest.cut_all()
                    self._bytes_in -= before - newest.num_bytes
            finally:
                newest.claim.release()
        return False

    def _refuse(self, batch: StepBatch) -> None:
        """Let go of a step for which there is no room at all; it is told with the next one that has it."""
        self._refused.add(batch.step, batch.num_rows)
        if batch.descriptor is not None:
            self._untold = batch.descriptor
        for health in batch.health:
            self.post(health)
        batch.give_back()

    def post(self, message: Message) -> bool:
        """Queue one small record (health, end of a step without rows, ...); never blocks. False: no room, counted."""
        if not self._is_alive:
            return False
        if self._num_notes_in - self._num_notes_out >= MAX_NOTES:
            self._failures["note_dropped"] = self._failures.get("note_dropped", 0) + 1
            if isinstance(message, Descriptor):
                self._untold = message
            return False
        if isinstance(message, Descriptor):
            self._untold = None
        self._num_notes_in += 1
        self._queue.append(message)
        self._ring()
        return True

    def acknowledge(self, ack: Ack) -> bool:
        """Queue the answer to a command; never blocks."""
        return self.post(ack)

    def close(
        self, said: Bye | str = "detached", *, timeout_s: float = 5.0, health: Sequence[Health] = (), step: int | None = None
    ) -> bool:
        """Write what is queued, then BYE, waiting at most timeout_s; False when the disk did not take it in time.

        said: the last words, or their reason alone; their step is filled in.
        """
        if not self._is_alive:
            return True
        for one in health:
            self.post(one)
        step = self._last_step if step is None else step
        self._bye = Bye(reason=said, step=step) if isinstance(said, str) else msgspec.structs.replace(said, step=step)
        self._is_alive = False
        self._ring()
        if self._thread is None:
            self._finish()
            return True
        return self.has_ended(timeout_s)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait at most timeout_s for the writer to have written everything behind `close`; False: it took longer."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait at most timeout_s until everything handed over is with the system's disk cache; False: it took longer."""
        deadline = self._clock.mono_ns() + int(timeout_s * _NS)
        while self._num_in > self._num_out or self._num_notes_in > self._num_notes_out:
            if self._thread is None:
                self.turn()
            elif not self._thread.is_alive() or self._clock.mono_ns() >= deadline:
                return False
            else:
                self._ring()
                time.sleep(0.002)
        return True

    def disarm(self) -> None:
        """In a forked child: this rank's spool belongs to the parent; write nothing, ever."""
        self._is_alive = False
        self._queue.clear()
        self._thread = None
        self.spool.disarm()
        self._pulse.close()
        self._witness.close()

    def turn(self) -> None:
        """Do one round of the writer's work: what is queued, a heartbeat, the control folder; each when it is due."""
        self._drain()
        self._pulse.beat(self._clock.wall_ns())
        now = self._clock.mono_ns()
        if now >= self._next_heartbeat_ns:
            self._next_heartbeat_ns = now + self._heartbeat_ns
            self._guarded("heartbeat", self._beat)
        if now >= self._next_poll_ns:
            self._next_poll_ns = now + (self._control_poll_ns if self._is_training(now) else int(IDLE_POLL_S * _NS))
            self._guarded("control", self._poll_control)

    def _is_training(self, now_ns: int) -> bool:
        return self._activity == "train" or now_ns < self._busy_until_ns

    def _ring(self) -> None:
        # Releasing a lock nobody holds means that the writer is already told.
        with contextlib.suppress(RuntimeError):
            self._wake.release()

    def _run(self) -> None:
        while self._bye is None:
            self._guarded("writer", self.turn)
            now = self._clock.mono_ns()
            due = min(self._next_heartbeat_ns, self._next_poll_ns)
            longest = PULSE_S if self._is_training(now) else IDLE_POLL_S
            self._wake.acquire(timeout=min(max(0.001, (due - now) / _NS), longest))
        if self._thread is not None:  # None: disarmed in a forked child
            self._guarded("close", self._finish)

    def _finish(self) -> None:
        self._drain()
        self._guarded("owed", self._write_owed)
        self._guarded("losses", lambda: self._tell_losses(None))
        if self._bye is not None:
            self._guarded("bye", lambda: self._write(self._bye))
        self.spool.close()
        self._pulse.close()
        self._witness.close()

    def _drain(self) -> None:
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, StepBatch):
                self._busy_until_ns = self._clock.mono_ns() + _NS
                with item.claim:
                    item.is_taken = True
                    num_bytes = item.num_bytes
                try:
                    self._guarded("step", lambda batch=item: self._write_step(batch))  # type: ignore[misc]
                finally:
                    self._num_out += 1
                    self._bytes_out += num_bytes
                    self._guarded("release", item.give_back)
            else:
                self._num_notes_out += 1
                self._guarded("note", lambda note=item: self._write(note))  # type: ignore[misc]

    def _write_step(self, batch: StepBatch) -> None:
        if batch.refused is not None:
            self._losses.merge(batch.refused)
        if batch.descriptor is not None:
            self._write(batch.descriptor)
        self._tell_losses(batch)
        for health in batch.health:
            self._write(health)
        end = batch.end_step
        num_sent, num_written, lost_to = batch.num_rows, 0, "error"
        try:
            if batch.complete is not None:
                batch.complete()
            scalars = batch.prepare() if batch.prepare is not None else None
            if end is not None and scalars:
                end = msgspec.structs.replace(end, scalars={**end.scalars, **scalars})
            if end is not None and batch.was_skipped is not None and float(batch.was_skipped) != 0 and not end.is_partial:
                end = msgspec.structs.replace(end, is_skipped=True)
                batch.rows["flags"][: batch.num_rows] |= np.uint16(Flag.SKIPPED)
            num_sent = batch.num_rows if batch.per_micro_step else _fold(batch.rows, batch.num_rows)
            lost_to = "disk"
            if end is not None and self._write_whole(batch, end, num_sent):
                end = None
            else:
                num_written = self.spool.append_rows(batch.rows[:num_sent], step=batch.step)
        finally:
            if batch.vectors is not None:
                self._guarded("vectors", lambda: self._write_vectors(batch))
            if end is not None:
                self._write_end(batch.ended(end, num_written, num_sent - num_written, lost_to))

    def _write_whole(self, batch: StepBatch, end: EndStep, num_rows: int) -> bool:
        """Write rows and end of a step at once, which is the usual case; False: nothing was written, write one by one."""
        if batch.vectors is not None or self._owed:
            return False
        whole = encode_message(batch.ended(end, num_rows, 0, ""))
        return self.spool.append_step(batch.rows[:num_rows], whole, step=batch.step)

    def _write_vectors(self, batch: StepBatch) -> None:
        assert batch.vectors is not None
        vectors = batch.vectors()
        if vectors is not None:
            self.spool.append(FrameType.VECTOR, encode_message(vectors), step=batch.step)

    def _write(self, message: Message | None) -> bool:
        if message is None:
            return True
        step = getattr(message, "step", NO_STEP)
        if isinstance(message, Descriptor):
            if message.place.world_size > 1 and self._thread is not None:
                self._witness.start()
            return self.spool.describe(message)
        return self.spool.append(FRAME_TYPES[type(message)], encode_message(message), step=step)

    def _write_end(self, end: EndStep) -> None:
        """Write an end_step; one that the disk does not take is written before the next that it does."""
        self._owed.append(end)
        self._write_owed()
        if len(self._owed) > MAX_STEPS:
            gone = self._owed.popleft()
            self._losses.add(gone.step, gone.num_rows + gone.num_dropped_rows)

    def _write_owed(self) -> None:
        while self._owed:
            end = self._owed[0]
            if not self.spool.append(FrameType.END_STEP, encode_message(end), step=end.step):
                return
            self._owed.popleft()

    def _tell_losses(self, batch: StepBatch | None) -> None:
        """Say which steps were lost whole, and once the writer is no longer late, which were cut."""
        if self._losses and self._write(self._losses.as_health(self.spool.rank, "steps_dropped", "writer")):
            self._losses = Losses()
        if batch is not None and (batch.num_cut or batch.num_dropped):
            if not self._cut:
                log.warning(
                    "sentinel: rank %d: the writer thread is late by more than spool.queue_bytes (%d): finite rows are cut "
                    "from step %d on; is the disk slow, or the machine short of processors?",
                    self.spool.rank, self._queue_bytes, batch.step,
                )  # fmt: skip
            self._cut.add(batch.step, batch.num_cut + batch.num_dropped)
        elif self._cut and not self._queue and self._write(self._cut.as_health(self.spool.rank, "rows_dropped", "writer")):
            log.warning("sentinel: %s", self._cut.as_health(self.spool.rank, "rows_dropped", "writer").message)
            self._cut = Losses()

    def _beat(self) -> None:
        self._write_owed()
        heartbeat = self._position() if self._position is not None else None
        if heartbeat is not None:
            self._activity = heartbeat.activity
            self._write(heartbeat)
        for code, count in list(self._failures.items()):
            if self._write(Health(code="writer_failed", message=f"rank {self.spool.rank}: {code}", count=count)):
                self._failures[code] -= count
                if not self._failures[code]:
                    del self._failures[code]

    def _poll_control(self) -> None:
        for command in self._control.poll(self._clock.wall_ns()):
            if self._on_command is not None:
                self._write(self._on_command(command))

    def _guarded(self, where: str, work: Callable[[], object]) -> None:
        """Run work of the writer thread; what it raises is logged once, counted, and said with the next heartbeat."""
        try:
            work()
        except Exception as error:
            code = f"{where}: {type(error).__name__}: {error}"[:300]
            if code not in self._failures and len(self._failures) < MAX_NOTES:
                log.warning("sentinel: writer thread: %s", code)
            self._failures[code] = self._failures.get(code, 0) + 1


def _fold(rows: np.ndarray, num_rows: int) -> int:
    from sentinel.native import fold_rows  # the C library is loaded where it is first needed

    return int(fold_rows(rows, num_rows))


def _log_refused(reason: str) -> None:
    log.warning("sentinel: %s", reason)


def _disarm_all() -> None:
    for handover in list(_living):
        handover.disarm()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disarm_all)
