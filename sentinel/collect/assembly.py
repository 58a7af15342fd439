"""Makes the parts of a monitor and passes to each the parts that it uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sentinel.collect.adapters.port import AdapterPort, TrainerSteps, TrainerTensors
from sentinel.collect.attempt import NO_ATTEMPT, RankAttempt
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.gradient_watch import GradientWatch
from sentinel.collect.hooks.hook_guard import HookGuard
from sentinel.collect.hooks.loss_scale import LossScale
from sentinel.collect.hooks.parameter_watch import ParameterWatch
from sentinel.collect.hooks.parameters import WatchedParameters
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.hooks.sites import Sites
from sentinel.collect.hooks.update_watch import UpdateWatch
from sentinel.collect.hooks.weak import weakly
from sentinel.collect.installation import Installation
from sentinel.collect.kernels import choose_kernel
from sentinel.collect.lifecycle.memory import MemoryUse
from sentinel.collect.lifecycle.session import MonitorSession
from sentinel.collect.monitor import Monitor
from sentinel.collect.own_identity import own_gpu, own_labels
from sentinel.collect.parallel.locator import Locator
from sentinel.collect.parallel.pipelining import PipelineWatch
from sentinel.collect.parallel.rank_place import RankPlace
from sentinel.collect.parallel.stream_waiting import wait_clock
from sentinel.collect.parallel.topology import Topology
from sentinel.collect.probes import PROBES, Events, ProbeContext
from sentinel.collect.probes.outside import made, outside_probes
from sentinel.collect.rows.live_statistics import LiveStatistics
from sentinel.collect.rows.rank_descriptor import RankDescriptor
from sentinel.collect.rows.recording import Recording
from sentinel.collect.rows.running_step import RunningStep
from sentinel.collect.rows.scalars import Scalars
from sentinel.collect.rows.tensor_table import TensorTable
from sentinel.collect.schedule.applying import Planning
from sentinel.collect.schedule.command_inbox import CommandInbox
from sentinel.collect.schedule.config_edits import ConfigEdits
from sentinel.collect.schedule.pacing import Pacing
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.step import Boundary
from sentinel.collect.step_count import StepCount
from sentinel.collect.step_runner import StepRunner
from sentinel.collect.training_passes import TrainingPasses
from sentinel.collect.understanding import Understanding
from sentinel.collect.writing.handover import Handover
from sentinel.command import ANY_ATTEMPT
from sentinel.monitor_config import ConfigSource

log = logging.getLogger("sentinel")


def assemble(
    models: Sequence[nn.Module],
    optimizers: Sequence[Any] | Mapping[str, Any],
    source: ConfigSource,
    topology: Topology,
    attempt: RankAttempt,
    incarnation: bytes,
    *,
    grad_acc_steps: int | None,
    first_step: int,
) -> Monitor:
    """Return a monitor whose hooks are on; after an exception the models are as they were."""
    config = source.config
    probes_of_others = outside_probes(config.outside_probes)
    device = next((p.device for model in models for p in model.parameters()), torch.device("cpu"))
    chunks: list[Chunk] = []

    # What is measured with, and where this rank stands.
    count, table, scalars = StepCount(first_step), TensorTable(), Scalars()
    recording = Recording(
        choose_kernel(device), table, max_rows=config.max_rows, zero_eps=config.zero_eps, checksum=config.checksum
    )
    guard = HookGuard(recording, lambda: count.current)
    place = RankPlace(models, topology, table, recording.report, given_divisor=config.gradient_divisor)
    plan = Plan(config.measurement, source.text_hash, lambda: place.rank)
    recording.costs.is_due = plan.takes
    sites = Sites(table, recording, plan, config.site_placements)
    recorder = Recorder(recording, sites, guard)
    parameters = WatchedParameters(table, recording.report, plan)

    # What is due in a step.
    pacing = Pacing(plan, recording.report)
    events = Events(guard, recording.costs)
    inbox = CommandInbox(
        config.allow_commands, plan,
        step=lambda: count.current, rank=lambda: place.rank, acknowledge=lambda answer: handover.acknowledge(answer),
        attempt=ANY_ATTEMPT if attempt.attempt == NO_ATTEMPT else attempt.attempt,
    )  # fmt: skip
    planning = Planning(plan, inbox, pacing, sites, recording, chunks, events, place)
    descriptor = RankDescriptor(
        source, place, recording, chunks, plan, count, boundary=lambda: boundary.name, start=attempt.start,
        identity=lambda: {**topology.environment.identity, **own_labels(config), **own_gpu(models, topology.environment)},
    )  # fmt: skip

    # The step that runs, and what is watched in it.
    waits, memory = wait_clock(device, guard), MemoryUse(device)
    loss_scale = LossScale(lambda: gradients.rewritten(), guard)
    running = RunningStep(
        recorder, scalars, loss_scale, waits, memory, plan,
        gradient_divisor=place.gradient_divisor, descriptor=descriptor.news, handover=lambda: handover,
    )  # fmt: skip
    weights = ParameterWatch(parameters, chunks, plan, pacing, running, count)
    gradients = GradientWatch(
        parameters, recording, scalars, waits,
        is_wanted=lambda: running.is_measuring_gradients, before_reading=lambda: passes.optimizer_steps(),
        on_backward_ended=lambda: boundary.backward_ended(), on_nonfinite=weights.saw_nonfinite, guard=guard,
    )  # fmt: skip
    updates = UpdateWatch(running, plan, events, scalars)
    boundary = Boundary(
        gradients.ready, gradients.zeroing, guard, updates.stepped, updates.stepping,
        parameters.reopen, lambda: [one.param for one in parameters.all],
    )  # fmt: skip
    pipelines = PipelineWatch(place.note_stage, gradients.rewritten)

    # Who begins and ends steps.
    understanding = Understanding(boundary, recording.report, logs_loss=lambda: place.logs_loss)
    locator = Locator(place, recorder, parameters, pipelines, chunks, attempt)
    runner = StepRunner(count, running, recorder, boundary, locator, planning, weights, events, understanding, chunks)
    passes = TrainingPasses(
        runner, recorder, boundary, parameters, gradients, weights, events, shares_micro_steps=grad_acc_steps is not None
    )

    # What is put on the models, and what ends it.
    instruments = ProbeContext(
        recording, table, sites, plan, parameters, chunks, events, guard,
        place=lambda: place.place, step=lambda: count.current, is_measuring=lambda: running.is_measuring,
        log=scalars.note_default, count=running.count, config=config, attempt=attempt, descriptor=descriptor.make,
    )  # fmt: skip
    installation = Installation(
        chunks, recorder, passes, locator, planning, parameters, boundary, events,
        watches=(gradients.clips, pipelines, loss_scale, waits),
        probes=[*(probe(instruments) for probe in PROBES), *made(probes_of_others, instruments)],
    )  # fmt: skip
    edits = ConfigEdits(source, inbox, recording.report)
    try:
        installation.install(models, optimizers, config.blocks, first_step)
        handover = Handover(
            attempt.directory, incarnation=incarnation, run=attempt.run, attempt=attempt.attempt, rank=place.rank,
            max_bytes=config.spool.max_bytes, file_bytes=config.spool.file_bytes, queue_bytes=config.spool.queue_bytes,
            descriptor=descriptor.make(), position=weakly(runner.position), on_command=weakly(inbox.receive),
            on_refused=weakly(recording.refused),
        )  # fmt: skip
        edits.start()
    except BaseException:
        installation.remove()  # A model that cannot be watched is left as it was.
        raise
    session = MonitorSession(attempt, recorder, runner, installation, edits, handover, memory)
    log.info(
        "sentinel: run %s attempt %s rank %d: %d tensors, kernel %s, step boundary: %s",
        attempt.run, attempt.attempt, place.rank, len(parameters.all), recording.kernel.name, boundary.name,
    )  # fmt: skip
    steps, tensors = TrainerSteps(boundary, passes, chunks), TrainerTensors(parameters, recorder, chunks)
    return Monitor(
        session, runner, recorder, planning, descriptor, scalars, gradients, LiveStatistics(recording, loss_scale),
        AdapterPort(session, recorder, steps, tensors, chunks, config.name_map),
    )  # fmt: skip
