"""A data-parallel trainer whose ranks end as they are told: MODE STEP RANK; run by torchrun or as a plain process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import sentinel

MODE, AT, WHO = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
NUM_STEPS = 30


def end() -> None:
    """End this process as MODE says."""
    if MODE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif MODE == "raise":
        raise ValueError("no such token: 50257")
    elif MODE == "memory":
        raise MemoryError("cannot hold 3 GiB")
    elif MODE == "exit":
        sys.exit(3)
    elif MODE == "system_exit":
        raise SystemExit(3)
    elif MODE == "hard_exit":
        os._exit(7)
    elif MODE == "crash":
        ctypes.string_at(0)
    elif MODE == "interrupt":
        raise KeyboardInterrupt


def main() -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if world > 1:
        # Each attempt has a store of its own: torch's finds the addresses of the former attempt in the launcher's.
        store = Path(tempfile.gettempdir()) / f"store-{os.environ['TORCHELASTIC_RUN_ID']}-{restart}"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = sentinel.attach(model, optimizer)
    for step in range(NUM_STEPS):
        if step == AT and rank == WHO and restart == 0:
            end()
        loss = (model(torch.randn(8, 16)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        time.sleep(0.1)


main()
