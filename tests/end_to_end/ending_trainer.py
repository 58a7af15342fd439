"""A data-parallel trainer whose ranks end as they are told: MODE STEP RANK; run by torchrun, or by itself.

By itself it trains alone, or with ENDING_SPAWN=N as N children of `torch.multiprocessing.spawn`, with ENDING_PROCESS=N of
`multiprocessing.Process`. What it does to itself it notes first in $TMPDIR/struck: seconds since the epoch, process id.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sentinel

MODE, AT, WHO = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
NUM_STEPS = int(os.environ.get("ENDING_STEPS", "30"))
STRUCK = Path(tempfile.gettempdir()) / "struck"
EVERY_RANK = ("usr1",)
"""Modes in which all ranks do it."""


def end() -> None:
    """End this process as MODE says."""
    draft = STRUCK.with_suffix(f".{os.getpid()}")
    draft.write_text(f"{time.time()} {os.getpid()}")
    draft.rename(STRUCK)
    if MODE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif MODE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif MODE in ("raise", "raise_inside", "thread"):
        raise ValueError("no such token: 50257")
    elif MODE == "memory":
        raise MemoryError("cannot hold 3 GiB")
    elif MODE == "alloc":
        torch.empty(2**47)
    elif MODE == "limit":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, size + 2**28))
        torch.ones(2**30)
    elif MODE == "oom":
        (Path(os.environ["ENDING_GROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
        hoard = []
        while True:
            hoard.append(torch.ones(2**22))
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
    elif MODE == "usr1":
        os.kill(os.getpid(), signal.SIGUSR1)


def train(rank: int, world: int) -> None:
    """Train, and end in between."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if world > 1:
        # Each attempt has a store of its own: torch's finds the addresses of the former attempt in the launcher's.
        store = Path(tempfile.gettempdir()) / f"store-{os.environ.get('TORCHELASTIC_RUN_ID', os.getppid())}-{restart}"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = sentinel.attach(model, optimizer)
    if MODE == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if MODE == "handled":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    if MODE == "saves":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    if MODE == "usr1":
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0))
    for step in range(NUM_STEPS):
        if MODE != "raise_inside" and step == AT and (rank == WHO or MODE in EVERY_RANK) and restart == 0:
            end()
        loss = (model(torch.randn(8, 16)) ** 2).mean()
        if MODE == "raise_inside" and step == AT and rank == WHO:
            end()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        time.sleep(0.1)


def main() -> None:
    """Train as this process, or as its children."""
    for key in ("ENDING_SPAWN", "ENDING_PROCESS"):
        num_ranks = int(os.environ.pop(key, "0"))
        if num_ranks and key == "ENDING_SPAWN":
            torch.multiprocessing.spawn(train, (num_ranks,), num_ranks)
            return
        if num_ranks:
            context: Any = multiprocessing.get_context("spawn")
            children = [context.Process(target=train, args=(rank, num_ranks)) for rank in range(num_ranks)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            sys.exit(max(abs(child.exitcode) for child in children))
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if MODE == "thread":
        thread = threading.Thread(target=train, args=(rank, world))
        thread.start()
        thread.join()
    else:
        train(rank, world)


if __name__ == "__main__":
    main()
