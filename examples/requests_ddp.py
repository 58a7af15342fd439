"""Data parallel ranks that take up what they are asked for: a checkpoint, batches to skip, a pause.

torchrun --nproc-per-node 2 examples/requests_ddp.py, and beside it: sentinel request checkpoint
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sentinel


def agreed_requests(monitor: Any) -> list[Any]:
    """Return what rank 0 was asked for, on every rank: what all ranks must do together, all of them know."""
    requests = [monitor.requests()]
    dist.broadcast_object_list(requests, src=0)
    return requests[0]


def train(num_steps: int, directory: Path) -> None:
    """Train a small model; checkpoints go into `directory`."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    direction = torch.randn(16, 4)
    batches = torch.Generator().manual_seed(1 + dist.get_rank())

    with sentinel.attach(model, optimizer) as monitor:
        for step in range(num_steps):
            for request in agreed_requests(monitor):
                if request.action == "checkpoint" and dist.get_rank() == 0:
                    torch.save(model.module.state_dict(), directory / f"step{step}.pt")
                elif request.action == "skip_batches":
                    for _ in range(request.num_batches):
                        torch.randn(64, 16, generator=batches)
                elif request.action == "pause":
                    while monitor.is_open(request):
                        time.sleep(0.1)
                monitor.answer(request)
            inputs = torch.randn(64, 16, generator=batches)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), (inputs @ direction).argmax(-1))
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss.detach(), lr=0.1)
            time.sleep(0.01)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(2000, Path())
    dist.destroy_process_group()
