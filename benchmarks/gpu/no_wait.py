"""Nothing that Sentinel does in the training thread waits for the device.

Two ways to see it, of the bare model, of all four groups and of the black box: synchronising calls of the training thread
in a profile of three steps, which must be as many as the bare model's; and three steps under
`torch.cuda.set_sync_debug_mode("error")`, in which a call of torch that synchronises raises; where the bare model raises
there, that way says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import results
import torch
from dense import VARIANTS, Training, steps_of

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
NAMES = ("without", "params + wgrads", "default", "four groups, every step", "everything, every step")


def waits_in(training: Training, name: str) -> dict[str, int]:
    """Return how often the thread that launches kernels waited for the device, by call, in three steps."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if training.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    monitor = training.attach(VARIANTS[name], f"profile-{name}")
    try:
        for _ in range(2):
            training.step(monitor)
        results.synchronize(training.device)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(3):
                training.step(monitor)
    finally:
        if monitor is not None:
            monitor.detach()
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-trace-") as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return waits_of_launchers(json.loads(trace.read_text())["traceEvents"])


def waits_of_launchers(events: list[dict[str, Any]]) -> dict[str, int]:
    """Count waits of the threads that launch kernels, by call, in a trace.

    There threads are those of the system. The profiler's own list has 0 for the thread of a call that no operation of torch
    made, of whichever thread: the one that writes rows waits for the device all the time, as it may.
    """
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    threads = {event["tid"] for event in calls if str(event["name"]).startswith(LAUNCHES)}
    return {wait: sum(event["name"] == wait and event["tid"] in threads for event in calls) for wait in WAITS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = results.options_of(parser)
    result = results.Result("no-wait", options)
    training = Training(options, "small", 8)
    found, raised = {}, {}
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-no-wait-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        for name in NAMES:
            found[name] = waits_in(training, name)
            result.note("waits_in_3_steps", found)
            print(f"{name}: {found[name]}")
            try:
                steps_of(training, 3, VARIANTS[name], f"strict-{name}", strict=True)
            except RuntimeError as error:
                raised[name] = str(error)
                result.note("raised", raised)
                print(f"{name}: under set_sync_debug_mode: {error}")
    more = [name for name in NAMES if any(found[name][wait] > found["without"][wait] for wait in WAITS)]
    ours = [] if "without" in raised else list(raised)
    if more or ours:
        raise SystemExit(f"waits for the device that the bare model does not: {sorted({*more, *ours})}")
    strict = "the bare model itself raises under set_sync_debug_mode" if raised else "none raises under set_sync_debug_mode"
    number = sum(found["without"].values())
    result.complete(f"{number} waits in 3 steps bare, no more with {len(NAMES) - 1} variants; {strict}")


if __name__ == "__main__":
    main()
