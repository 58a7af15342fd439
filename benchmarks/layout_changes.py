"""What it costs when the set of measured tensors changes: models whose modules do not all run in every step.

    python benchmarks/layout_changes.py                                # this tree
    python benchmarks/layout_changes.py --before DIR --write           # beside the tree in DIR, in turns; writes results

Each case trains a small model with every probe of modules and weights on, then its recording is read and judged from the
beginning. Counted: frames that describe tensors (whole, and changes), their bytes, the layouts that the reader made;
processor time of the training thread in ending a step and of the writer thread a step, of which the layouts are a part;
processor time of following, assembling, merging and judging a step, the first `WARM` steps left out. Minima of the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREE = Path(os.environ.get("SENTINEL_TREE", ROOT))
if TREE != ROOT or "SENTINEL_TREE" in os.environ:
    sys.path.insert(0, str(TREE))
sys.path.insert(0, str(ROOT / "benchmarks"))

import torch  # noqa: E402
from torch import nn  # noqa: E402

WARM = 4
"""Steps in which every model shows its usual tensors for the first time; their layouts are counted apart."""
WIDTH = 32
KINDS = [
    "param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in", "saturation", "update", "exp_avg", "exp_avg_sq",
]  # fmt: skip

Step = Callable[[int], torch.Tensor]
"""Number of a step -> its loss, gradients formed."""


class Block(nn.Module):
    """A residual block. hidden: [tokens, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.fc2(self.act(self.fc1(self.norm(hidden))))


class Deep(nn.Module):
    """A stack of blocks with a head, of which a call runs the blocks that it is told, and ends with the head it is told."""

    def __init__(self, num_blocks: int = 16, num_heads: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(num_heads))

    def forward(self, hidden: torch.Tensor, which: list[int] | None = None, head: int = 0) -> torch.Tensor:
        hidden = self.stem(hidden)
        for at in range(len(self.blocks)) if which is None else which:
            hidden = self.blocks[at](hidden)
        return self.heads[head](hidden)


class Sparse(nn.Module):
    """Top-1 experts, of which those without a token are not called. hidden: [tokens, WIDTH]."""

    def __init__(self, num_experts: int = 24) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(Block() for _ in range(num_experts))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        share = self.gate(hidden).softmax(-1)
        weight, chosen = share.max(-1)
        out = torch.zeros_like(hidden)
        for at in chosen.unique().tolist():
            token = (chosen == at).nonzero()[:, 0]
            out = out.index_add(0, token, self.experts[at](hidden[token]) * weight[token, None])
        return self.head(out)


def _data(step: int, tokens: int = 16) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(step))


def moe(rng: random.Random) -> tuple[nn.Module, Step]:
    """Experts without a token are not called, and those with some get other numbers of them in each step."""
    model = Sparse()
    return model, lambda step: model(_data(step)).square().mean()


def depth(rng: random.Random) -> tuple[nn.Module, Step]:
    """Stochastic depth: each block is left out with probability 0.3."""
    model = Deep()
    return model, lambda step: model(_data(step), [at for at in range(16) if rng.random() > 0.3]).square().mean()


def early_exit(rng: random.Random) -> tuple[nn.Module, Step]:
    """A step ends after a random number of blocks, with the head of that depth."""
    model = Deep(num_heads=16)

    def step_(step: int) -> torch.Tensor:
        until = rng.randint(1, 16)
        return model(_data(step), list(range(until)), until - 1).square().mean()

    return model, step_


def alternating(rng: random.Random) -> tuple[nn.Module, Step]:
    """Two losses through two heads take turns, each over its own half of the blocks."""
    model = Deep(num_heads=2)
    return model, lambda step: model(_data(step), list(range(step % 2, 16, 2)), step % 2).square().mean()


def ragged(rng: random.Random) -> tuple[nn.Module, Step]:
    """Micro-batches of other lengths in each step, and other numbers of them."""
    model = Deep()

    def step_(step: int) -> torch.Tensor:
        losses = [model(_data(step, rng.randint(4, 32))).square().mean() for _ in range(rng.randint(1, 2))]
        return torch.stack(losses).mean()

    return model, step_


def steady(rng: random.Random) -> tuple[nn.Module, Step]:
    """All blocks in all steps: what the others would cost without changes."""
    model = Deep()
    return model, lambda step: model(_data(step)).square().mean()


def toggled(rng: random.Random) -> tuple[nn.Module, Step]:
    """Monitoring of modules goes on and off, as escalation does: see `record`."""
    return steady(rng)


CASES: dict[str, Callable[[random.Random], tuple[nn.Module, Step]]] = {
    "steady": steady, "moe": moe, "depth": depth, "early_exit": early_exit, "alternating": alternating, "ragged": ragged,
    "toggled": toggled,
}  # fmt: skip


def record(folder: Path, case: str, num_steps: int) -> dict[str, float]:
    """Train with Sentinel attached; return what that took."""
    import sentinel

    torch.manual_seed(0)
    model, step_ = CASES[case](random.Random(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    kinds = ["param", "wgrad"] if case == "toggled" else KINDS
    monitor = sentinel.attach(model, optimizer, {"directory": str(folder), "run": "r", "kinds": kinds})
    ending, writing, training = [], [], []
    for step in range(num_steps):
        if case == "toggled" and step % 6 == 3:
            monitor.enable(["activation", "dgrad", "saturation"], for_steps=2)
        everywhere, here = time.process_time_ns(), time.thread_time_ns()
        step_(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = time.thread_time_ns()
        monitor.log(loss=1.0 / (step + 1))
        monitor.step()
        after = time.thread_time_ns()
        monitor.session.handover.flush()
        ending.append(after - before)
        training.append(after - here)
        writing.append(time.process_time_ns() - everywhere - (time.thread_time_ns() - here))
    monitor.detach()
    late = slice(WARM, None)
    return {
        "end_us": statistics.fmean(ending[late]) / 1e3, "writer_us": statistics.fmean(writing[late]) / 1e3,
        "step_us": statistics.fmean(training[late]) / 1e3,
    }  # fmt: skip


def count(folder: Path) -> dict[str, float]:
    """Return frames and bytes of the recording's spool."""
    from sentinel.wire.frame import FrameType
    from sentinel.wire.spool_reader import SpoolReader

    reader = SpoolReader(next((folder / "r" / "spool").iterdir()))
    described = changes = described_bytes = late_bytes = all_bytes = step = late = 0
    while frames := reader.poll(final=True):
        for frame in frames:
            size = memoryview(frame.payload).nbytes
            all_bytes += size
            step = max(step, frame.header.step)
            if frame.header.type == FrameType.DESCRIPTOR or frame.header.type == 9:
                described += frame.header.type == FrameType.DESCRIPTOR
                changes += frame.header.type == 9
                described_bytes += size
                late += step >= WARM
                late_bytes += size if step >= WARM else 0
    return {
        "whole": described, "changes": changes, "late": late, "described_kB": described_bytes / 1e3,
        "late_kB": late_bytes / 1e3, "spool_kB": all_bytes / 1e3,
    }  # fmt: skip


def read(folder: Path) -> dict[str, float]:
    """Read and judge the recording; return processor milliseconds a step, and layouts."""
    from sentinel.judge.judge import Judge
    from sentinel.judge.recorded import recorded_views
    from sentinel.rules.language.loader import load_pack
    from sentinel.store.run_paths import RunPaths

    judge, layouts, took, sent = Judge(load_pack()), [], [], 0
    before = time.process_time_ns()
    for view, _ in recorded_views(RunPaths.of(folder / "r"), None, recompute=True):
        judge.judge(view.decision, view)
        sent += view.num_expected
        if not any(one is view.layout for one in layouts):
            layouts.append(view.layout)
        now = time.process_time_ns()
        took.append(now - before)
        before = now
    assert judge.num_rows_judged == sent, f"{judge.num_rows_judged} rows judged, {sent} were sent"
    return {
        "layouts": len(layouts), "tensors": len(layouts[-1].tensors), "rows": sent / len(took),
        "read_ms": statistics.fmean(took[WARM:]) / 1e6, "read_median_ms": statistics.median(took[WARM:]) / 1e6,
    }  # fmt: skip


def measure(case: str, num_steps: int) -> dict[str, float]:
    """Return the figures of one case."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sentinel-layout-changes-") as scratch:
        folder = Path(scratch)
        reported = {**record(folder, case, num_steps), **count(folder)}
        read(folder)  # Once to warm up: imports, caches of the disk.
        return {**reported, **read(folder)}


Figures = dict[str, dict[str, dict[str, float]]]
"""Case -> tree -> figures."""


def in_turns(trees: dict[str, Path], cases: list[str], rounds: int, num_steps: int) -> Figures:
    """Return the figures: of times the least of the rounds."""
    found: Figures = {case: {} for case in cases}
    for turn in range(rounds):
        for case in cases:
            for name in sorted(trees, reverse=bool(turn % 2)):
                done = subprocess.run(
                    [sys.executable, __file__, "--one", case, "--steps", str(num_steps)], check=True, capture_output=True,
                    text=True, env={**os.environ, "SENTINEL_TREE": str(trees[name])},
                )  # fmt: skip
                reported = json.loads(done.stdout.splitlines()[-1])
                known = found[case].setdefault(name, reported)
                found[case][name] = {key: min(known[key], value) for key, value in reported.items()}
    return found


COLUMNS = (
    ("whole", "whole descriptions", "{:.0f}"), ("changes", "changes", "{:.0f}"), ("late", "of both after step 4", "{:.0f}"),
    ("late_kB", "their kB", "{:.1f}"), ("spool_kB", "spool kB", "{:.0f}"), ("layouts", "layouts read", "{:.0f}"),
    ("tensors", "tensors", "{:.0f}"), ("end_us", "end of step, us", "{:.0f}"), ("writer_us", "writer, us a step", "{:.0f}"),
    ("step_us", "whole step, us", "{:.0f}"), ("read_ms", "reading, ms a step", "{:.2f}"),
    ("read_median_ms", "median", "{:.2f}"),
)  # fmt: skip


def table(found: Figures) -> str:
    """Return the figures as a table."""
    lines = [f"| case | tree | {' | '.join(title for _, title, _ in COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for case, by_tree in found.items():
        for name, reported in by_tree.items():
            cells = " | ".join(form.format(reported[key]) for key, _, form in COLUMNS)
            lines.append(f"| {case} | {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another tree, measured in turns with this one")
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-layout_changes.md")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.steps)))
        return
    trees = {**({"before": options.before} if options.before else {}), "now": ROOT}
    found = in_turns(trees, options.cases, options.rounds, options.steps)
    text = table(found)
    print(text)
    if options.write:
        how = f"{options.steps} steps, least of {options.rounds} rounds, {os.cpu_count()} cores, torch {torch.__version__}"
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-layout_changes.md"
        path.write_text(f"# Layouts that change\n\n`python benchmarks/layout_changes.py`; {how}\n\n{text}\n")


if __name__ == "__main__":
    main()
