"""What Sentinel adds to the memory of the device, and to the calls of its allocator, over ten steps of each variant.

added      bytes that attaching allocates and keeps while steps run, beyond the bare model's at the same place
peak       bytes allocated at most, beyond the bare model's peak
reserved   bytes that torch's allocator holds of the device, beyond the bare model's
churn      allocations a step, beyond the bare model's; `retries`: times that the allocator had to empty its cache
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from typing import Any

import results
import torch
from dense import VARIANTS, Training


def counters(device: str) -> dict[str, int]:
    """Return the allocator's counters; zeros on a CPU, which has none."""
    stats: dict[str, int] = torch.cuda.memory_stats() if device == "cuda" else {}
    return {
        "now": stats.get("allocated_bytes.all.current", 0), "peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.peak", 0), "calls": stats.get("allocation.all.allocated", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }  # fmt: skip


def measured(training: Training, settings: dict[str, Any] | None, run: str, num_steps: int) -> dict[str, int]:
    """Return bytes held behind the steps, bytes at most, bytes reserved, allocations and retries of some steps."""
    gc.collect()
    if training.device == "cuda":
        torch.cuda.empty_cache()
    monitor = training.attach(settings, run)
    try:
        for _ in range(3):
            training.step(monitor)
        results.synchronize(training.device)
        if training.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = counters(training.device)
        for _ in range(num_steps):
            training.step(monitor)
        results.synchronize(training.device)
        after = counters(training.device)
    finally:
        if monitor is not None:
            monitor.detach()
    return {
        "held": after["now"], "peak": after["peak"], "reserved": after["reserved"],
        "calls": (after["calls"] - before["calls"]) // num_steps, "retries": after["retries"] - before["retries"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = results.options_of(parser)
    result = results.Result("memory", options)
    training = Training(options, "1b", 4)
    table: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-memory-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        measured(training, None, "warm", 2)
        print(f"{'variant':<28} {'added MiB':>10} {'peak MiB':>9} {'reserved MiB':>12} {'calls/step':>10} {'retries':>7}")
        for at, (name, settings) in enumerate(VARIANTS.items()):
            table[name] = measured(training, settings, f"m{at}", 2 if options.tiny else 10)
            result.note("variants", table)
            more = {key: value - table["without"][key] for key, value in table[name].items()}
            print(
                f"{name:<28} {more['held'] / 2**20:>10.1f} {more['peak'] / 2**20:>9.1f} {more['reserved'] / 2**20:>12.1f}"
                f" {more['calls']:>10} {more['retries']:>7}"
            )
    bare = table["without"]
    peak = {name: (cell["peak"] - bare["peak"]) / 2**20 for name, cell in table.items()}
    calls = {name: cell["calls"] - bare["calls"] for name, cell in table.items()}
    result.complete(
        f"of {bare['peak'] / 2**30:.2f} GiB at the peak: "
        + "; ".join(
            f"{name} {peak[name]:+.1f} MiB, {calls[name]:+} calls a step"
            for name in ("default", "four groups, every step", "everything, every step")
        )
    )


if __name__ == "__main__":
    main()
