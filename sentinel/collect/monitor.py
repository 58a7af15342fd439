"""The monitor as trainers and adapters see it: each call is handed to the part that decides."""

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
from sentinel.collect.lifecycle.session import Session
from sentinel.collect.rows.live_statistics import LiveStatistics, Statistics
from sentinel.collect.rows.rank_descriptor import RankDescriptor
from sentinel.collect.rows.scalars import Scalars
from sentinel.collect.schedule.applying import Planning
from sentinel.collect.step_runner import StepRunner
from sentinel.kinds import MODULE_KINDS
from sentinel.place import Place
from sentinel.record import Kind
from sentinel.version import VERSION

log = logging.getLogger("sentinel")

ACTIVITIES = ("init", "train", "eval", "checkpoint")


class Monitor:
    """Sentinel's hand in one training process. Made by `sentinel.attach`; every method is safe to call at any time."""

    def __init__(
        self,
        session: Session,
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
        """How it ends."""
        self.runner = runner
        """Begins and ends its steps."""
        self.recorder = recorder
        """What its hooks measure with."""
        self.planning = planning
        """What is due, and which hooks that needs."""
        self.port = port
        """What adapters call besides."""
        self._descriptor = descriptor
        self._scalars = scalars
        self._gradients = gradients
        self._statistics = statistics

    @property
    def is_alive(self) -> bool:
        """Whether it still measures: not once it was detached."""
        return self.recorder.is_alive

    @property
    def current_step(self) -> int:
        """Number of the running step; between steps of the one that comes next."""
        return self.runner.count.current

    @property
    def place(self) -> Place:
        """Where this rank stands."""
        return self._descriptor.place

    @property
    def run(self) -> str:
        """The run that what is measured belongs to."""
        return self.session.attempt.run

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.session.directory

    # -- what is logged --------------------------------------------------------------------------------------------

    def log(self, **scalars: Any) -> None:
        """Note scalars of the current step: numbers, or 0-dim tensors, which are not synchronised.

        Called before the next step begins (its first training forward, or `monitor.step()`), they belong to this one.
        `sample_ids`: the samples that this rank trains on, integers or strings (a list, an array, a tensor on the host);
        each call adds to the step's. A diagnosis of `batch` names them, and `sentinel.skip_list` hands them back.
        """
        for name, value in scalars.items():
            try:
                self._scalars.note(name, value)
            except Exception as error:
                self.recorder.guard(f"log({name[:64]}=...)", error)

    def noticed(self, **scalars: Any) -> None:
        """Note scalars that an adapter saw for itself: what the trainer logs under the same name in this step wins."""
        for name, value in scalars.items():
            try:
                self._scalars.note_default(name, value)
            except Exception as error:
                self.recorder.guard(f"noticed({name[:64]}=...)", error)

    def moe_tracker(self) -> MoETracker:
        """Return an object with the methods of Megatron's MoE tracker: what it reports is logged here."""
        return MoETracker(self)

    def activity(self, name: str) -> None:
        """Tell the daemon why the run is quiet: init, train, eval or checkpoint."""
        if name in ACTIVITIES:
            self.runner.running.note_activity(name)
        else:
            message = f"activity {name!r} is none of {', '.join(ACTIVITIES)}"
            self.recorder.recording.tell("unknown_activity", message, name)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, *, is_skipped: bool | torch.Tensor | None = None) -> None:
        """End the current step here and now; from then on only this ends steps.

        is_skipped: whether the trainer left its weights alone (a tensor is not synchronised: the writer thread reads it);
        None: unless an optimizer was seen to step.
        """
        try:
            self.runner.end_explicitly(is_skipped=is_skipped)
        except Exception as error:
            self.recorder.guard("step", error)

    def set_step(self, step: int) -> None:
        """Say which number the trainer itself gives to the step that runs, or comes next where none does."""
        try:
            self._descriptor.renumber(int(step))
        except Exception as error:
            self.recorder.guard("set_step", error)

    def gradients_ready(self, params: list[torch.Tensor] | None = None) -> None:
        """Read the gradients of `params` (None: all) now: they are reduced and unscaled, and clipping comes next."""
        try:
            self._gradients.ready(params)
        except Exception as error:
            self.recorder.guard("gradients_ready", error)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Hand over what there is of the running step, as partial, and wait for the disk; False when that took too long.

        For a trainer that is about to end with an exception.
        """
        try:
            return self.session.flush(timeout_s)
        except Exception as error:
            self.recorder.guard("flush", error)
            return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed trainer needs: the number of the next step."""
        return {"version": VERSION, "step": self.runner.next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where `state_dict` was taken; call it before the first forward."""
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
        # A step that has begun counts; between steps the wish begins with the next one.
        first = self.runner.next_step
        self.planning.enable(kinds, targets, per_micro_step=per_micro_step, for_steps=for_steps, first_step=first)

    def disable(self, kinds: Iterable[str] | str | None = None, targets: Iterable[str] | str | None = None) -> None:
        """Stop measuring `kinds` (None: everything but the black box); hooks that nobody needs are removed."""
        self.planning.disable(kinds, targets)

    def gradients(self) -> dict[str, Statistics]:
        """Return `reduced` and `unreduced` weight gradients of the running step: name -> statistic -> value, this rank's.

        What is not measured in it is missing. On an accelerator this waits for the device: call it when you must know.
        """
        found = self._statistics.of((Kind.WGRAD, Kind.WGRAD_UNREDUCED))
        return {"reduced": found["wgrad"], "unreduced": found["wgrad_unreduced"]}

    def activations(self) -> dict[str, Statistics]:
        """Return `activation_in`, `activation`, `dgrad` and `dgrad_in` of the running step, as `gradients`."""
        return self._statistics.of(MODULE_KINDS)

    # -- the end ---------------------------------------------------------------------------------------------------

    def detach(self, reason: str = "detached") -> None:
        """Take every hook off, send what there is, and measure nothing more. The model is exactly as before.

        reason: `detached`, or `exception` where an adapter sees its trainer raise.
        """
        self.session.end(reason)

    def close(self) -> None:
        """Detach: under the name that `with sentinel.attach(...) as monitor:` and notebooks look for."""
        self.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach("detached" if kind is None else "exception")
