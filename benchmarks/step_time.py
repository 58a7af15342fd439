"""What a training step costs with Sentinel attached, as a ratio to the same step without: all variants in one run.

    python benchmarks/step_time.py --write       # also writes benchmarks/results/<date>-step_time.json

One process trains the example's GPT. Variants take turns, a few steps each, so that a machine that warms up or is shared
slows all of them alike; each round gives one ratio a variant, and the median over rounds is reported with its spread.
`cpu` is the same ratio of processor seconds of all threads, the writer's included: other processes disturb it less.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import sentinel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from data import StandardLibrary  # noqa: E402
from model import GPT, GPTConfig, next_token_loss  # noqa: E402

MODULE_KINDS = ["activation", "activation_in", "dgrad", "dgrad_in"]
VARIANTS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "attached, everything off": {"kinds": [], "black_box": False},
    "black box": {"kinds": [], "black_box": True},
    "params + wgrads": {"kinds": ["param", "wgrad"], "black_box": False},
    "default (params, wgrads, black box)": {},
    "everything, every step": {"kinds": ["param", "wgrad", *MODULE_KINDS]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time with and without Sentinel.")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="steps of a variant in a round; the first two do not count")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = GPTConfig(width=options.width, layers=options.layers, sequence=options.sequence)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = StandardLibrary(options.sequence, options.batch)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="sentinel-step-time-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        step = 0
        for turn in range(options.rounds + 1):
            names = list(VARIANTS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                settings = VARIANTS[name]
                monitor = None
                if settings is not None:
                    monitor = sentinel.attach(model, optimizer, {"run": f"r{turn}-{names.index(name)}", **settings})
                took: list[tuple[float, float]] = []
                for _ in range(options.steps):
                    batch = data.micro_step(step, 0, 0)
                    took.append(train_step(model, optimizer, batch, monitor))
                    step += 1
                if monitor is not None:
                    monitor.detach()
                if turn > 0:  # The first round warms caches up.
                    wall, cpu = zip(*took[2:], strict=True)
                    times[name].append((statistics.median(wall), statistics.fmean(cpu)))
    report(times, options, sum(p.numel() for p in model.parameters()))


def train_step(model: GPT, optimizer: torch.optim.Optimizer, batch: torch.Tensor, monitor: Any) -> tuple[float, float]:
    """Do one step of training; return its seconds, by the wall and of the processor."""
    began, began_cpu = time.perf_counter(), time.process_time()
    loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if monitor is not None:
        monitor.log(loss=loss, lr=1e-3)
    optimizer.zero_grad()
    return time.perf_counter() - began, time.process_time() - began_cpu


def report(times: dict[str, list[tuple[float, float]]], options: argparse.Namespace, num_parameters: int) -> None:
    """Print the table, and write it where it was asked for."""
    base = times["without"]
    rows = []
    for name, own in times.items():
        ratios = sorted(a / b for (a, _), (b, _) in zip(own, base, strict=True))
        cpu_ratios = [a / b for (_, a), (_, b) in zip(own, base, strict=True)]
        rows.append(
            {
                "variant": name,
                "ms": round(1e3 * statistics.median(wall for wall, _ in own), 2),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_p10": round(ratios[len(ratios) // 10], 4),
                "ratio_p90": round(ratios[-1 - len(ratios) // 10], 4),
                "cpu_ratio": round(statistics.median(cpu_ratios), 4),
            }
        )
    reported = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python benchmarks/step_time.py --width {options.width} --layers {options.layers} "
        f"--sequence {options.sequence} --batch {options.batch} --threads {options.threads} --rounds {options.rounds}",
        "machine": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": num_parameters,
        "rows": rows,
    }
    print(f"{num_parameters / 1e6:.1f} M parameters, {reported['machine']}, torch {reported['torch']}, {reported['date']}")
    print(f"{'variant':<38} {'ms/step':>8} {'ratio':>7}   p10 - p90       cpu")
    for row in rows:
        spread = f"{row['ratio_p10']:.3f} - {row['ratio_p90']:.3f}"
        print(f"{row['variant']:<38} {row['ms']:>8} {row['ratio']:>7.3f}   {spread}   {row['cpu_ratio']:.3f}")
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{reported['date']}-step_time.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(reported, indent=2) + "\n")
        print(f"written to {path.relative_to(ROOT)}")


def processor() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines()] if info.exists() else []
    models = [name for name, line in zip(names, info.read_text().splitlines(), strict=True) if line.startswith("model name")]
    return models[0] if models else platform.machine()


if __name__ == "__main__":
    main()
