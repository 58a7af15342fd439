"""DistributedDataParallel with gradient accumulation: the same two lines on every rank.

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sentinel

MICRO_STEPS = 2


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    direction = torch.randn(16, 4)
    torch.manual_seed(1 + dist.get_rank())

    monitor = sentinel.attach(model, optimizer)
    for step in range(200):
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro_step in range(MICRO_STEPS):
            inputs = torch.randn(64, 16)
            is_last = micro_step == MICRO_STEPS - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), (inputs @ direction).argmax(-1)) / MICRO_STEPS
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.log(loss=total, lr=0.1)
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:4d}  loss {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
