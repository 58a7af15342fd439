"""Layouts in processes of their own over gloo, watched, and what a daemon makes of them."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from sentinel.ingest.merge import ClosedStep

from ..support.closed_steps import closed_steps, statistics
from ..support.forked import CONTEXT
from ..support.ports import free_port
from .net import NUM_STEPS

KINDS = ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in", "exp_avg", "exp_avg_sq"]
EVERYTHING = {"kinds": KINDS}


@dataclasses.dataclass
class Trainer:
    """What a layout's `build` gives back: the model as its user holds it, and one step of its own loop."""

    models: list[nn.Module]
    optimizer: Any
    train_step: Callable[[int], tuple[torch.Tensor, Any]]
    """(step) -> loss, as this rank knows it (NaN: another rank's), and the norm of the whole gradient before clipping."""
    attach: Callable[..., Any] | None = None


Build = Callable[[], Trainer]


@dataclasses.dataclass(frozen=True)
class Result:
    """What one rank can tell of its training, beside its spool."""

    losses: list[float]
    grad_norms: list[float]
    weights: float
    """A number that differs when any bit of this rank's weights does."""
    num_collectives: int


@dataclasses.dataclass(frozen=True)
class Training:
    """One training of a build."""

    folder: Path
    config: Mapping[str, Any] | None = None
    """Of the monitor; None: without Sentinel."""
    modules_at: int | None = None
    """A step in which modules are measured too."""


def train_ranks(
    folder: Path,
    build: Build,
    world: int,
    *,
    config: Mapping[str, Any] | None = None,
    num_steps: int = NUM_STEPS,
    modules_at: int | None = None,
) -> list[Result]:
    """Train once with `world` processes; the rest is of `Training`. Returns what each rank says."""
    return train_in_turn([Training(folder, config, modules_at)], build, world, num_steps=num_steps)[0]


def train_in_turn(
    trainings: Sequence[Training], build: Build, world: int, *, num_steps: int = NUM_STEPS
) -> list[list[Result]]:
    """Build and train several times in the same `world` processes, one after the other. Returns what each rank says of each.

    What torch finds out about a layout's operations, which takes longer than the training, it finds out in the first.
    """
    for training in trainings:
        training.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    arguments = world, free_port(), list(trainings), build, num_steps
    ranks = [CONTEXT.Process(target=_rank, args=(rank, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(150)
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    problems = [path.read_text() for one in trainings for path in sorted(one.folder.glob("error-*.txt"))]
    assert not problems, problems[0]
    assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
    return [
        [Result(**json.loads((one.folder / f"result-{rank}.json").read_text())) for rank in range(world)]
        for one in trainings
    ]


def steps_of(build: Build, world: int = 1, **options: Any) -> list[ClosedStep]:
    """Return the steps of a training with `world` processes, whose files are gone. options: those of `train_ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        train_ranks(Path(folder), build, world, **options)
        return closed_steps(Path(folder) / "run")


def _rank(rank: int, world: int, port: int, trainings: list[Training], build: Build, num_steps: int) -> None:
    training = trainings[0]
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world)
        for training in trainings:
            os.environ.update(SENTINEL_DIR=str(training.folder), SENTINEL_RUN="run")
            result = _train(build, training, num_steps)
            (training.folder / f"result-{rank}.json").write_text(json.dumps(dataclasses.asdict(result)))
            dist.barrier()
            # Nothing may hold the model any longer: where the last reference to DistributedDataParallel goes after the
            # process group was destroyed, it joins gloo's thread and holds the lock that this thread waits for, in
            # torch 2.13.
            gc.collect()
        dist.destroy_process_group()
    except BaseException:
        (training.folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise


def _train(build: Build, training: Training, num_steps: int) -> Result:
    before = dist.group.WORLD._get_sequence_number_for_group()
    trainer = build()
    monitor = None
    if training.config is not None:
        import sentinel

        attach = trainer.attach or sentinel.attach
        model = trainer.models if len(trainer.models) > 1 else trainer.models[0]
        monitor = attach(model, trainer.optimizer, dict(training.config))
    losses, norms = [], []
    for step in range(num_steps):
        if step == training.modules_at and monitor is not None:
            monitor.enable(["activation", "activation_in", "dgrad", "dgrad_in"], for_steps=1)
        loss, norm = trainer.train_step(step)
        losses.append(float(loss))
        norms.append(float(norm))
    if monitor is not None:
        assert monitor.is_alive
        monitor.detach()
    weights = _weights_of(trainer)
    return Result(losses, norms, weights, int(dist.group.WORLD._get_sequence_number_for_group() - before))


def _weights_of(trainer: Trainer) -> float:
    found = 0.0
    for n, model in enumerate(trainer.models):
        for m, param in enumerate(model.parameters()):
            local = getattr(param, "_local_tensor", param).detach().double()
            found += float((local.flatten() * torch.arange(1, local.numel() + 1)).sum()) * (1 + n + m)
    return found


def gradient_norm(view: ClosedStep) -> float:
    """Return the norm of the whole gradient, from the merged rows."""
    norms = [one["norm"] for one in statistics(view, "wgrad").values()]
    return math.sqrt(sum(norm**2 for norm in norms))


def differences(ours: dict[str, dict[str, float]], truth: dict[str, dict[str, float]], rel: float = 2e-4) -> list[str]:
    """Return, in words, where the statistics of two layouts differ by more than rounding; missing and extra names too."""
    said = [f"missing: {name}" for name in sorted(truth.keys() - ours.keys())]
    said += [f"extra: {name}" for name in sorted(ours.keys() - truth.keys())]
    for name in sorted(truth.keys() & ours.keys()):
        for statistic, expected in truth[name].items():
            got = ours[name][statistic]
            scale = max(abs(expected), truth[name]["std"] if statistic in ("mean", "min", "max") else 0.0, 1e-7)
            slack = rel * scale + (max(1e-3, rel) if statistic == "skew" else 0.0)
            if np.isnan(expected) != np.isnan(got) or abs(got - expected) > slack:
                said.append(f"{name} {statistic}: {got!r}, expected {expected!r}")
    return said
