"""From the training thread to the thread that writes: a bounded queue of whole steps, handed over by reference.

The training thread appends to a deque and releases a lock: no copy, no wait, no system call that can stall. Everything
else (folding, checksums, the disk, the control folder) happens in the writer thread, in calls that release the GIL.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sentinel.collect.lifecycle.exit_witness import ExitWitness
from sentinel.collect.retention.spool_cap import SPOOL_BYTES, SpoolCap
from sentinel.collect.writing.step_batch import StepBatch
from sentinel.collect.writing.step_queue import QUEUE_BYTES, StepQueue
from sentinel.collect.writing.step_writer import StepWriter
from sentinel.collect.writing.writer_failures import WriterFailures
from sentinel.collect.writing.writer_schedule import CONTROL_POLL_S, HEARTBEAT_S, WriterSchedule
from sentinel.command import Command
from sentinel.messages import Ack, Bye, Descriptor, Health, Heartbeat
from sentinel.wire.clock import Clock, SystemClock
from sentinel.wire.control_folder import ControlFolder
from sentinel.wire.frame import NO_ATTEMPT, NO_STEP, Message, run_id_of
from sentinel.wire.pulse import PulseWriter
from sentinel.wire.spool import FILE_BYTES, SpoolWriter, incarnation_folder

log = logging.getLogger("sentinel")

_NS = 1_000_000_000
_armed: weakref.WeakSet[Handover] = weakref.WeakSet()


class Handover:
    """Owns the writer thread and the spool of one incarnation. Nothing here makes the training thread wait, except close."""

    def __init__(
        self,
        directory: Path,
        *,
        incarnation: bytes,
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
        folder = incarnation_folder(directory, rank, incarnation)
        self.spool = SpoolWriter(
            folder, incarnation, rank, run_id_of(run), NO_ATTEMPT if attempt is None else attempt,
            file_bytes=min(file_bytes, max_bytes // 2), closed_files=SpoolCap(folder, rank, max_bytes=max_bytes),
            clock=self._clock,
        )  # fmt: skip
        self._failures = WriterFailures(rank)
        self._queue = StepQueue(self._failures, queue_bytes)
        self._writer = StepWriter(self.spool, queue_bytes, self._failures, self._described)
        self._pulse = PulseWriter(folder)
        self._witness = ExitWitness(folder)
        self._control = ControlFolder(Path(directory) / "control", on_refused or _log_refused)
        self._position = position
        self._on_command = on_command
        self._schedule = WriterSchedule(heartbeat_s, control_poll_s)
        self._wake = threading.Lock()
        self._wake.acquire()
        self._last_step = NO_STEP
        self._bye: Bye | None = None
        self._is_alive = True
        self._thread: threading.Thread | None = None
        if descriptor is not None:
            self.post(descriptor)
        if start:
            self._thread = threading.Thread(target=self._run, name="sentinel-writer", daemon=True)
            self._thread.start()
        _armed.add(self)

    @property
    def num_cut_steps(self) -> int:
        """Steps that lost rows because the writer was late."""
        return self._queue.num_cut_steps

    def submit(self, batch: StepBatch) -> bool:
        """Hand a step over; never blocks. False when a step had to lose rows for it, counted in that step's own end."""
        if not self._is_alive:
            return False
        self._last_step = batch.step
        has_room = self._queue.put(batch)
        self._ring()
        return has_room and self._queue.make_room()

    def free_buffer(self) -> bool:
        """Have the oldest step that waits give its buffer back, its rows copied; False: none can. Training thread only."""
        return self._queue.free_buffer()

    def post(self, message: Message) -> bool:
        """Queue one small record (health, end of a step without rows, ...); never blocks. False: no room, counted."""
        if not self._is_alive:
            return False
        has_room = self._queue.put_note(message)
        self._ring()
        return has_room

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
        while not self._queue.is_done_with:
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
        if self._schedule.is_heartbeat_due(now):
            self._failures.guard("heartbeat", self._beat)
        if self._schedule.is_look_due(now):
            begun = self._clock.mono_ns()
            self._failures.guard("control", self._poll_control)
            ended = self._clock.mono_ns()
            self._schedule.note_look(ended - begun, ended)

    def _ring(self) -> None:
        # Releasing a lock nobody holds means that the writer is already notified.
        with contextlib.suppress(RuntimeError):
            self._wake.release()

    def _run(self) -> None:
        while self._bye is None:
            self._failures.guard("writer", self.turn)
            self._wake.acquire(timeout=self._schedule.pause_s(self._clock.mono_ns()))
        if self._thread is not None:  # None: disarmed in a forked child
            self._failures.guard("close", self._finish)

    def _finish(self) -> None:
        self._drain()
        self._failures.guard("owed", self._writer.write_owed)
        self._failures.guard("losses", self._writer.write_losses)
        self._failures.guard("bye", self._write_bye)
        self.spool.close()
        self._pulse.close()
        self._witness.close()

    def _write_bye(self) -> None:
        if self._bye is not None:
            self._writer.write(self._bye)

    def _drain(self) -> None:
        while self._queue:
            item = self._queue.take()
            if isinstance(item, StepBatch):
                self._schedule.note_step(self._clock.mono_ns())
                self._write_step(item)
            else:
                self._failures.guard("note", functools.partial(self._writer.write, item))

    def _write_step(self, batch: StepBatch) -> None:
        num_bytes, is_late = batch.num_bytes, bool(self._queue)
        try:
            self._failures.guard("step", lambda: self._writer.write_step(batch, is_late=is_late))
        finally:
            self._queue.written(num_bytes)
            self._failures.guard("release", batch.give_back)

    def _described(self, descriptor: Descriptor) -> None:
        if descriptor.place.world_size > 1 and self._thread is not None:
            self._witness.start()

    def _beat(self) -> None:
        self._writer.write_owed()
        heartbeat = self._position() if self._position is not None else None
        if heartbeat is not None:
            self._schedule.activity = heartbeat.activity
            self._writer.write(heartbeat)
        self._failures.report(self._writer.write)

    def _poll_control(self) -> None:
        for command in self._control.poll(self._clock.wall_ns()):
            ack = self._on_command(command) if self._on_command is not None else None
            if ack is not None:
                self._writer.write(ack)


def _log_refused(reason: str) -> None:
    log.warning("sentinel: %s", reason)


def _disarm_all() -> None:
    for handover in list(_armed):
        handover.disarm()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disarm_all)
