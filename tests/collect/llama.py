"""A Llama-like model, on one process and under torch's tensor parallelism as its documentation lays it out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from ..layouts.builds import norm_and_scale
from ..layouts.layout import Trainer

VOCAB, WIDTH, HEADS, LENGTH, BATCH = 24, 16, 4, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.core = Core()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.wq, self.wk, self.wv))
        return self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.ff = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.n1(x))
        return h + self.ff(self.n2(h))


class Llama(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(2)])
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.reentrant = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.emb(tokens)
        for layer in self.layers:
            h = layer(h) if self.reentrant is None else checkpoint(layer, h, use_reentrant=self.reentrant)
        return self.out(self.norm(h))


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loop(model: nn.Module, clip: Any = norm_and_scale, rank: int = 0, size: int = 1) -> Trainer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)

    def train_step(step: int) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        mine = batch(step).chunk(size)[rank]
        logits = model(mine)
        target = ((mine + 3) % VOCAB).flatten()
        if isinstance(logits, DTensor):
            with loss_parallel():
                loss = F.cross_entropy(logits.flatten(0, 1), target)
                loss.backward()
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), target) / size
            loss.backward()
        norm = clip(model)
        optimizer.step()
        return loss.detach(), norm

    return Trainer([model], optimizer, train_step)


def one(recompute: bool | None = None) -> Trainer:
    return loop(Llama(recompute))


COLWISE = ("attention.wq", "attention.wk", "attention.wv", "ff.w1", "ff.w3")


def parallelize(model: Llama, mesh: DeviceMesh, sequence: bool, out: Any = None) -> None:
    """The plan of torch's tutorial, with and without sequence parallelism."""
    cut = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLWISE}
    plan |= {name: RowwiseParallel(output_layouts=cut) for name in ("attention.wo", "ff.w2")}
    ends: dict[str, Any] = {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "out": out or ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
    }
    if sequence:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"n1": SequenceParallel(), "n2": SequenceParallel(), "attention": gather, "ff": gather}
        ends["norm"] = SequenceParallel()
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def tp(sequence: bool = False, recompute: bool | None = None) -> Trainer:
    model = Llama(recompute)
    parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), sequence)
    return loop(model)


def tp_loss(sequence: bool = True) -> Trainer:
    """The logits stay cut, and the loss is computed on them so."""
    model = Llama()
    out = ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), use_local_output=False)
    parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), sequence, out)
    return loop(model)


def tp_dp(sequence: bool) -> Trainer:
    """Two replicas of two tensor-parallel ranks, each with half of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Llama()
    parallelize(model, mesh["tp"], sequence)

    def clip(model: nn.Module) -> torch.Tensor:
        for param in model.parameters():
            dist.all_reduce(getattr(param.grad, "_local_tensor", param.grad), group=mesh.get_group("dp"))
        return norm_and_scale(model)

    return loop(model, clip, mesh.get_local_rank("dp"), 2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : WIDTH // 2]


class Uncertain(DecoderLayer):
    """Ends with what no graph can tell the placement of."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.piece, self.mine = nn.Dropout(0.1), Half(), Own()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        h = self.piece(x)
        return x + self.drop(x) + torch.cat([h, h], -1) + self.mine(x)


def tp_uncertain() -> Trainer:
    model = Llama()
    model.layers = nn.ModuleList([Uncertain(), Uncertain()])
    parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), False)
    return loop(model)


def tp_frozen() -> Trainer:
    """Only the last layer learns."""
    model = Llama()
    parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), False)
    for part in (model.emb, model.layers[0]):
        part.requires_grad_(False)

    def clip(model: nn.Module) -> torch.Tensor:
        return torch.zeros(())

    return loop(model, clip)
