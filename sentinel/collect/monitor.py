"""The monitor: composes boundary, taps, gradients and hand-over of one rank. What each decides, it decides itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.adapters.moe_tracker import MoETracker
from sentinel.collect.attempt import NO_ATTEMPT, RankAttempt
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.clipping import ClipWatch
from sentinel.collect.hooks.failures import describe_failure
from sentinel.collect.hooks.gradient_watch import GradientWatch
from sentinel.collect.hooks.gradients import REFRESH_STEPS, WatchedParameters
from sentinel.collect.hooks.loss_scale import LossScale
from sentinel.collect.hooks.module_tap import graph_task
from sentinel.collect.hooks.sites import Sites
from sentinel.collect.hooks.structure import read_structure, unwrap
from sentinel.collect.hooks.weak import weakly
from sentinel.collect.kernels import choose_kernel
from sentinel.collect.lifecycle.farewell import farewell, raised_now
from sentinel.collect.lifecycle.fork_guard import AT_EXIT_S, Ending
from sentinel.collect.lifecycle.memory import MemoryUse
from sentinel.collect.parallel.pipelining import PipelineWatch
from sentinel.collect.parallel.topology import Topology
from sentinel.collect.parallel.waiting import WaitClock
from sentinel.collect.probes import PROBES, Events, ProbeContext
from sentinel.collect.rows.live_statistics import Statistics, current_statistics
from sentinel.collect.rows.rank_descriptor import RankDescriptor
from sentinel.collect.rows.recording import Recording
from sentinel.collect.rows.running_step import RunningStep
from sentinel.collect.rows.scalars import Scalars
from sentinel.collect.rows.tensor_table import TensorTable
from sentinel.collect.schedule.applying import Planning
from sentinel.collect.schedule.command_inbox import Orders
from sentinel.collect.schedule.config_edits import ConfigEdits
from sentinel.collect.schedule.costs import OWN
from sentinel.collect.schedule.pacing import Pacing
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.step import Boundary
from sentinel.collect.understanding import Understanding
from sentinel.collect.writing.handover import Handover
from sentinel.command import ANY_ATTEMPT
from sentinel.kinds import MODULE_KINDS
from sentinel.messages import Ack, Bye, Descriptor, Heartbeat
from sentinel.monitor_config import ConfigSource
from sentinel.place import Place
from sentinel.record import Flag, Kind
from sentinel.version import VERSION

log = logging.getLogger("sentinel")

ACTIVITIES = ("init", "train", "eval", "checkpoint")


class Monitor:
    """Sentinel's hand in one training process. Made by `sentinel.attach`; every method is safe to call at any time."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any] | Mapping[str, Any],
        source: ConfigSource,
        topology: Topology,
        attempt: RankAttempt,
        life: bytes,
        *,
        grad_acc_steps: int | None,
        first_step: int,
    ) -> None:
        self.config = config = source.config
        self.current_step = first_step
        self.is_alive = True
        self.is_paused = False
        """Forwards are nobody's steps now: an adapter's trainer tries itself out (a dry run)."""
        self._attempt = attempt
        self._grad_acc_steps = grad_acc_steps
        self._first_step = first_step
        self._activity = "init"
        """Told since the last step ended, train left out."""
        self._begun_steps = 0
        self.ended_steps = 0
        self._is_seen = False
        self._scalars = Scalars()
        self._graph_task = -1
        self._mark = (0, 0)
        self._table = TensorTable()
        device = next((p.device for model in models for p in model.parameters()), torch.device("cpu"))
        self.recording = Recording(
            choose_kernel(device), self._table,
            max_rows=config.max_rows, zero_eps=config.zero_eps, checksum=config.checksum,
        )  # fmt: skip
        self._introduction = RankDescriptor(models, source, topology, self._table, self.recording.tell, attempt.start)
        self.plan = Plan(config.measurement, source.text_hash, lambda: self.place.rank)
        self.sites = Sites(self._table, self.recording, self.plan, config.site_placements)
        self.parameters = WatchedParameters(self._table, self.recording.tell, self.plan)
        self.orders = Orders(config.allow_commands, self, ANY_ATTEMPT if attempt.attempt == NO_ATTEMPT else attempt.attempt)
        self._edits = ConfigEdits(source, self.orders, self, self.recording.tell)
        self._waits = WaitClock(is_blind=device.type != "cpu")
        self._gradients = GradientWatch(
            self.parameters, self.recording, self._scalars, self._waits,
            is_wanted=self._wants_gradients, before_reading=self._step_without_forward,
            on_backward_ended=lambda: self.boundary.backward_ended(), on_nonfinite=self._take_in_weights, guard=self.guard,
        )  # fmt: skip
        self._costs = self.recording.costs
        self._costs.is_due = self.plan.takes
        self._pacing = Pacing(self.plan, self.recording.tell)
        self._events = Events(self.guard, self._costs)
        self.boundary = Boundary(
            self._gradients.ready, self._gradients.doomed, self.guard, self._optimizer_stepped, self._optimizer_steps,
            self.parameters.reopen, lambda: [one.param for one in self.parameters.all],
        )  # fmt: skip
        self._pipeline_watch = PipelineWatch(self._introduction.note_stage, self._gradients.rewritten)
        self._loss_scale = LossScale(self._gradients.rewritten, self.guard)
        self._understanding = Understanding(
            self.boundary, self.recording.tell, is_speaker=lambda: self._introduction.is_speaker
        )
        self._memory = MemoryUse(device)
        self._running = RunningStep(
            self.recording, self._scalars, self._loss_scale, self._waits, self._memory, self._introduction.gradient_divisor
        )
        self.chunks: list[Chunk] = []
        self._planning = Planning(
            self.plan, self.orders, self.sites, self._table, self.chunks, self._events,
            place=lambda: self.place, tell=self.recording.tell,
        )  # fmt: skip
        self._probes = self._make_probes()
        self.on_end: list[Callable[[], None]] = []
        """Called once when this life ends: an adapter takes off what it put on its trainer."""
        try:
            self._install(models, optimizers)
            self._handover = self._begin_life(attempt, life)
            self._edits.start()
        except BaseException:
            self._uninstall()  # A model that cannot be watched is left as it was.
            raise
        self._ending = Ending(self, self._close, self._handover.has_ended, threading.get_ident())
        log.info(
            "sentinel: run %s attempt %s rank %d: %d tensors, kernel %s, step boundary: %s",
            attempt.run, attempt.attempt, self.place.rank, len(self.parameters.all), self.recording.kernel.name,
            self.boundary.name,
        )  # fmt: skip

    def _install(self, models: Sequence[nn.Module], optimizers: Sequence[Any] | Mapping[str, Any]) -> None:
        """Find out where this rank stands, and put every hook on."""
        self._locate()
        for position, model in enumerate(models):
            root = unwrap(model)
            vpp_stage = self._introduction.topology.vpp_stage(model, position)
            chunk = Chunk(self, root, read_structure(root, self.config.blocks), vpp_stage, 0)
            self.chunks.append(chunk)
            chunk.install()
        self._introduction.set_depths(self.chunks)
        self._planning.foresee(self.current_step)
        self.parameters.refresh(self.chunks)
        zeroed: dict[int, nn.Module] = {id(m): m for model in models for m in (model, unwrap(model))}
        self.boundary.watch(optimizers, list(zeroed.values()))
        if not optimizers:
            self.boundary.hooks.adopt(one.param for one in self.parameters.all)
        for watch in self._watches:
            watch.install()

    def _make_probes(self) -> list[object]:
        context = ProbeContext(
            self.recording, self._table, self.sites, self.plan, self.parameters, self.chunks, self._events, self.guard,
            place=lambda: self.place, step=lambda: self.current_step, is_measuring=lambda: self._is_measuring,
            count=self._running.count, config=self.config, attempt=self._attempt, descriptor=self._descriptor,
        )  # fmt: skip
        return [probe(context) for probe in PROBES]

    def _begin_life(self, attempt: RankAttempt, life: bytes) -> Handover:
        spool = self.config.spool
        return Handover(
            attempt.directory, life=life, run=attempt.run, attempt=attempt.attempt, rank=self.place.rank,
            max_bytes=spool.max_bytes, file_bytes=spool.file_bytes, queue_bytes=spool.queue_bytes,
            descriptor=self._descriptor(), position=weakly(self._position), on_command=weakly(self.orders.receive),
            on_refused=weakly(self.recording.refused),
        )  # fmt: skip

    @property
    def _watches(self) -> tuple[ClipWatch | PipelineWatch | LossScale | WaitClock, ...]:
        """What is replaced in torch while a monitor lives."""
        return self._gradients.clips, self._pipeline_watch, self._loss_scale, self._waits

    def _uninstall(self) -> None:
        self.boundary.hooks.remove()
        self._events.removed()
        for watch in self._watches:
            watch.remove()
        for chunk in self.chunks:
            chunk.remove()

    @property
    def place(self) -> Place:
        """Where this rank stands."""
        return self._introduction.place

    @property
    def run(self) -> str:
        """The run that this life belongs to."""
        return self._attempt.run

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._attempt.directory

    # -- what trainers call ----------------------------------------------------------------------------------------

    def log(self, **scalars: Any) -> None:
        """Note scalars of the current step: numbers, or 0-dim tensors, which are not synchronised.

        Called before the next step begins (its first training forward, or `monitor.step()`), they belong to this one.
        `sample_ids`: the samples that this rank trains on, integers or strings (a list, an array, a tensor on the host);
        each call adds to the step's. A verdict of `batch` names them, and `sentinel.skip_list` hands them back.
        """
        for name, value in scalars.items():
            try:
                self._scalars.note(name, value)
            except Exception as error:
                self.guard(f"log({name[:64]}=...)", error)

    def noticed(self, **scalars: Any) -> None:
        """Note scalars that an adapter saw for itself: what the trainer logs under the same name in this step wins."""
        for name, value in scalars.items():
            try:
                self._scalars.note_default(name, value)
            except Exception as error:
                self.guard(f"noticed({name[:64]}=...)", error)

    def moe_tracker(self) -> MoETracker:
        """Return an object with the methods of Megatron's MoE tracker: what it reports is logged here."""
        return MoETracker(self)

    def step(self, *, is_skipped: bool | torch.Tensor | None = None) -> None:
        """End the current step here and now; from then on only this ends steps.

        is_skipped: whether the trainer left its weights alone (a tensor is not synchronised: the writer thread reads it);
        None: unless an optimizer was seen to step.
        """
        try:
            if not self.boundary.is_explicit:
                self.boundary.is_explicit = True
                log.info("sentinel: step boundary: %s", self.boundary.name)
            self._end_step(is_skipped=is_skipped)
        except Exception as error:
            self.guard("step", error)

    def set_step(self, step: int) -> None:
        """Say which number the trainer itself gives to the step that runs, or comes next where none does."""
        try:
            if self._begun_steps == 0:
                self._first_step = int(step)
                self._table.is_changed = True
            self.current_step = int(step)
        except Exception as error:
            self.guard("set_step", error)

    def gradients_ready(self, params: list[torch.Tensor] | None = None) -> None:
        """Read the gradients of `params` (None: all) now: they are reduced and unscaled, and clipping comes next."""
        try:
            self._gradients.ready(params)
        except Exception as error:
            self.guard("gradients_ready", error)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Hand over what there is of the running step, as partial, and wait for the disk; False when that took too long.

        For a trainer that is about to end with an exception.
        """
        try:
            if self.is_alive and self._running.is_begun:
                self._end_step(is_partial=not self.boundary.is_over)
            return self._handover.flush(timeout_s)
        except Exception as error:
            self.guard("flush", error)
            return False

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
        first = self.current_step + (1 if self.boundary.is_over else 0)
        self._planning.enable(kinds, targets, per_micro_step=per_micro_step, for_steps=for_steps, first_step=first)

    def disable(self, kinds: Iterable[str] | str | None = None, targets: Iterable[str] | str | None = None) -> None:
        """Stop measuring `kinds` (None: everything but the black box); hooks that nobody needs are removed."""
        self._planning.disable(kinds, targets)

    def gradients(self) -> dict[str, Statistics]:
        """Return `reduced` and `unreduced` weight gradients of the running step: name -> statistic -> value, this rank's.

        What is not measured in it is missing. On an accelerator this waits for the device: call it when you must know.
        """
        found = current_statistics(self.recording, self._loss_scale, (Kind.WGRAD, Kind.WGRAD_UNREDUCED))
        return {"reduced": found["wgrad"], "unreduced": found["wgrad_unreduced"]}

    def activations(self) -> dict[str, Statistics]:
        """Return `activation_in`, `activation`, `dgrad` and `dgrad_in` of the running step, as `gradients`."""
        return current_statistics(self.recording, self._loss_scale, MODULE_KINDS)

    def activity(self, name: str) -> None:
        """Tell the daemon why the run is quiet: init, train, eval or checkpoint."""
        if name not in ACTIVITIES:
            self.recording.tell("unknown_activity", f"activity {name!r} is none of {', '.join(ACTIVITIES)}", name)
            return
        self._activity = name
        self._running.note_activity(name)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed trainer needs: the number of the next step."""
        return {"version": VERSION, "step": self.current_step + (1 if self.boundary.is_over else 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where `state_dict` was taken; call it before the first forward."""
        self.current_step = self._first_step = self._introduction.resume(int(state["step"]))

    def detach(self, reason: str = "detached") -> None:
        """Take every hook off, send what there is, end this life. The model is exactly as before.

        reason: `detached`, or `exception` where an adapter sees its trainer raise.
        """
        self._close(farewell(reason, raised_now() if reason == "exception" else None), AT_EXIT_S)

    def close(self) -> None:
        """Detach: under the name that `with sentinel.attach(...) as monitor:` and notebooks look for."""
        self.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach("detached" if kind is None else "exception")

    def __del__(self) -> None:
        # The model went out of scope, and we with it. Whoever collects garbage must not wait for a disk.
        if getattr(self, "_ending", None) is not None:
            self._close(farewell("detached"), 0.0)

    # -- what hooks and watchers call (the Recorder of taps.py) ----------------------------------------------------

    def before_forward(self, chunk: Chunk) -> None:
        """A training forward begins: end the step that is over, begin the new one."""
        if self.boundary.is_dirty and self.parameters.are_thrown_away():
            self.boundary.thrown_away()
        if self.boundary.is_over and not self.boundary.is_turn_of_idle(chunk.root):
            self._end_step()
        if not self._running.is_begun:
            self._begin_step()
        self._is_seen = True
        share = self._grad_acc_steps is not None and chunk.num_forwards and not chunk.had_backward
        chunk.micro_step = max(0, chunk.num_forwards - 1) if share else chunk.num_forwards
        self._mark = (self.recording.rows.num_rows, self.recording.call_id)

    def after_forward(self, chunk: Chunk) -> None:
        """A training forward ended well: it counts."""
        chunk.num_forwards = chunk.micro_step + 1
        chunk.had_backward = False

    def forward_failed(self, chunk: Chunk) -> None:
        """A training forward raised: what it showed is forgotten, it may be tried again."""
        self.recording.rewind(*self._mark)
        self._events.rewound(chunk)

    def after_backward_hook(self, chunk: Chunk) -> None:
        """A gradient arrived: a backward runs; at its end note which gradients were written how often."""
        chunk.had_backward = True
        task = graph_task()
        if task == self._graph_task and task != -1:
            return
        self._graph_task = task
        self.boundary.mark_backward()
        if task != -1:
            self._gradients.backward_began()

    def keep_until_step_ends(self, handle: RemovableHandle) -> None:
        """A hook on a leaf that must not outlive the step, whether it fires or not."""
        self._running.keep(handle)

    def guard(self, site: str, error: Exception, *, probe: str = "", given: Any = None, lost: str = "") -> None:
        """The one place where an exception of a hook ends: counted, logged once per site, shipped."""
        message = describe_failure(site, error, probe=probe, given=given, lost=lost)
        named = f"{site}:{probe}" if probe and probe != site else site
        self.recording.tell("hook_failed", message, named, self.current_step)
        if self.recording.at is not None:
            self.recording.at.flags |= int(Flag.DEGRADED)

    @property
    def _is_measuring(self) -> bool:
        return self.is_alive and self._running.is_begun

    def _wants_gradients(self) -> bool:
        return self._is_measuring and self.plan.takes(Kind.WGRAD)

    def _optimizer_steps(self, optimizer: Any) -> None:
        if self._is_measuring and self.plan.is_due:
            self._events.updating(optimizer)

    def _optimizer_stepped(self, optimizer: Any) -> None:
        if not self._is_measuring:
            return
        self._scalars.note_rates(optimizer)
        if self.plan.is_due:
            self._events.updated(optimizer)

    def _step_without_forward(self) -> None:
        """An optimizer steps although no forward was seen: the hooks are compiled away, or on another copy."""
        if self._is_seen or self.is_paused or not self.is_alive:
            if self.plan.left_out and self.recording.has_nonfinite:
                self._take_in_weights()
            return
        if self._running.is_begun and self.boundary.is_over:
            self._end_step()
        if not self._running.is_begun:
            self._begin_step()
            self.recording.tell(
                "blind_forward",
                "an optimizer steps, but no training forward of the attached model was seen: was it compiled or copied "
                "after attach? Parameters and gradients are measured, the black box is blind; attach to what is called",
            )

    def _take_in_weights(self) -> None:
        """The running step holds a NaN or an infinity: measure its weights and gradients, and whole steps from now on."""
        self._pacing.saw_nonfinite(self.current_step)
        lacks_parameters = Kind.PARAM in self.plan.left_out
        if self._is_measuring and self.plan.take_in((Kind.PARAM, Kind.WGRAD)) and lacks_parameters:
            self._measure_parameters()

    # -- steps -----------------------------------------------------------------------------------------------------

    def acknowledge(self, ack: Ack) -> None:
        """Send the answer to a command."""
        self._handover.acknowledge(ack)

    def _begin_step(self) -> None:
        if self._begun_steps == 0:
            # Pipelines, schedules and meshes exist by the first forward, if ever.
            self._locate()
            self._introduction.tell_reading(self.chunks)
        self._costs.begin(self.current_step)
        former = self._costs.turn_to(OWN)
        self._pacing.begin(self.current_step, self._costs.clock())
        self._running.begin()
        self._activity, self._ending.thread_id = "train", threading.get_ident()
        has_changed = self._planning.begin(self.current_step)
        self.parameters.begin_step()
        if self.plan.is_due:
            if has_changed or self._begun_steps % REFRESH_STEPS == 0 or not self.parameters.all:
                self.parameters.refresh(self.chunks)
            if self.plan.takes(Kind.PARAM):
                self._measure_parameters()
        if self._events.is_wide:
            self._events.narrow(self.plan.wants)
        self._events.begun()
        self._begun_steps += 1
        self._costs.turn_to(former)

    def _measure_parameters(self) -> None:
        former = self._costs.turn_to(Kind.PARAM)
        entries, tensors = self.parameters.measurable(self.parameters.all)
        self.recording.observe_all(entries, tensors, [0] * len(entries))
        self._running.count({"param": len(entries)})
        self._costs.turn_to(former)

    def _end_step(self, *, is_partial: bool = False, is_skipped: bool | torch.Tensor | None = None) -> None:
        """Hand the step over to the writer and begin counting the next."""
        if self._running.is_empty:
            return
        self._costs.turn_to(OWN)
        self._events.ending()
        was_skipped = is_skipped if isinstance(is_skipped, torch.Tensor) else None
        if is_skipped is None:
            is_skipped = self.boundary.was_skipped and any(chunk.num_forwards for chunk in self.chunks)
            was_skipped = self.boundary.found_inf
        if not is_partial:
            self._understanding.step_ends(
                logged=self._scalars.names, is_skipped=is_skipped is True, is_scaled=self._loss_scale.value is not None
            )
        self._running.due["wgrad"] = len(self.parameters.read)
        descriptor = self._descriptor() if self._table.is_news else None
        self._table.is_told()
        self._running.hand_over(
            self._handover, self.current_step,
            is_skipped=isinstance(is_skipped, bool) and is_skipped and not is_partial, was_skipped=was_skipped,
            is_partial=is_partial, num_micro_steps=max((chunk.num_forwards for chunk in self.chunks), default=0),
            per_micro_step=self.plan.per_micro_step, descriptor=descriptor,
            left_out=tuple(sorted(kind.label for kind in self.plan.left_out)),
        )  # fmt: skip
        for chunk in self.chunks:
            chunk.num_forwards, chunk.had_backward = 0, False
        self.boundary.close()
        self._pacing.note(self._costs)
        self.current_step += 1
        self.ended_steps += 1

    # -- where and what --------------------------------------------------------------------------------------------

    def _locate(self) -> None:
        """Find out where this rank stands, as far as that exists by now."""
        try:
            self._tell_apart()
            if self._pipeline_watch.install() and self._pipeline_watch.problem:
                self.recording.tell("unknown_torch", self._pipeline_watch.problem)
            self._introduction.locate()
            self.sites.place = self.place
            self.parameters.locate(self.place)
            if self.chunks and self._introduction.set_depths(self.chunks):
                self.parameters.forget()  # Their entries carry the number of their chunk.
        except Exception as error:
            self.guard("topology", error)

    def _tell_apart(self) -> None:
        """Say once that this rank could not agree with the others on a run, and how it can."""
        if self._attempt.is_alone and self.place.world_size > 1:
            self.recording.tell(
                "ranks_apart",
                f"rank {self.place.rank} of {self.place.world_size} attached before init_process_group, and nothing says "
                f"which run the ranks share: it is a run of its own ({self.run}), and copies of weights are not compared; "
                "attach after init_process_group, or give all ranks one name (SENTINEL_RUN, or run: in the config)",
            )

    def _descriptor(self) -> Descriptor:
        return self._introduction.descriptor(
            self.chunks,
            self.plan,
            kernel=self.recording.kernel.name,
            boundary=self.boundary.name,
            first_step=self._first_step,
        )

    def _position(self) -> Heartbeat:
        """Where this rank stands, asked by the writer thread."""
        num_forwards = max((chunk.num_forwards for chunk in self.chunks), default=0)
        return self._running.position(self.current_step, self._activity, num_forwards)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _close(self, said: Bye, timeout_s: float) -> None:
        if not self.is_alive:
            return
        is_between = not self._running.is_begun or self.boundary.is_over
        try:
            if self._running.is_begun and threading.get_ident() == self._ending.thread_id:
                self._end_step(is_partial=not self.boundary.is_over)
        except Exception as error:
            self.guard("close", error)
        self.is_alive = False
        self._edits.stop()
        self._uninstall()
        for undo in self.on_end:
            try:
                undo()
            except Exception as error:
                self.guard("close", error)
        if said.reason == "exit" and self._running.raised is not None:
            said = self._running.raised  # A notebook that is run from end to end is taken down behind the cell that raised.
        said = msgspec.structs.replace(said, is_between=is_between)
        self._handover.close(said, timeout_s=timeout_s, health=self.recording.take_health())
        self._memory.close()
        self._ending.cancel()
