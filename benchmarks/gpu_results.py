"""What the GPU's benchmarks share: the machine in words, time on a device, and dated results."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what every script takes."""
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that the script runs, and nothing else")
    parser.add_argument("--write", action="store_true", help="write <date>-NAME.json")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")


def require_device(options: argparse.Namespace) -> None:
    """End the process where the device asked for is not there."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU; --device cpu --tiny shows that the script runs")


def about(options: argparse.Namespace, kernel: str) -> dict[str, Any]:
    """Return date, machine and versions."""
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        memory = properties.total_memory >> 30
        machine = f"{properties.name}, {properties.multi_processor_count} multiprocessors, {memory} GiB"
    else:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "kernel": kernel,
        "is_dry_run": options.tiny or options.device == "cpu",
    }


def synchronize(device: str) -> None:
    """Wait for everything on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(task: Callable[[], object], device: str, repeats: int) -> float:
    """Return the time of one call on the device: between events around `repeats` calls."""
    if device != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            task()
        return (time.perf_counter() - began) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        task()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def medians(tasks: dict[str, Callable[[], object]], device: str, *, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return median, least and greatest time of each task; the tasks take turns, and the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, task in tasks.items():
            took = seconds_of(task, device, repeats)
            if turn:
                times[name].append(took)
    return {name: [statistics.median(own), min(own), max(own)] for name, own in times.items()}


def write(options: argparse.Namespace, name: str, cell: dict[str, Any]) -> None:
    """Write the results where that was asked for."""
    if not options.write:
        return
    path = options.out / f"{cell['date']}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cell, indent=2) + "\n")
    print(f"written to {path}")
