"""What a dump adds to a training step, with a disk that keeps up and with one that hangs.

    python benchmarks/dump.py

A CPU model of some megabytes, its weights and gradients dumped at every step. On a CPU the trainer pays for the copy of each
tensor; the write is the thread's. Contenders take turns in one process; minimum and median over steps.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import torch
from torch import nn

import sentinel
from sentinel.collect.probes import dump_writer

WIDTH, NUM_LAYERS, NUM_STEPS, NUM_ROUNDS = 512, 8, 6, 4
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "param and wgrad measured": {"kinds": ["param", "wgrad"]},
    "the same, and dumped": {"kinds": [], "dump": {"kinds": ["param", "wgrad"]}},
    "the same, first 16 of each dimension": {"kinds": [], "dump": {"kinds": ["param", "wgrad"], "first_n": 16}},
    "dumped, the disk hangs": {"kinds": [], "dump": {"kinds": ["param", "wgrad"], "in_flight_bytes": 64 * 2**20}},
}


def steps_of(name: str, config: dict[str, Any] | None) -> list[float]:
    """Return milliseconds of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    write, gate = dump_writer.write_tensors, threading.Event()
    if "hangs" in name:
        dump_writer.write_tensors = lambda *args: gate.wait(60) and write(*args)  # type: ignore[assignment]
    monitor = None
    if config is not None:
        monitor = sentinel.attach(model, optimizer, {"black_box": False, **config})
    batch = torch.randn(256, WIDTH)
    found = []
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        found.append((time.perf_counter() - began) * 1e3)
    gate.set()
    if monitor is not None:
        monitor.detach()
    dump_writer.write_tensors = write
    return found[1:]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(NUM_ROUNDS):
        for name, config in CONTENDERS.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ["SENTINEL_DIR"] = folder
                times[name] += steps_of(name, config)
    num_bytes = 2 * 4 * NUM_LAYERS * (WIDTH * WIDTH + WIDTH)
    bare = min(times["bare"])
    print(f"{num_bytes / 2**20:.1f} MiB of weights and gradients a step, torch {torch.__version__}, 1 thread; ms a step")
    print(f"{'':38} {'min':>8} {'median':>8} {'ratio':>7}")
    for name, found in times.items():
        print(f"{name:38} {min(found):8.2f} {statistics.median(found):8.2f} {min(found) / bare:7.2f}")


if __name__ == "__main__":
    sys.exit(main())
