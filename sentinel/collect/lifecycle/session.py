"""One monitor's stay in a run, from attach until its last words are on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.collect.attempt import RankAttempt
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.installation import Installation
from sentinel.collect.lifecycle.farewell import farewell, raised_now
from sentinel.collect.lifecycle.fork_guard import AT_EXIT_S, Ending
from sentinel.collect.lifecycle.memory import MemoryUse
from sentinel.collect.schedule.config_edits import ConfigEdits
from sentinel.collect.step_runner import StepRunner
from sentinel.collect.writing.handover import Handover
from sentinel.messages import Bye


class MonitorSession:
    """Decides how a monitor ends, whoever asks for it: the trainer, an adapter, the process's exit, a model that is gone."""

    def __init__(
        self,
        attempt: RankAttempt,
        recorder: Recorder,
        runner: StepRunner,
        installation: Installation,
        edits: ConfigEdits,
        handover: Handover,
        memory: MemoryUse,
    ) -> None:
        self.attempt = attempt
        self.installation = installation
        self.edits = edits
        self.handover = handover
        self.on_end: list[Callable[[], None]] = []
        """Called once at the end: an adapter takes off what it put on its trainer."""
        self._recorder = recorder
        self._runner = runner
        self._memory = memory
        self.ending = Ending(self, self.close, handover.has_ended)
        recorder.keeps = self

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; in a forked child it has."""
        return self._recorder.is_alive

    @property
    def ended_steps(self) -> int:
        """Steps ended so far."""
        return self._recorder.ended_steps

    @property
    def thread_id(self) -> int:
        """The thread that trains; until it does, the one that attached."""
        return self._runner.running.thread_id

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.attempt.directory

    def disarm(self) -> None:
        """Measure nothing from now on and say nothing: in a forked child spool and steps belong to the parent."""
        self._recorder.is_alive = False

    def flush(self, timeout_s: float) -> bool:
        """Hand over what there is of the running step and wait for the disk; False when that took too long."""
        if self.is_alive:
            self._runner.end_early()
        return self.handover.flush(timeout_s)

    def end(self, reason: str) -> None:
        """End as the trainer wishes, with this reason; waits for the disk."""
        self.close(farewell(reason, raised_now() if reason == "exception" else None), AT_EXIT_S)

    def close(self, said: Bye, timeout_s: float) -> None:
        """End with these last words, once; timeout_s: longest wait for the disk."""
        if not self.is_alive:
            return
        is_between = self._runner.is_between
        try:
            if threading.get_ident() == self.thread_id:
                self._runner.end_early()
        except Exception as error:
            self._recorder.guard("close", error)
        self.disarm()
        self.edits.stop()
        self.installation.remove()
        for undo in self.on_end:
            try:
                undo()
            except Exception as error:
                self._recorder.guard("close", error)
        raised = self._runner.running.raised
        if said.reason == "exit" and raised is not None:
            said = raised  # A notebook that is run from end to end is taken down behind the cell that raised.
        said = msgspec.structs.replace(said, is_between=is_between)
        self.handover.close(said, timeout_s=timeout_s, health=self._recorder.recording.take_health())
        self._memory.close()
        self.ending.cancel()

    def __del__(self) -> None:
        # The model went out of scope, and we with it. Whoever collects garbage must not wait for a disk.
        if getattr(self, "ending", None) is not None:
            self.close(farewell("detached"), 0.0)
