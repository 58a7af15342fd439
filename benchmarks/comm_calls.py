"""What the probe of communication adds to one call of torch.distributed, in a gloo group of one rank.

    python benchmarks/comm_calls.py

Contenders take turns in one process; minimum and median over rounds, and the ratio of minima to the bare call. The call
itself moves nothing here, so that what is added stands out: between real ranks it is a small part of each call.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sentinel

NUM_CALLS, NUM_STEPS, NUM_ROUNDS, NUM_ELEMENTS = 400, 12, 5, 1000
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "attached, comm not wanted": {},
    "comm, step not due": {"probes": {"comm": {"step_interval": 10**6, "start_step": 0}}},
    "comm, log only": {"probes": {"comm": {"log_only": True}}},
    "comm": {"probes": {"comm": {}}},
}


def contender(config: dict[str, Any] | None) -> tuple[Callable[[], float], Any]:
    """Return one step, which gives microseconds a call, and the monitor."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = None
    if config is not None:
        monitor = sentinel.attach(model, optimizer, {"kinds": [], "black_box": False, **config})
    values, batch = torch.ones(NUM_ELEMENTS), torch.ones(4, 8)

    def step() -> float:
        optimizer.zero_grad()
        model(batch).sum().backward()
        began = time.perf_counter()
        for _ in range(NUM_CALLS):
            dist.all_reduce(values)
        took = time.perf_counter() - began
        optimizer.step()
        return took / NUM_CALLS * 1e6

    step()  # What is due at step 0 is over; sites are known.
    return step, monitor


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SENTINEL_DIR"] = folder
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for _ in range(NUM_ROUNDS):
            for name, config in CONTENDERS.items():
                step, monitor = contender(config)
                times[name] += [step() for _ in range(NUM_STEPS)]
                if monitor is not None:
                    monitor.detach()
        dist.destroy_process_group()
    bare = min(times["bare"])
    print(f"one all_reduce of {NUM_ELEMENTS} float32, gloo, 1 rank, torch {torch.__version__}, 1 thread; us a call")
    print(f"{'':28} {'min':>8} {'median':>8} {'added':>8} {'ratio':>7}")
    for name, found in times.items():
        low = min(found)
        print(f"{name:28} {low:8.2f} {statistics.median(found):8.2f} {low - bare:8.2f} {low / bare:7.2f}")


if __name__ == "__main__":
    sys.exit(main())
