"""DeepSpeed engines in gloo processes of their own: trained bare, watched, and once more to note the true gradients."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..layouts.net import BATCH, Net, shifted_loss, tokens_of
from ..support.ports import free_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "deepspeed", "sentinel.collect.attach"])

EVERYTHING = {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As the layouts' own, with a mask that half precision holds."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -1e4).softmax(-1) @ v


def plain() -> nn.Module:
    """The layouts' model."""
    return Net(attend=attend)


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks train."""

    stage: int = 0
    precision: str = "fp32"
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keys of `zero_optimization`."""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keys of the DeepSpeed configuration."""
    num_steps: int = 3
    accumulate: int = 1
    model: Callable[[], nn.Module] = plain
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    clip: float = 0.5
    lr: float = 0.05
    torch_style: bool = False
    """`loss.backward()` and not `engine.backward(loss)`."""
    has_truth: bool = True
    """DeepSpeed can gather its own gradients: not in round robin, where its map of them is wrong."""
    is_plain: bool = True
    """The same parameters are trained on the same data in the same way as in one plain process."""

    def config(self) -> dict[str, Any]:
        """Return the configuration DeepSpeed gets."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": self.clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1,
            "zero_optimization": {
                "stage": self.stage, "reduce_bucket_size": 500, "allgather_bucket_size": 500,
                **({"stage3_param_persistence_threshold": 30} if self.stage == 3 else {}), **self.zero,
            },
        }  # fmt: skip
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        elif self.precision == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 100, "hysteresis": 1}
        return {**config, **self.more}


def tied() -> nn.Module:
    """Embedding and head are one parameter."""
    return Net(attend=attend, tied=True)


def frozen() -> nn.Module:
    """Embedding and one block are not trained."""
    model = plain()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("emb.", "blocks.1.")))
    return model


class Checkpointed(Net):
    """Every block under DeepSpeed's own activation checkpointing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

        x = self.emb(x)
        for block in self.blocks.values():
            x = checkpoint(block, x)
        return self.scale * self.head(self.norm(x))


def checkpointed() -> nn.Module:
    return Checkpointed(attend=attend)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest learns slowly."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "lr": 0.01},
    ]


def tiny_group(model: nn.Module) -> list[dict[str, Any]]:
    """A group of one element: the other rank holds padding alone."""
    params = dict(model.named_parameters())
    return [{"params": [params.pop("scale")]}, {"params": list(params.values())}]


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}

JOBS: dict[str, Job] = {
    **{f"zero{stage}-{precision}": Job(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")},
    **{f"zero{stage}-fp16": Job(stage, "fp16", num_steps=2) for stage in (0, 2, 3)},
    "zero1-loose-torch-style": Job(1, zero={"contiguous_gradients": False}, accumulate=2, torch_style=True, num_steps=2),
    "zero1-round-robin": Job(1, zero={"round_robin_gradients": True}, has_truth=False, num_steps=2),
    "zero1-bf16-in-fp32": Job(1, "bf16", accumulate=2, more=IN_FP32, num_steps=2),
    "zero1-tiny-group": Job(1, groups=tiny_group, num_steps=2),
    "zero2-loose-overlap": Job(
        2, zero={"contiguous_gradients": False, "overlap_comm": True, "reduce_scatter": False}, num_steps=2
    ),
    "zero2-bf16-in-fp32": Job(2, "bf16", accumulate=2, more=IN_FP32, num_steps=2),
    "zero2-offload": Job(2, "bf16", zero=OFFLOAD, accumulate=2, num_steps=2),
    "zero2-accumulate-groups": Job(2, groups=two_groups, accumulate=2, is_plain=False, num_steps=2),
    "zero2-tied-aligned": Job(2, model=tied, zero={"parameter_alignment": True}, is_plain=False, num_steps=2),
    "zero2-frozen": Job(2, model=frozen, is_plain=False, num_steps=2),
    "zero2-checkpointing": Job(2, model=checkpointed, num_steps=2),
    "zero3-loose-all-reduce": Job(
        3, zero={"contiguous_gradients": False, "reduce_scatter": False, "overlap_comm": True}, num_steps=2
    ),
    "zero3-offload": Job(3, "bf16", zero={**OFFLOAD, "offload_param": {"device": "cpu"}}, accumulate=2, num_steps=2),
    "zero3-small-groups": Job(3, zero={"sub_group_size": 100}, groups=two_groups, accumulate=2, is_plain=False, num_steps=2),
    "zero3-tied-all-kept": Job(
        3, model=tied, zero={"stage3_param_persistence_threshold": 100_000}, is_plain=False, num_steps=2
    ),
    "zero3-frozen": Job(3, model=frozen, is_plain=False, num_steps=2),
    "zero3-checkpointing": Job(3, model=checkpointed, num_steps=2),
}


def make_engine(job: Job) -> Any:
    """Return a fresh engine on the same weights every time."""
    import deepspeed

    model = job.model()
    params = job.groups(model) if job.groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, job.lr, momentum=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=job.config())
    return engine


def backward(engine: Any, job: Job, step: int, micro_step: int, rank: int, world: int) -> torch.Tensor:
    """Run forward and backward of one micro-batch; return the loss."""
    batch = tokens_of(step).view(job.accumulate, world, BATCH // job.accumulate // world, -1)[micro_step, rank]
    loss = shifted_loss(engine(batch), batch)
    if job.torch_style:
        engine.scale(loss).backward() if job.precision == "fp16" else loss.backward()
    else:
        engine.backward(loss)
    return loss.detach()


def weights(engine: Any) -> torch.Tensor:
    """Return every bit that this rank holds."""
    held = []
    for p in engine.module.parameters():
        if not hasattr(p, "ds_tensor"):
            held.append(p.detach().flatten().float())
            continue
        first = engine.global_rank * p.ds_tensor.ds_numel  # Behind the parameter's end lies padding that nobody wrote.
        held.append(p.ds_tensor.detach().float()[: max(0, p.ds_numel - first)])
    return torch.cat(held)


def full_params(engine: Any) -> dict[str, torch.Tensor]:
    """Return name -> the whole parameter, float64. A collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=engine.zero_optimization_stage() == 3):
        return {name: p.detach().double().clone() for name, p in engine.module.named_parameters()}


def full_grads(engine: Any) -> dict[str, torch.Tensor]:
    """Return name -> the whole reduced gradient without the loss scale, float64: DeepSpeed's own word. A collective."""
    from deepspeed.utils import safe_get_full_grad

    # Without ZeRO this DeepSpeed divides fp16 gradients by a loss scale that it never multiplied the loss by.
    scale = float(getattr(engine.optimizer, "loss_scale", 1.0)) if engine.zero_optimization_stage() else 1.0
    grads = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    return {name: g.detach().double().clone() / scale for name, g in grads.items() if g is not None}


def num_collectives() -> int:
    """Return how many this process has taken part in, over all its groups: DeepSpeed makes its own."""
    import torch.distributed as dist

    return sum(int(group._get_sequence_number_for_group()) for group in dist.distributed_c10d._world.pg_map)


def train_engine(rank: int, world: int, job: Job, phase: str) -> dict[str, Any]:
    """Train once; return what a rank can tell."""
    torch.manual_seed(0)
    engine = make_engine(job)
    first = num_collectives()
    monitor = None
    if phase == "watched":
        import sentinel

        monitor = sentinel.attach_deepspeed(engine, EVERYTHING)
    said: dict[str, Any] = {"losses": [], "norms": [], "grads": [], "params": []}
    for step in range(job.num_steps):
        if phase == "truth":
            said["params"].append(full_params(engine))
        losses = []
        for micro_step in range(job.accumulate):
            losses.append(backward(engine, job, step, micro_step, rank, world))
            is_last = micro_step == job.accumulate - 1
            if phase == "truth" and is_last:
                said["grads"].append(full_grads(engine))
            engine.step()
        said["losses"].append(float(torch.stack(losses).float().mean()))
        norm = engine.get_global_grad_norm()
        said["norms"].append(None if norm is None else float(norm))
    said["weights"] = weights(engine)
    said["collectives"] = num_collectives() - first
    if monitor is not None:
        assert monitor.is_alive
        said["health"] = [f"{one.code}: {one.message}" for one in monitor.recorder.recording.health]
        monitor.detach()
        wrapped = ("step", "backward", "_take_model_step", "save_checkpoint", "load_checkpoint")
        assert not [name for name in wrapped if name in engine.__dict__]
    engine.destroy()
    return said


def phases(rank: int, world: int, folder: Path, job: Job, names: tuple[str, ...]) -> None:
    """The usual job of a rank: train in each phase and save what it says."""
    for name in names:
        if name != "truth" or job.has_truth:
            torch.save(train_engine(rank, world, job, name), folder / f"{name}-{rank}.pt")


def many(rank: int, world: int, folder: Path, jobs: dict[str, Job], names: tuple[str, ...]) -> None:
    """Several usual jobs one after the other in the same processes, each in a folder of its own name."""
    for name, job in jobs.items():
        (folder / name).mkdir(exist_ok=True, mode=0o700)
        os.environ["SENTINEL_DIR"] = str(folder / name)
        phases(rank, world, folder / name, job, names)


def run(folder: Path, world: int, target: Callable[..., None], *args: Any, timeout_s: float = 120.0) -> None:
    """Run `target(rank, world, folder, *args)` in `world` gloo processes; fail with what the first of them raised."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    port = free_port()
    ranks = [_context.Process(target=_rank, args=(rank, world, port, folder, target, args)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout_s)
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    problems = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    assert not problems, problems[0]
    assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]


def _rank(rank: int, world: int, port: int, folder: Path, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        os.environ.update(
            SENTINEL_DIR=str(folder), SENTINEL_RUN="run", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
            LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world), DS_ACCELERATOR="cpu",
        )  # fmt: skip
        torch.set_num_threads(1)
        import deepspeed
        import torch.distributed as dist

        # Compiled when it is first asked for, which takes a minute; gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        dist.init_process_group("gloo", rank=rank, world_size=world)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        # DeepSpeed asks the processor for fast fp16; torch computes it on any.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        target(rank, world, folder, *args)
        dist.barrier()
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        os._exit(0 if not (folder / f"error-{rank}.txt").exists() else 1)
