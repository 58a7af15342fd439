"""`Monitor`: the methods that trainers and adapters call, each of which passes the call to the part that carries it out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from sentinel.collect.adapters.moe_tracker import MoETracker
from sentinel.collect.adapters.port import AdapterPort
from sentinel.collect.hooks.gradient_watch import GradientWatch
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.lifecycle.session import MonitorSession
from sentinel.collect.rows.live_statistics import LiveStatistics, Statistics
from sentinel.collect.rows.rank_descriptor import RankDescriptor
from sentinel.collect.rows.scalars import Scalars
from sentinel.collect.schedule.applying import Planning
from sentinel.collect.step_runner import StepRunner
from sentinel.command import RequestAction
from sentinel.kinds import MODULE_KINDS
from sentinel.place import Place
from sentinel.record import Kind
from sentinel.version import VERSION

log = logging.getLogger("sentinel")

ACTIVITIES = ("init", "train", "eval", "checkpoint", "pause")


class Monitor:
    """What measures one training process. Made by `sentinel.attach`; every method may be called at any time.

    An error inside a method is logged and recorded, and does not reach the trainer; only a ConfigError does.
    """

    def __init__(
        self,
        session: MonitorSession,
        runner: StepRunner,
        recorder: Recorder,
        planning: Planning,
        descriptor: RankDescriptor,
        scalars: Scalars,
        gradients: GradientWatch,
        statistics: LiveStatistics,
        port: AdapterPort,
    ) -> None:
        self.session = session
        """The run, the attempt and the spool of this process, and what ends them."""
        self.runner = runner
        """Begins and ends steps; holds the number of the current one."""
        self.recorder = recorder
        """The instruments that the hooks measure with, and the guard that catches their errors."""
        self.planning = planning
        """Decides which kinds are measured at which modules, and puts on the hooks that this needs."""
        self.port = port
        """Further methods, for adapters alone."""
        self._descriptor = descriptor
        self._scalars = scalars
        self._gradients = gradients
        self._statistics = statistics

    @property
    def is_alive(self) -> bool:
        """Whether it still measures; False once it was detached."""
        return self.recorder.is_alive

    @property
    def current_step(self) -> int:
        """Number of the running step; between two steps, the number of the next one."""
        return self.runner.count.current

    @property
    def place(self) -> Place:
        """This rank's coordinates in the parallel layout, and the sizes of its axes."""
        return self._descriptor.place

    @property
    def run(self) -> str:
        """Name of the run to which the measurements belong."""
        return self.session.attempt.run

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.session.directory

    # -- what is logged --------------------------------------------------------------------------------------------

    def log(self, **scalars: Any) -> None:
        """Record scalars of the current step: numbers, or 0-dim tensors, which are not synchronised.

        Scalars logged before the next step begins (its first training forward, or `monitor.step()`) belong to this one.
        `sample_ids`: the samples that this rank trains on, integers or strings (a list, an array, a tensor on the host);
        each call adds to the step's. A diagnosis of `batch` names them, and `sentinel.skip_list` hands them back.
        """
        for name, value in scalars.items():
            try:
                self._scalars.note(name, value)
            except Exception as error:
                self.recorder.guard(f"log({name[:64]}=...)", error)

    def noticed(self, **scalars: Any) -> None:
        """Record scalars that an adapter read by itself; one that the trainer logs under the same name takes their place."""
        for name, value in scalars.items():
            try:
                self._scalars.note_default(name, value)
            except Exception as error:
                self.recorder.guard(f"noticed({name[:64]}=...)", error)

    def moe_tracker(self) -> MoETracker:
        """Return an object with the methods of Megatron's MoE tracker, which logs what it is given as scalars here."""
        return MoETracker(self)

    def activity(self, name: str) -> None:
        """Set what the trainer does from now on, one of ACTIVITIES; outside train longer silence is normal."""
        if name in ACTIVITIES:
            self.runner.running.note_activity(name)
        else:
            message = f"activity {name!r} is none of {', '.join(ACTIVITIES)}"
            self.recorder.recording.report("unknown_activity", message, name)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, *, is_skipped: bool | torch.Tensor | None = None) -> None:
        """End the current step now; after the first call only this method ends steps.

        is_skipped: whether the step left the weights unchanged (a tensor is not synchronised: the writer thread reads it);
        None: it counts as skipped unless an optimizer was seen to step.
        """
        try:
            self.runner.end_explicitly(is_skipped=is_skipped)
        except Exception as error:
            self.recorder.guard("step", error)

    def set_step(self, step: int) -> None:
        """Set the number of the running step, or of the next one between steps, to the trainer's own count."""
        try:
            self._descriptor.renumber(int(step))
        except Exception as error:
            self.recorder.guard("set_step", error)

    def gradients_ready(self, params: list[torch.Tensor] | None = None) -> None:
        """Measure the gradients of `params` (None: all) now, when they are reduced and unscaled and not clipped yet."""
        try:
            self._gradients.ready(params)
        except Exception as error:
            self.recorder.guard("gradients_ready", error)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Write the rows of the running step, as a partial one, and wait until they are on disk; False after `timeout_s`.

        For a trainer that is about to end with an exception.
        """
        try:
            return self.session.flush(timeout_s)
        except Exception as error:
            self.recorder.guard("flush", error)
            return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold for `load_state_dict`: the number of the next step."""
        return {"version": VERSION, "step": self.runner.next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the count of steps from where `state_dict` was taken; call it before the first forward."""
        self._descriptor.resume(int(state["step"]))

    # -- what is measured ------------------------------------------------------------------------------------------

    def enable(
        self,
        kinds: Iterable[str] | str,
        targets: Iterable[str] | str | None = None,
        *,
        statistics: Iterable[str] | None = None,
        per_micro_step: bool = False,
        for_steps: int | None = None,
    ) -> None:
        """Measure `kinds` at the modules that `targets` (globs) name, from the next forward on, for `for_steps` steps.

        `statistics` is accepted for symmetry with commands: a row carries all of them. Raises ConfigError on unknown kinds.
        """
        del statistics
        # A step that has begun counts as the first; between steps the next one is the first.
        first = self.runner.next_step
        self.planning.enable(kinds, targets, per_micro_step=per_micro_step, for_steps=for_steps, first_step=first)

    def disable(self, kinds: Iterable[str] | str | None = None, targets: Iterable[str] | str | None = None) -> None:
        """Stop measuring `kinds` (None: everything but the black box); hooks that are no longer needed are removed."""
        self.planning.disable(kinds, targets)

    def gradients(self) -> dict[str, Statistics]:
        """Return `reduced` and `unreduced` weight gradients of the running step: name -> statistic -> value, this rank's.

        A tensor that is not measured in this step is missing. On an accelerator this waits for the device.
        """
        found = self._statistics.of((Kind.WGRAD, Kind.WGRAD_UNREDUCED))
        return {"reduced": found["wgrad"], "unreduced": found["wgrad_unreduced"]}

    def activations(self) -> dict[str, Statistics]:
        """Return `activation_in`, `activation`, `dgrad` and `dgrad_in` of the running step, as `gradients`."""
        return self._statistics.of(MODULE_KINDS)

    # -- what the trainer is asked for -----------------------------------------------------------------------------

    def requests(self) -> list[RequestAction]:
        """Return what this trainer is asked for now: `checkpoint`, `skip_batches` or `pause`; each once. Often nothing.

        Call it between two steps, on every rank, every step or every few. Every rank has a request ready at the same step;
        where ranks must agree for certain (a checkpoint that all of them write), hand rank 0's list to the others:
        requests are plain values that `broadcast_object_list` takes. Answer each with `answer`.
        """
        try:
            taken = self.planning.inbox.requests.take()
            if any(request.action == "pause" for request in taken):
                self.activity("pause")
            return taken
        except Exception as error:
            self.recorder.guard("requests", error)
            return []

    def answer(self, request: RequestAction, *, is_done: bool = True, why: str = "") -> None:
        """Say that a request is done, or that it is refused, and why: people and the daemon's audit read it."""
        self.planning.inbox.requests.answer(request, is_done=is_done, why=why)

    def is_open(self, request: RequestAction) -> bool:
        """Return whether a request still stands: a `pause` is over when it was withdrawn, and after its `for_s` seconds."""
        return self.planning.inbox.requests.is_open(request)

    # -- the end ---------------------------------------------------------------------------------------------------

    def detach(self, reason: str = "detached") -> None:
        """Remove every hook, write the remaining rows, and measure nothing more. The model is exactly as before `attach`.

        reason: `detached`, or `exception` where an adapter sees its trainer raise.
        """
        self.session.end(reason)

    def close(self) -> None:
        """Do what `detach` does, under the name that Python gives to what has an end (`contextlib.closing`)."""
        self.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach("detached" if kind is None else "exception")
