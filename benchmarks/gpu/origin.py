"""A NaN planted on the device in one module: `sentinel run` records it and `sentinel topk` names that module first.

A child trains under `sentinel run`, one process on one device. In step 5 one element of what `blocks.1.up` returns becomes
NaN, by an operation on the device that the host does not wait for; from there it spreads to everything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import results
import torch
from dense import EVERYTHING, Training

PLANTED, AT_STEP, NUM_STEPS = "blocks.1.up", 5, 8


def child(options: argparse.Namespace) -> None:
    """Train, and plant it."""
    training = Training(options, "small", 4)
    running = iter(range(NUM_STEPS))

    def plant(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        if next(running) != AT_STEP:
            return out
        spot = torch.zeros(out.shape, dtype=torch.bool, device=out.device)
        spot.view(-1)[:1].fill_(True)
        return out.masked_fill(spot, torch.nan)

    training.model.get_submodule(PLANTED).register_forward_hook(plant)
    monitor = training.attach(EVERYTHING, os.environ["SENTINEL_RUN"])
    for _ in range(NUM_STEPS):
        training.step(monitor)
    monitor.detach()


def sentinel(*args: str) -> str:
    """Return what a verb of the command line prints; 1, which says that there are anomalies, is no failure."""
    done = subprocess.run([sys.executable, "-m", "sentinel.cli", *args], capture_output=True, text=True, timeout=120)
    if done.returncode not in (0, 1):
        raise SystemExit(f"sentinel {args[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = results.options_of(parser)
    if options.child:
        child(options)
        return
    result = results.Result("origin", options)
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-origin-") as folder:
        command = [sys.executable, __file__, "--device", options.device, "--child"]
        command += ["--tiny"] if options.tiny else []
        sentinel("run", "--dir", folder, "--name", "planted", "--listen", "127.0.0.1:0", "--quiet", "--", *command)
        first = json.loads(sentinel("topk", "-d", f"{folder}/planted", "-k", "3", "--json"))
    steps = [anomaly["step"] for anomaly in first["anomalies"]]
    named = [(step, origin["phase"], origin["module"]) for step, origin in zip(steps, first["origins"], strict=True)]
    result.note("named", named)
    result.note("in_words", first["worst_in_words"])
    print(f"planted in {PLANTED}, forward, step {AT_STEP}; named: {named}")
    if not named or named[0] != (AT_STEP, "forward", PLANTED):
        raise SystemExit(f"expected {PLANTED}, forward, step {AT_STEP} first, got {named}")
    result.complete(first["worst_in_words"])


if __name__ == "__main__":
    main()
