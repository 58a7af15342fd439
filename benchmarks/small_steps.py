"""What Sentinel costs a small step: processor time of the training thread, by model and size, and the fixed cost of a row.

    python benchmarks/small_steps.py --write     # also writes benchmarks/results/<date>-small_steps.md
    python benchmarks/small_steps.py --sizes 5 20 --models gpt --variants default

A watched copy of each model and a bare one take turns step by step, so that a machine that is shared or warms up slows
both alike. `cpu` is the ratio of processor seconds of the training thread, all steps together; `wall` is the median ratio
of seconds by the clock, and `process` that of the processor's for all threads, the writer's too. `us/step` is what a step
costs in addition by the processor's time (mean of the middle eight tenths), and `us/row` that by the rows that a variant
measures. Of the models of size 0 the tensors are so small that reading them costs nothing: what is left is what Sentinel
itself does for a step, and for a row. `intervals`: kinds that `max_overhead` had measured every so many steps in the end.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sentinel
from sentinel.collect.schedule import pacing
from sentinel.monitor_config import MEASURED_LABELS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from model import GPT, GPTConfig, next_token_loss  # noqa: E402

MODULE_KINDS = ["activation", "activation_in", "dgrad", "dgrad_in"]
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {"kinds": [], "black_box": False},
    "unbounded": {"max_overhead": None},
    "default": {},
    "activations": {"kinds": ["param", "wgrad", *MODULE_KINDS], "max_overhead": None},
    "everything": {"kinds": list(MEASURED_LABELS), "max_overhead": None},
}
"""`unbounded` measures every kind of the default at every step, `default` as often as `max_overhead` lets it."""
WARM = 3
"""Steps of each copy that do not count."""
PACED_WARM = 80
"""The same of `default`: by then, decided early here, the intervals are those of a long run."""


class ConvNet(nn.Module):
    """A stem, 52 blocks of convolution and norm, and a head: 160 modules below the root. images: [N, 3, side, side]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        blocks = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)) for _ in range(52)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 10)
        self.norm = nn.LayerNorm(width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = hidden + F.relu(block(hidden))
        return self.head(self.norm(hidden.mean((2, 3))))


class Recurrent(nn.Module):
    """A recurrent language model. tokens: int64 [N, length]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden)


Loss = Callable[[nn.Module], torch.Tensor]


def text_loss(batch: int, length: int) -> Loss:
    """Return the loss of a language model on one batch of random bytes."""
    tokens = torch.randint(0, 256, (batch, length + 1))
    return lambda model: next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def image_loss(batch: int, side: int) -> Loss:
    """Return the loss of a classifier on one batch of random images."""
    images, classes = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    return lambda model: F.cross_entropy(model(images), classes)


def gpt(width: int, layers: int, batch: int, length: int) -> tuple[nn.Module, Loss]:
    """Return the example's GPT, and its loss."""
    return GPT(GPTConfig(width=width, layers=layers, sequence=length)), text_loss(batch, length)


MODELS: dict[str, dict[int, Callable[[], tuple[nn.Module, Loss]]]] = {
    "gpt": {
        0: lambda: gpt(8, 4, 1, 4),
        5: lambda: gpt(48, 2, 2, 32),
        20: lambda: gpt(128, 4, 2, 48),
        50: lambda: gpt(192, 4, 4, 64),
        200: lambda: gpt(256, 4, 8, 128),
    },
    "convnet": {
        0: lambda: (ConvNet(4), image_loss(1, 2)),
        20: lambda: (ConvNet(8), image_loss(4, 8)),
        50: lambda: (ConvNet(16), image_loss(8, 12)),
        200: lambda: (ConvNet(32), image_loss(16, 16)),
    },
    "lstm": {
        0: lambda: (Recurrent(8, 2), text_loss(1, 2)),
        5: lambda: (Recurrent(32, 2), text_loss(2, 12)),
        20: lambda: (Recurrent(96, 2), text_loss(4, 32)),
        50: lambda: (Recurrent(160, 3), text_loss(8, 32)),
        200: lambda: (Recurrent(256, 3), text_loss(16, 64)),
    },
}
"""Model -> its size, which names the milliseconds aimed at (how long a step takes is measured) -> how it is made."""


class Copy:
    """One copy of a model that trains, watched or not."""

    def __init__(self, model: nn.Module, loss: Loss, settings: dict[str, Any] | None, run: str) -> None:
        self.model, self.loss = copy.deepcopy(model), loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.monitor: Any = None
        if settings is not None:
            self.monitor = sentinel.attach(self.model, self.optimizer, {"run": run, **settings})
        self.num_rows = 0
        self.total_ns = 0
        """Nanoseconds of all its steps, of the training thread."""
        self.intervals: dict[Any, int] = {}
        self.times: list[tuple[float, float, float]] = []

    def step(self) -> None:
        """Do one training step, and note its seconds: of the training thread, by the clock, of all threads."""
        began = time.thread_time(), time.perf_counter(), time.process_time()
        loss = self.loss(self.model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.log(loss=loss, lr=1e-3)
        self.optimizer.zero_grad()
        ended = time.thread_time(), time.perf_counter(), time.process_time()
        self.total_ns += int(1e9 * (ended[0] - began[0]))
        self.times.append((ended[0] - began[0], ended[1] - began[1], ended[2] - began[2]))
        if self.monitor is not None:
            self.num_rows = max(self.num_rows, self.monitor.recorder.recording.rows.num_rows)
            self.intervals = self.monitor.planning.plan.intervals


def measure(name: str, size: int, variant: str, rounds: int) -> str:
    """Train two copies of a model in turns, one of them watched; return the line of the table."""
    torch.manual_seed(0)
    model, loss = MODELS[name][size]()
    warm = PACED_WARM if variant == "default" else WARM
    bare, watched = Copy(model, loss, None, ""), Copy(model, loss, VARIANTS[variant], f"{name}-{size}-{variant}")
    # The other copy's steps are no part of this one's, nor are other programs: shares are those of the processor's time.
    watched.monitor.recorder.recording.costs.clock = lambda: time.thread_time_ns() - bare.total_ns
    for turn in range(rounds + warm):
        for one in (bare, watched) if turn % 2 else (watched, bare):
            one.step()
    watched.monitor.detach()
    pairs = list(zip(watched.times[warm:], bare.times[warm:], strict=True))
    cpu = sorted(own[0] / base[0] for own, base in pairs)
    of_all = sum(own[0] for own, _ in pairs) / sum(base[0] for _, base in pairs)
    wall, process = (statistics.median(own[at] / base[at] for own, base in pairs) for at in (1, 2))
    # Steps that measure a kind and steps that leave it out are told apart by nobody who waits for the run: their mean.
    cut = len(pairs) // 10
    inner = sorted(own[0] - base[0] for own, base in pairs)[cut : len(pairs) - cut]
    added = 1e6 * statistics.fmean(inner)
    rows = watched.num_rows
    intervals = ", ".join(f"{kind.label} {every}" for kind, every in sorted(watched.intervals.items()) if every > 1)
    return (
        f"| {name} {size} | {1e3 * statistics.median(base[0] for _, base in pairs):.1f} | {variant} | "
        f"{of_all:.3f} | {cpu[len(cpu) // 10]:.2f}-{cpu[-1 - len(cpu) // 10]:.2f} | {wall:.3f} | "
        f"{process:.3f} | {added:.0f} | {rows} | {f'{added / rows:.1f}' if rows and not intervals else ''} | {intervals} |"
    )


def main() -> None:
    """Measure what was asked for, and print the table."""
    parser = argparse.ArgumentParser(description="What Sentinel costs a small step.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[0, 5, 20, 50, 200])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--kinds", nargs="*", choices=MEASURED_LABELS, help="each alone, instead of variants; none: all")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each variant that count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pacing.WARM_STEPS, pacing.WARM_S = 32, 0.0
    variants = options.variants
    if options.kinds is not None:
        variants = options.kinds or list(MEASURED_LABELS)
        VARIANTS.update({kind: {"kinds": [kind], "black_box": False} for kind in variants})
    head = [
        "| model | bare ms | variant | cpu | p10-p90 | wall | process | us/step | rows | us/row | intervals |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(head), flush=True)
    lines = []
    with tempfile.TemporaryDirectory(prefix="sentinel-small-steps-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        for name in options.models:
            for size in options.sizes:
                for variant in variants if size in MODELS[name] else ():
                    lines.append(measure(name, size, variant, options.rounds))
                    print(lines[-1], flush=True)
    if options.write:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        path = ROOT / "benchmarks" / "results" / f"{date}-small_steps.md"
        reported = (
            f"# Small steps, {date}\n\n`python benchmarks/small_steps.py --threads {options.threads} --rounds "
            f"{options.rounds}`, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, python "
            f"{platform.python_version()}, torch {torch.__version__}; columns: the head of the script.\n\n"
        )
        path.write_text(reported + "\n".join([*head, *lines]) + "\n")
        print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
