"""How each layout is built: what its user would write, without Sentinel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .layout import Trainer
from .net import LEARNING_RATE, LENGTH, LayoutBlock, Net, optimizer_of, shifted_loss, tokens_of

CPU = torch.device("cpu")


def mine(batch: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The samples of one data-parallel rank."""
    return batch.chunk(size)[rank]


def loop(model: nn.Module, optimizer: Any, batch_of: Any, clip: Any = None) -> Trainer:
    """A plain loop; its norm is clip_grad_norm_'s own, clipping for real."""

    def train_step(step: int) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        batch = batch_of(step)
        loss = shifted_loss(model(batch), batch)
        loss.backward()
        norm = clip(model) if clip is not None else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm

    return Trainer([model], optimizer, train_step)


def one(net: type[Net] = Net) -> Trainer:
    model = net()
    return loop(model, optimizer_of(model.parameters()), tokens_of)


def one_shallow() -> Trainer:
    model = Net(depth=2)
    return loop(model, optimizer_of(model.parameters()), tokens_of)


def one_tied() -> Trainer:
    model = Net(tied=True)
    return loop(model, optimizer_of(model.parameters()), tokens_of)


def one_moe() -> Trainer:
    model = Net(moe=True)
    return loop(model, optimizer_of(model.parameters()), tokens_of)


def by_rank(step: int) -> torch.Tensor:
    return mine(tokens_of(step), dist.get_rank(), dist.get_world_size())


def ddp(tied: bool = False) -> Trainer:
    model = nn.parallel.DistributedDataParallel(Net(tied=tied))
    return loop(model, optimizer_of(model.parameters()), by_rank)


def zero_redundancy() -> Trainer:
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, eps=1e-2)
    return loop(model, optimizer, by_rank)


def fsdp1(strategy: str = "FULL_SHARD", use_orig_params: bool = True) -> Trainer:
    mesh = None
    if strategy.startswith("HYBRID"):
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = FSDP1(
        Net(), auto_wrap_policy=ModuleWrapPolicy({LayoutBlock}), use_orig_params=use_orig_params, device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy], device_id=CPU,
    )  # fmt: skip
    return loop(model, optimizer_of(model.parameters()), by_rank, clip=lambda model: model.clip_grad_norm_(0.5))


def fsdp2(replicate: int = 1, tied: bool = False, depth: int = 4) -> Trainer:
    world = dist.get_world_size()
    if replicate > 1:
        mesh = init_device_mesh("cpu", (replicate, world // replicate), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = Net(tied=tied, depth=depth)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, optimizer_of(model.parameters()), by_rank)


PLAN: dict[str, Any] = {
    "attn.q": ColwiseParallel(), "attn.k": ColwiseParallel(), "attn.v": ColwiseParallel(), "attn.out": RowwiseParallel(),
    "mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel(),
}  # fmt: skip


def tp(dp: int = 1, sharded: bool = False, depth: int = 4) -> Trainer:
    """Tensor parallel over 2 ranks; with dp > 1 replicas around it, or FSDP2."""
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
    model = Net(depth=depth)
    for block in model.blocks.values():
        parallelize_module(block, mesh["tp"], PLAN)
    if sharded:
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    rank, size = mesh.get_local_rank("dp"), dp

    def clip(model: nn.Module) -> torch.Tensor:
        if dp > 1 and not sharded:
            for param in model.parameters():
                gradient = getattr(param.grad, "_local_tensor", param.grad)
                dist.all_reduce(gradient, group=mesh.get_group("dp"))
                gradient /= dp
        return norm_and_scale(model)

    return loop(model, optimizer_of(model.parameters()), lambda step: mine(tokens_of(step), rank, size), clip=clip)


def norm_and_scale(model: nn.Module, pipeline: Any = None) -> torch.Tensor:
    """The whole model's norm where DTensors and plain tensors mix, as trainers do it: by hand, then clipped by it."""
    whole, cut = torch.zeros(()), None
    for param in model.parameters():
        if isinstance(param.grad, DTensor):
            square = param.grad.float().square().sum().full_tensor()
            cut = square if cut is None else cut + square
        elif param.grad is not None:
            whole = whole + param.grad.square().sum()
    square = whole + (0 if cut is None else cut)
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    norm = square.sqrt()
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for param in model.parameters():
        by_mesh.setdefault(param.grad.device_mesh if isinstance(param.grad, DTensor) else None, []).append(param)
    for params in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(params, 0.5, norm)
    return norm


class GatherKeys(torch.autograd.Function):
    """Keys and values of all context ranks, in order of their tokens; the gradient goes back to whom it belongs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.rank, ctx.size = group, dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty(x.shape) for _ in range(ctx.size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.size, dim=2)[ctx.rank], None


def cp(dp: int = 1) -> Trainer:
    """Context parallel over 2 ranks: each holds half of every sequence and attends to the keys of both."""
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "cp"))
    group, rank = mesh.get_group("cp"), mesh.get_local_rank("cp")

    def attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = GatherKeys.apply(k, group), GatherKeys.apply(v, group)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        at = torch.arange(q.shape[-2]).unsqueeze(1) + rank * q.shape[-2]
        return scores.masked_fill(torch.arange(k.shape[-2]) > at, -1e9).softmax(-1) @ v

    model = nn.parallel.DistributedDataParallel(Net(attend=attend_all))
    half = LENGTH // 2

    def batch_of(step: int) -> torch.Tensor:
        return mine(tokens_of(step), mesh.get_local_rank("dp"), dp)[:, rank * half : (rank + 1) * half]

    return loop(model, optimizer_of(model.parameters()), batch_of)


class GatherTokens(torch.autograd.Function):
    """The samples of all ranks of a group; gradients are summed and go back to whom they belong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.rank, ctx.size = group, dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty(x.shape) for _ in range(ctx.size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.size)[ctx.rank], None


class SumToOwners(torch.autograd.Function):
    """The reverse: what every rank adds to all samples, summed, each rank its own samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.rank, ctx.size = group, dist.get_rank(group), dist.get_world_size(group)
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.chunk(ctx.size)[ctx.rank]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [torch.empty(grad.shape) for _ in range(ctx.size)]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def ep(dp: int = 1, context: bool = False) -> Trainer:
    """Expert parallel over 2 ranks, which are data-parallel to all else; around it `dp` replicas, or context ranks."""
    outer = "cp" if context else "dp"
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=(outer, "ep"))
    group, rank = mesh.get_group("ep"), mesh.get_local_rank("ep")
    model = Net(moe=True)

    def exchange(weigh: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x, gate = GatherTokens.apply(x, group), GatherTokens.apply(gate, group)
        return SumToOwners.apply(weigh(x, gate.chunk(2, dim=-1)[rank]), group)

    for block in model.blocks.values():
        experts = block.mlp.experts
        experts.exchange = exchange
        for name in ("w1", "w2"):
            weight = getattr(experts, name).detach().chunk(2)[rank].clone()
            setattr(experts, name, nn.Parameter(DTensor.from_local(weight, mesh["ep"], [Shard(0)], run_check=False)))

    def clip(model: nn.Module) -> torch.Tensor:
        square = torch.zeros(())
        for param in model.parameters():
            if isinstance(param.grad, DTensor):
                local = param.grad.to_local()
                dist.all_reduce(local, group=mesh.get_group(outer))
                local /= 2 * dp
                part = local.square().sum()
                dist.all_reduce(part, group=group)
            else:
                dist.all_reduce(param.grad)
                param.grad /= 2 * dp
                part = param.grad.square().sum()
            square = square + part
        for params in ([p for p in model.parameters() if isinstance(p, DTensor) is cut] for cut in (True, False)):
            torch.nn.utils.clip_grads_with_norm_(params, 0.5, square.sqrt())
        return square.sqrt()

    half = mesh.get_local_rank(outer)
    if context:
        # Attention within each half only: what context parallelism does to tokens, without its exchange.
        return loop(model, optimizer_of(model.parameters()), lambda step: halves(mine(tokens_of(step), rank, 2), half), clip)
    return loop(model, optimizer_of(model.parameters()), lambda step: mine(tokens_of(step), 2 * half + rank, 2 * dp), clip)


def halves(batch: torch.Tensor, half: int) -> torch.Tensor:
    """One half of every sequence."""
    return batch.chunk(2, dim=1)[half]


def one_moe_in_halves() -> Trainer:
    """One process that sees the halves of the sequences as sequences of their own."""
    model = Net(moe=True)
    return loop(model, optimizer_of(model.parameters()), lambda step: torch.cat(tokens_of(step).chunk(2, dim=1)))


def pipeline(schedule: str, pp: int = 2, chunks: int = 1, dp: int = 1, micro: int = 4, net: type[Net] = Net) -> Trainer:
    """torch.distributed.pipelining with `pp` ranks x `dp` replicas, each rank with `chunks` stages."""
    from torch.distributed.pipelining import PipelineStage, schedules

    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    rank, num = mesh.get_local_rank("pp"), pp * chunks
    is_v = schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    indices = [rank, num - 1 - rank] if is_v else [rank + n * pp for n in range(chunks)]
    models = [net(index, num) for index in indices]
    stages = [PipelineStage(m, i, num, CPU, group=mesh.get_group("pp")) for m, i in zip(models, indices, strict=True)]
    kind = getattr(schedules, schedule)
    runner = kind(stages if chunks > 1 else stages[0], micro, loss_fn=shifted_loss)
    params = [p for model in models for p in model.parameters()]
    optimizer = optimizer_of(params)

    def train_step(step: int) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        batch = mine(tokens_of(step), mesh.get_local_rank("dp"), dp)
        losses: list[torch.Tensor] = []
        inputs = (batch,) if 0 in indices else ()
        runner.step(*inputs, target=batch if num - 1 in indices else None, losses=losses)
        if dp > 1:
            for param in params:
                dist.all_reduce(param.grad, group=mesh.get_group("dp"))
                param.grad /= dp
        square = sum((p.grad.square().sum() for p in params if p.grad is not None), torch.zeros(()))
        dist.all_reduce(square, group=mesh.get_group("pp"))
        torch.nn.utils.clip_grads_with_norm_(params, 0.5, square.sqrt())
        optimizer.step()
        loss = torch.stack(losses).mean() if losses else torch.tensor(float("nan"))
        return loss.detach(), square.sqrt()

    return Trainer(list(models), optimizer, train_step)


def tp_x_pp() -> Trainer:
    from torch.distributed.pipelining import PipelineStage, schedules

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    rank = mesh.get_local_rank("pp")
    model = Net(rank, 2)
    for block in model.blocks.values():
        parallelize_module(block, mesh["tp"], PLAN)
    stage = PipelineStage(model, rank, 2, CPU, group=mesh.get_group("pp"))
    runner = schedules.Schedule1F1B(stage, 4, loss_fn=shifted_loss)
    optimizer = optimizer_of(model.parameters())

    def train_step(step: int) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        runner.step(*((tokens_of(step),) if rank == 0 else ()), target=tokens_of(step) if rank else None, losses=losses)
        norm = norm_and_scale(model, mesh.get_group("pp"))
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.tensor(float("nan")), norm

    return Trainer([model], optimizer, train_step)


SCHEDULES = {
    "gpipe": partial(pipeline, "ScheduleGPipe"),
    "1f1b": partial(pipeline, "Schedule1F1B"),
    "interleaved": partial(pipeline, "ScheduleInterleaved1F1B", chunks=2),
    "looped_bfs": partial(pipeline, "ScheduleLoopedBFS", chunks=2),
    "zero_bubble": partial(pipeline, "ScheduleInterleavedZeroBubble", chunks=2),
    "zbv": partial(pipeline, "ScheduleZBVZeroBubble", chunks=2),
    "dualpipev": partial(pipeline, "ScheduleDualPipeV", chunks=2),
}
LAYOUTS: dict[str, tuple[Any, int]] = {
    "ddp": (ddp, 2),
    "ddp_tied": (partial(ddp, tied=True), 2),
    "fsdp2_tied": (partial(fsdp2, tied=True), 2),
    "zero_redundancy": (zero_redundancy, 2),
    "fsdp1": (fsdp1, 2),
    "fsdp1_grad_op": (partial(fsdp1, "SHARD_GRAD_OP"), 2),
    "fsdp1_no_shard": (partial(fsdp1, "NO_SHARD"), 2),
    "fsdp1_hybrid": (partial(fsdp1, "HYBRID_SHARD"), 4),
    "fsdp2": (fsdp2, 2),
    "fsdp2_4": (fsdp2, 4),
    "hsdp": (partial(fsdp2, 2, depth=2), 4),
    "tp": (tp, 2),
    "tp_x_dp": (partial(tp, 2), 4),
    "tp_x_fsdp2": (partial(tp, 2, True, depth=2), 4),
    "cp": (cp, 2),
    "cp_x_dp": (partial(cp, 2), 4),
    **{name: (build, 2) for name, build in SCHEDULES.items()},
    "ep": (ep, 2),
    "ep_x_dp": (partial(ep, 2), 4),
    "ep_x_cp": (partial(ep, 2, True), 4),
    "pp_x_dp": (partial(pipeline, "Schedule1F1B", dp=2), 4),
    "tp_x_pp": (tp_x_pp, 4),
}
REFERENCES = {
    "ep": one_moe, "ep_x_dp": one_moe, "ep_x_cp": one_moe_in_halves, "ddp_tied": one_tied, "fsdp2_tied": one_tied,
    "hsdp": one_shallow, "tp_x_fsdp2": one_shallow,
}  # fmt: skip
"""The process that a layout is compared with, where it is not `one`."""
