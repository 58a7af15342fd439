"""What happens to a DeepSpeed run beside plain steps: told by ranks that live through it, checked by test_deepspeed.py."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..layouts.net import Net, shifted_loss, tokens_of
from .deepspeed_ranks import EVERYTHING, Job, backward, make_engine, num_collectives, weights

POISONED = 1
"""Step, counted from 0, whose loss is not a number on rank 1."""


class Breaking(nn.Module):
    """Hands its input on; its backward raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            x.register_hook(self.snap)
        return x

    def snap(self, grad: torch.Tensor) -> None:
        raise RuntimeError("the backward broke")


class Breakable(Net):
    """Its output goes through a module that may break."""

    def __init__(self) -> None:
        super().__init__()
        self.breaking = Breaking()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.breaking(super().forward(x))


def _step(engine: Any, job: Job, step: int, rank: int, world: int) -> float:
    losses = []
    for micro_step in range(job.accumulate):
        losses.append(backward(engine, job, step, micro_step, rank, world))
        engine.step()
    return float(torch.stack(losses).float().mean())


def printed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Golden: what DeepSpeed prints and writes beside each step; what the user's own loop knows of it."""
    import deepspeed

    import sentinel

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = deepspeed.utils.logger.level
    deepspeed.utils.logger.setLevel(logging.INFO)
    deepspeed.utils.logger.addHandler(handler)
    csv = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"}}
    job = Job(stage=2, accumulate=2, more=csv, num_steps=4)
    engine = make_engine(job)
    scheduler = deepspeed.runtime.lr_schedules.WarmupLR(engine.optimizer, warmup_max_lr=0.05, warmup_num_steps=5)
    engine.lr_scheduler = scheduler
    monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
    said: dict[str, Any] = {"losses": [], "norms": [], "numbers": []}
    for step in range(job.num_steps):
        said["losses"].append(_step(engine, job, step, rank, world))
        said["norms"].append(float(engine.get_global_grad_norm()))
        said["numbers"].append(int(engine.global_steps))
        monitor.log(after=float(step))
    monitor.detach()
    deepspeed.utils.logger.removeHandler(handler)
    deepspeed.utils.logger.setLevel(level)
    found = [re.search(r"step=(\d+), skipped=(\d+), lr=\[([^\]]*)\]", line) for line in lines]
    said["printed"] = [(int(m[1]), float(m[3].split(",")[0])) for m in found if m]
    return said


def overflowing(rank: int, world: int, folder: Path, stage: int, precision: str) -> dict[str, Any]:
    """One step's loss is not a number on one rank: DeepSpeed skips it."""
    import sentinel

    job = Job(stage=stage, precision=precision, num_steps=4)
    engine = make_engine(job)
    monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
    said: dict[str, Any] = {"skipped": [], "same": [], "scales": []}
    for step in range(job.num_steps):
        before = weights(engine)
        said["scales"].append(float(getattr(engine.optimizer, "loss_scale", 1.0)))
        batch = tokens_of(step).view(world, -1, tokens_of(0).shape[1])[rank]
        loss = shifted_loss(engine(batch), batch)
        engine.backward(loss * float("nan") if step == POISONED and rank == 1 else loss)
        engine.step()
        said["skipped"].append(int(engine.skipped_steps))
        said["same"].append(bool(torch.equal(before, weights(engine))))
    monitor.detach()
    return said


def autocast(rank: int, world: int, folder: Path, stage: int) -> dict[str, Any]:
    """torch's own autocast and GradScaler under DeepSpeed; one step's loss is not a number."""
    import sentinel

    amp = {"torch_autocast": {"enabled": True, "dtype": "float16", "lower_precision_safe_modules": ["torch.nn.Linear"]}}
    job = Job(stage=stage, more=amp, num_steps=3)
    engine = make_engine(job)
    monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
    for step in range(job.num_steps):
        batch = tokens_of(step).view(world, -1, tokens_of(0).shape[1])[rank]
        loss = shifted_loss(engine(batch), batch)
        engine.backward(loss * float("nan") if step == POISONED and rank == 1 else loss)
        engine.step()
    monitor.detach()
    return {}


def compiled(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The engine is compiled after attach: no hook on a module fires."""
    import sentinel

    job = Job(stage=2)
    engine = make_engine(job)
    monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
    engine.compile(backend="eager")
    for step in range(job.num_steps):
        _step(engine, job, step, rank, world)
    monitor.detach()
    return {}


def anew(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One model, two engines after each other."""
    import deepspeed

    import sentinel

    job = Job(stage=0)
    engine = make_engine(job)
    former = sentinel.attach_deepspeed(engine, EVERYTHING)
    _step(engine, job, 0, rank, world)
    optimizer = torch.optim.SGD(engine.module.parameters(), job.lr)
    engine, *_ = deepspeed.initialize(model=engine.module, optimizer=optimizer, config=job.config())
    os.environ["SENTINEL_RUN"] = "second"
    monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
    _step(engine, job, 1, rank, world)
    monitor.detach()
    os.environ["SENTINEL_RUN"] = "run"
    return {"is_alive": former.is_alive, "is_new": monitor is not former}


class Residual(nn.Module):
    """One layer of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.fc(x))


def _token_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())


def pipeline(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """DeepSpeed's own pipeline: two stages of one rank each, four micro-batches, without and with Sentinel."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import sentinel

    said: dict[str, Any] = {}
    for phase in ("bare", "watched"):
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Embedding, 11, 12), *[LayerSpec(Residual)] * 3, LayerSpec(nn.Linear, 12, 11)]
        model = PipelineModule(layers, num_stages=world, loss_fn=_token_loss, partition_method="uniform")
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
        job = Job(stage=1, accumulate=4)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=job.config())
        first = num_collectives()
        monitor = sentinel.attach_deepspeed(engine, EVERYTHING) if phase == "watched" else None
        batches = iter([(tokens_of(n)[:1], tokens_of(n)[:1]) for n in range(4 * job.num_steps)])
        losses, norms = [], []
        for _ in range(job.num_steps):
            losses.append(float(engine.train_batch(data_iter=batches)))
            norms.append(float(engine.get_global_grad_norm()))
        said[phase] = (losses, norms, weights(engine).double().sum().item(), num_collectives() - first)
        if monitor is not None:
            monitor.detach()
    return said


def evaluated(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Evaluation between micro-steps and between steps, with and without no_grad."""
    import sentinel

    job = Job(stage=3, accumulate=2)
    engine = make_engine(job)
    monitor = sentinel.attach_deepspeed(engine, {**EVERYTHING, "per_micro_step": True})
    for step in range(job.num_steps):
        for micro_step in range(job.accumulate):
            backward(engine, job, step, micro_step, rank, world)
            engine.step()
            engine.eval()
            engine(tokens_of(99))
            with torch.no_grad():
                engine(tokens_of(98))
            engine.train()
    monitor.detach()
    return {}


def resumed(rank: int, world: int, folder: Path, stage: int) -> dict[str, Any]:
    """Two steps, a checkpoint, one step more; then anew from the checkpoint, attached after and before it is loaded."""
    import sentinel

    job = Job(stage=stage)
    said: dict[str, Any] = {}
    engine = make_engine(job)
    monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
    for step in range(2):
        _step(engine, job, step, rank, world)
    engine.save_checkpoint(str(folder / "saved"), client_state={"epoch": 7})
    said["third"] = _step(engine, job, 2, rank, world)
    monitor.detach()
    file = next((folder / "saved").glob("*/*model_states.pt"))
    said["inside"] = torch.load(file, weights_only=False).get("sentinel")
    for name, attach_first in (("after", False), ("before", True)):
        os.environ["SENTINEL_RUN"] = name
        engine = make_engine(job)
        monitor = sentinel.attach_deepspeed(engine, EVERYTHING) if attach_first else None
        _, client = engine.load_checkpoint(str(folder / "saved"))
        said[f"client {name}"] = {key: client[key] for key in ("epoch", "sentinel") if key in client}
        monitor = monitor or sentinel.attach_deepspeed(engine, EVERYTHING)
        said[f"third {name}"] = _step(engine, job, 2, rank, world)
        said[f"number {name}"] = int(engine.global_steps)
        monitor.detach()
    os.environ["SENTINEL_RUN"] = "run"
    return said


def breaking(rank: int, world: int, folder: Path, where: str) -> dict[str, Any]:
    """The second step breaks, in its second backward or in the optimizer, on all ranks alike."""
    import sentinel

    job = Job(stage=1, accumulate=2, model=Breakable)
    engine = make_engine(job)
    sentinel.attach_deepspeed(engine, {"kinds": ["param", "wgrad", "activation", "dgrad"]})
    _step(engine, job, 0, rank, world)
    backward(engine, job, 1, 0, rank, world)
    engine.step()
    if where == "backward":
        engine.module.breaking.is_broken = True
    else:

        def snap(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("the optimizer broke")

        engine.optimizer.optimizer.step = snap
    try:
        backward(engine, job, 1, 1, rank, world)
        engine.step()
    except RuntimeError as error:
        # What is on the disk by now counts: a process that dies here writes nothing more.
        run = folder / "run" / "spool"
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in run.glob(f"r{rank:05d}-*/*.spool")}
        return {"raised": str(error), "sizes": sizes}
    return {"raised": ""}


def disabled(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """SENTINEL_DISABLE=1: nothing is touched."""
    import sentinel

    os.environ["SENTINEL_DISABLE"] = "1"
    try:
        job = Job(stage=2)
        engine = make_engine(job)
        before = set(engine.__dict__)
        monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules()]
        losses = [_step(engine, job, step, rank, world) for step in range(2)]
        monitor.log(loss=1.0)
        monitor.detach()
        after = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules()]
        return {
            "kind": type(monitor).__name__, "new": sorted(set(engine.__dict__) - before), "is_same": hooks == after,
            "losses": losses, "exists": (folder / "run").exists(),
        }  # fmt: skip
    finally:
        del os.environ["SENTINEL_DISABLE"]


def twice(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Attached twice, the second takes the place of the first; a broken holding is said and the run goes on as it was."""
    import sentinel

    job = Job(stage=2)
    engine = make_engine(job)
    first = num_collectives()
    bare = [_step(engine, job, step, rank, world) for step in range(2)]
    cost = num_collectives() - first
    engine = make_engine(job)
    first = num_collectives()
    former = sentinel.attach_deepspeed(engine, EVERYTHING)
    monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
    is_replaced = monitor.is_alive and not former.is_alive
    monitor.port.tensors.storage.open = None  # Whatever fails in Sentinel is told, and stops nothing.
    broken = [_step(engine, job, step, rank, world) for step in range(2)]
    health = sorted({one.code for one in monitor.recorder.recording.health})
    monitor.detach()
    return {
        "is_replaced": is_replaced, "bare": bare, "broken": broken, "health": health,
        "cost": (cost, num_collectives() - first),
    }  # fmt: skip


STORIES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "printed": (printed, ()),
    "evaluated": (evaluated, ()),
    "disabled": (disabled, ()),
    "twice": (twice, ()),
    **{f"overflow-{stage}-fp16": (overflowing, (stage, "fp16")) for stage in range(4)},
    "compiled": (compiled, ()),
    "anew": (anew, ()),
    "overflow-2-fp32": (overflowing, (2, "fp32")),
    **{f"resumed-{stage}": (resumed, (stage,)) for stage in (0, 2, 3)},
    "breaking-backward": (breaking, ("backward",)),
    "breaking-step": (breaking, ("step",)),
    # Last: DeepSpeed keeps what it was told of autocast for ever, and the groups of a pipeline.
    **{f"autocast-{stage}": (autocast, (stage,)) for stage in (0, 2)},
    "pipeline": (pipeline, ()),
}


def tell(rank: int, world: int, folder: Path, names: tuple[str, ...] = tuple(STORIES)) -> None:
    """Live through the stories one after the other, each in a folder of its own name."""
    for name in names:
        (folder / name).mkdir(exist_ok=True, mode=0o700)
        os.environ["SENTINEL_DIR"] = str(folder / name)
        story, args = STORIES[name]
        torch.manual_seed(0)
        torch.save(story(rank, world, folder / name, *args), folder / name / f"said-{rank}.pt")
