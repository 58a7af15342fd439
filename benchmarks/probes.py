"""What each probe costs alone: a training step with only that kind measured, as a ratio to the bare step of the same round.

    python benchmarks/probes.py --write      # also writes benchmarks/results/<date>-probes.json

One process trains the example's GPT, with a mixture of experts beside it for `router`. Variants take turns, a few steps
each, so that a machine that warms up or is shared slows all of them alike. Two columns a kind: measured every step, and
every 1000th step with its hooks in place, in steps that are not due.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sentinel
from sentinel.monitor_config import MEASURED_LABELS

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "gpt")]

from data import StandardLibrary  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from step_time import processor, train_step  # noqa: E402

NOT_DUE = 1000
EXTRAS = {
    "stagger 8: activations and gradients": {
        "kinds": ["param", "wgrad", "activation_in", "activation", "dgrad_in", "dgrad"], "stagger": 8,
    },
    "activations and gradients": {"kinds": ["param", "wgrad", "activation_in", "activation", "dgrad_in", "dgrad"]},
}  # fmt: skip


class Experts(nn.Module):
    """A mixture of experts in place of an MLP: each token goes to the best two."""

    def __init__(self, width: int, num_experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of each probe alone.")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps of a variant in a round; the first two do not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=list(MEASURED_LABELS), help="kinds to measure; default: all")
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=options.width, layers=options.layers, sequence=options.sequence))
    replace_last_mlp(model, options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    variants = variants_of(options.kinds)
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    bare: list[float] = []
    data, step = StandardLibrary(options.sequence, options.batch), 0
    with tempfile.TemporaryDirectory(prefix="sentinel-probes-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        for turn in range(options.rounds + 1):
            names = list(variants)
            took: dict[str, float] = {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                monitor: Any = None
                if variants[name] is not None:
                    run = {"run": f"r{turn}-{names.index(name)}", **variants[name]}
                    monitor = sentinel.attach(model, optimizer, run)
                times = []
                for _ in range(options.steps):
                    times.append(train_step(model, optimizer, data.micro_step(step, 0, 0), monitor)[0])
                    step += 1
                if monitor is not None:
                    monitor.detach()
                took[name] = statistics.median(times[2:])
            if turn > 0:  # The first round warms caches up.
                bare.append(took["bare"])
                for name in names:
                    ratios[name].append(took[name] / took["bare"])
    report(options, ratios, 1e3 * statistics.median(bare))


def variants_of(kinds: list[str]) -> dict[str, dict[str, Any] | None]:
    found: dict[str, dict[str, Any] | None] = {"bare": None, "off": {"kinds": [], "black_box": False}}
    for kind in kinds:
        found[kind] = {"kinds": [kind], "black_box": False}
        # The step that is due is one of the two that do not count.
        found[f"{kind}, not due"] = {"kinds": [kind], "black_box": False, "step_interval": NOT_DUE}
    return {**found, **{name: {**config, "black_box": False} for name, config in EXTRAS.items()}}


def replace_last_mlp(model: nn.Module, width: int) -> None:
    name = [name for name, _ in model.named_modules() if name.endswith("mlp")][-1]
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, Experts(width))


def report(options: argparse.Namespace, ratios: dict[str, list[float]], bare_ms: float) -> None:
    rows = {name: [round(statistics.median(own), 4), round(min(own), 4), round(max(own), 4)] for name, own in ratios.items()}
    print(f"bare step {bare_ms:.0f} ms, {options.rounds} rounds of {options.steps} steps, {processor()}\n")
    print(f"{'kind':<40s} {'every step':>10s}   least - most       {'not due':>8s}   least - most")
    for name in (name for name in rows if not name.endswith(", not due")):
        median, low, high = rows[name]
        line = f"{name:<40s} {median:10.3f}   {low:.3f} - {high:.3f}"
        idle = rows.get(f"{name}, not due")
        print(line + (f"     {idle[0]:8.3f}   {idle[1]:.3f} - {idle[2]:.3f}" if idle else ""))
    if options.write:
        date = datetime.date.today().isoformat()
        path = ROOT / "benchmarks" / "results" / f"{date}-probes.json"
        settings = {key: value for key, value in vars(options).items() if key != "write"}
        machine = {"cpu": processor(), "cores": os.cpu_count(), "torch": torch.__version__}
        reported = {"settings": settings, "machine": machine, "bare_step_ms": bare_ms, "ratio": rows}
        path.write_text(json.dumps(reported, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
