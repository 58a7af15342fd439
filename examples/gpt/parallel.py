"""The layout of the run: process mesh, pipeline stages and schedule, tensor parallelism, and what is reduced over what."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, GPTConfig, next_token_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """This rank's place in a mesh of pp x dp x tp ranks."""

    mesh: DeviceMesh
    pp: int
    dp: int
    tp: int
    pp_rank: int
    dp_rank: int
    tp_rank: int

    @classmethod
    def of(cls, pp: int, tp: int) -> Layout:
        """Spread the ranks of the world: pp outermost, tp innermost, the rest data-parallel."""
        world = dist.get_world_size()
        if world % (pp * tp):
            raise SystemExit(f"{world} ranks cannot be cut into {pp} pipeline stages x {tp} tensor-parallel ranks")
        dp = world // (pp * tp)
        if tp == 1:
            mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
        else:
            mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        ranks = {axis: mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names or ()}
        return cls(
            mesh=mesh, pp=pp, dp=dp, tp=tp,
            pp_rank=ranks["pp"], dp_rank=ranks["dp"], tp_rank=ranks.get("tp", 0),
        )  # fmt: skip

    def build_chunks(self, config: GPTConfig, chunks_per_rank: int) -> list[GPT]:
        """Return this rank's pieces of the model, in forward order."""
        num_stages = self.pp * chunks_per_rank
        chunks = [GPT(config, self.pp_rank + n * self.pp, num_stages) for n in range(chunks_per_rank)]
        if self.tp > 1:
            for chunk in chunks:
                for block in chunk.blocks.values():
                    parallelize_module(
                        block,
                        self.mesh["tp"],
                        {
                            "attn.qkv": ColwiseParallel(),
                            "attn.proj": RowwiseParallel(),
                            "mlp.fc1": ColwiseParallel(),
                            "mlp.fc2": RowwiseParallel(),
                        },
                    )
        return chunks

    def build_schedule(self, name: str, chunks: list[GPT], num_micro_steps: int) -> Any:
        """Return the pipeline schedule that runs `chunks`; its loss is the mean over micro-batches."""
        group, num_stages = self.mesh.get_group("pp"), self.pp * len(chunks)
        stages = [
            PipelineStage(chunk, self.pp_rank + n * self.pp, num_stages, torch.device("cpu"), group=group)
            for n, chunk in enumerate(chunks)
        ]
        return SCHEDULES[name](stages if name == "interleaved1f1b" else stages[0], num_micro_steps, loss_fn=next_token_loss)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients over the replicas, all in one all-reduce."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.mesh.get_group("dp"))
        flat /= self.dp
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """Return the norm of the whole model's gradient, the same on every rank: NaN or inf on all when bad on one."""
        sharded, whole = torch.zeros(()), torch.zeros(())
        for parameter in parameters:
            if parameter.grad is None:
                continue
            square = local(parameter.grad).square().sum()
            if isinstance(parameter.grad, DTensor) and any(one.is_shard() for one in parameter.grad.placements):
                sharded = sharded + square
            else:
                whole = whole + square
        # Whole ones are the same on each tensor-parallel rank unless one went bad: then all must learn of it.
        total = sharded + whole / self.tp
        if self.tp > 1:
            dist.all_reduce(total, group=self.mesh.get_group("tp"))
        dist.all_reduce(total, group=self.mesh.get_group("pp"))
        return total.sqrt()


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
