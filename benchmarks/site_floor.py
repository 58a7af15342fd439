"""What one operation of torch in a forward hook costs between the layers of a small model, beside a site of Sentinel.

Five copies of the ConvNet of `small_steps.py` (52 blocks) train in turns in one process: bare; with a forward hook at each
block that does nothing; with `output.abs().max()` there; watched with everything off; by the black box alone. Printed
are microseconds of the training thread that a step costs in addition (trimmed means), for each hook or row.

    python benchmarks/site_floor.py [--rounds 200]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from typing import Any

import torch
from small_steps import MODELS, Copy
from torch import nn


def measure(*arguments: Any) -> None:
    """Read the output, as one line of a user's own monitoring would."""
    arguments[2].detach().abs().max()


def nothing(*arguments: Any) -> None:
    """Stand where a hook stands."""


def hooked(model: nn.Module, loss: Any, hook: Any) -> Copy:
    """Return a copy with a forward hook at each block."""
    copy = Copy(model, loss, None, "")
    for block in copy.model.blocks:
        block.register_forward_hook(hook)
    return copy


def main() -> None:
    """Train in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    os.environ["SENTINEL_DIR"] = tempfile.mkdtemp()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = MODELS["convnet"][50]()
    copies = {
        "bare": Copy(model, loss, None, ""),
        "hooks that do nothing": hooked(model, loss, nothing),
        "abs().max() in each": hooked(model, loss, measure),
        "everything off": Copy(model, loss, {"kinds": [], "black_box": False}, "off"),
        "black box": Copy(model, loss, {"kinds": []}, "borders"),
    }
    for turn in range(rounds + 40):
        for copy in list(copies.values()) if turn % 2 else reversed(copies.values()):
            copy.step()
    means = {}
    for name, copy in copies.items():
        times = sorted(cpu for cpu, _, _ in copy.times[40:])
        cut = len(times) // 10
        means[name] = 1e6 * statistics.fmean(times[cut : len(times) - cut])
    off, rows = means["everything off"], copies["black box"].num_rows
    print(f"bare step {means['bare'] / 1e3:.1f} ms, {rounds} rounds, torch {torch.__version__}")
    for name in ("hooks that do nothing", "abs().max() in each"):
        print(f"{name}: {(means[name] - means['bare']) / 52:.1f} us each")
    print(f"everything off: {off - means['bare']:.0f} us a step")
    added = means["black box"] - off
    print(f"black box: {added:.0f} us a step more, {added / rows:.1f} us for each of {rows} rows")
    for copy in copies.values():
        if copy.monitor is not None:
            copy.monitor.detach()


if __name__ == "__main__":
    main()
