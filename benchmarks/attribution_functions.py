"""Partial functions outside their domain, in modules that really train: what is said, and whether the function is named.

    python benchmarks/attribution_functions.py [--faults log] [--only-borders] [--write]

Two gloo ranks train a small residual network; from step 40 on, in one step of ten, one element of one rank's data leaves the
domain of one function of one module, and the step is skipped. Each case is recorded twice: with every module's kinds on, and
with the black box alone. Labels were written before a diagnosis looked for functions. A label is the verdicts that are right
and the word that must be among the evidence; `hardware` is right nowhere but for the flipped bit.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attribution import gravest
from torch import nn

import sentinel
from sentinel.anomaly import Severity
from sentinel.judge.judge import Judge
from sentinel.judge.recorded import recorded_views
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
AT, EVERY, STEPS, WIDTH, SIZE = 40, 10, 64, 32, 8
STRUCK = 1
"""The rank whose data leave the domain."""


class Inner(nn.Module):
    """A module that computes one function of what comes in. shift: added to one element, 0 but in the fault's steps."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.shift = function, 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        at = torch.zeros_like(hidden)
        at[0, 0] = self.shift
        return self.function(hidden, at)


class Direct(nn.Module):
    """The function of the module's own input, and nothing else."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.log()


class Block(nn.Module):
    """One residual block; the last of the three holds the function."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = inner if inner is not None else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(self.norm(hidden)))
        return hidden + 0.1 * self.down(self.gate(inner))


class Net(nn.Module):
    """Blocks in a row. inputs: [SIZE, WIDTH]."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inner if at == 1 else None) for at in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def masked_softmax(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Weights over what is not masked: all of the first row is, where it is struck."""
    mask = (at != 0).any(-1, keepdim=True).expand_as(x)
    return x.masked_fill(mask, -math.inf).softmax(-1)


def selected_mean(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The mean of what a mask selects: of nothing, where it is struck."""
    return x * x[(at.abs().sum() == 0).expand_as(x)].mean()


class Case(NamedTuple):
    """One fault and its label."""

    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    right: set[str]
    word: str = ""
    shift: float = 0.0
    strike: str = ""


PROGRAM = {"program"}
MAY = {"program", "unknown"}
CASES: dict[str, Case] = {
    "log of a negative": Case(lambda x, at: (x + 2.0 + at).log(), PROGRAM, "log", -9.0),
    "log of zero": Case(lambda x, at: (x.relu() * (1.0 - at) + 1.0 - at).log(), PROGRAM, "log", 1.0),
    "log of the module's own input": Case(None, PROGRAM, "log", -9.0, "direct"),
    "square root of a negative": Case(lambda x, at: (x + 2.0 + at).sqrt(), PROGRAM, "sqrt", -9.0),
    "inverse square root of zero": Case(lambda x, at: x * (1.0 - at).rsqrt(), PROGRAM, "rsqrt", 1.0),
    "power of a negative": Case(lambda x, at: (x + 2.0 + at).pow(0.3), PROGRAM, "pow", -9.0),
    "division by zero": Case(lambda x, at: x / (1.0 - at * (1.0 + 0.0 * x)), MAY, "div", 1.0),
    "division of a row by its sum": Case(lambda x, at: x.abs() * (1.0 - at) / (x.abs() * (1.0 - at.sum())).sum(-1, True),
                                         MAY, "div", 1.0),
    "arc cosine beyond 1": Case(lambda x, at: (0.9 * x + at).acos(), PROGRAM, "acos", 5.0),
    "exponential overflows": Case(lambda x, at: (x + at).exp(), MAY, "exp", 200.0),
    "softmax of all -inf": Case(masked_softmax, MAY, "softmax", 1.0),
    "mean of an empty selection": Case(selected_mean, MAY, "mean", 1.0),
    "deviation of one element": Case(lambda x, at: x * x[: 1 if bool(at.any()) else 4].std(0), MAY, "", 1.0),
    "unit vector of a zero vector": Case(lambda x, at: x / (x * (1.0 - at.sum())).norm(dim=-1, keepdim=True),
                                         MAY, "div", 1.0),
    "square root of zero, in the backward": Case(lambda x, at: ((x + 2.0) * (1.0 - at)).sqrt(), MAY, "sqrt", 1.0),
    "guarded: log(x^2 + eps), and a NaN of nobody": Case(lambda x, at: (x.pow(2) + 1e-3).log(), {"unknown"}, "", 0.0, "nan"),
    "guarded: rms norm, and a NaN of nobody": Case(
        lambda x, at: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(), {"unknown"}, "", 0.0, "nan"),
    "a NaN of nobody, no function": Case(None, {"unknown"}, "", 0.0, "nan"),
    "NaN in the input": Case(None, {"batch"}, "", 0.0, "input"),
    "exponent bit of a weight": Case(None, {"hardware"}, "", 0.0, "flip"),
    "healthy log": Case(lambda x, at: (x + 2.0 + at).log(), {"nothing"}),
    "healthy softmax and division": Case(lambda x, at: masked_softmax(x, at) / (x.abs() + 0.1), {"nothing"}),
}  # fmt: skip


def train(folder: Path, names: list[str]) -> None:
    """One of the ranks: every case in turn, with all modules measured and with the black box alone."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for number, name in enumerate(names):
        for kinds in ("all", "borders"):
            run_one(folder, f"{number}-{kinds}", CASES[name], kinds, rank)


def run_one(folder: Path, run: str, case: Case, kinds: str, rank: int) -> None:
    """Train one case."""
    torch.manual_seed(1)
    inner = Inner(case.function) if case.function is not None else None
    module: nn.Module | None = Direct() if case.strike == "direct" else inner
    model = Net(module)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = torch.Generator().manual_seed(7 + rank)
    struck: list[bool] = [False]
    if case.strike == "direct":
        model.blocks[1].up.register_forward_hook(lambda *_: None)
        before = model.blocks[1].forward

        def with_positive(hidden: torch.Tensor) -> torch.Tensor:
            block = model.blocks[1]
            inner = torch.tanh(block.up(block.norm(hidden))) + 2.0
            shift = torch.zeros_like(inner)
            shift[0, 0] = case.shift if struck[0] else 0.0
            return hidden + 0.1 * block.down(block.gate(inner + shift))

        model.blocks[1].forward = with_positive  # type: ignore[method-assign]
        assert before is not None
    if case.strike == "nan":
        spot = inner if inner is not None else model.blocks[1].up

        def spoil(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
            if not struck[0]:
                return output
            at = torch.zeros_like(output)
            at[0, 0] = math.nan
            return output + at

        spot.register_forward_hook(spoil)
    wanted = ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"] if kinds == "all" else ["param", "wgrad"]
    monitor = sentinel.attach(model, optimizer, {"directory": str(folder), "run": run, "kinds": wanted})
    for step in range(STEPS):
        struck[0] = rank == STRUCK and step >= AT and (step - AT) % EVERY == 0
        if inner is not None:
            inner.shift = case.shift if struck[0] else 0.0
        inputs = torch.randn(SIZE, WIDTH, generator=data)
        targets = (inputs[:, :4] * 3.0).argmax(-1)
        if case.strike == "input" and struck[0]:
            inputs[0] = math.nan
        if case.strike == "flip" and struck[0] and step == AT:
            model.blocks[1].up.weight.data.view(torch.int32).view(-1)[77] ^= 1 << 27
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if bool(torch.isfinite(norm)):
            optimizer.step()
        monitor.log(loss=loss, grad_norm=norm, lr=1e-3)
        monitor.step()
    monitor.detach()


def run_ranks(folder: Path, names: list[str]) -> None:
    """Let two ranks train."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, __file__, "--rank-of", str(folder), "--faults", *names]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    ended = [one.wait() for one in ranks]
    if any(ended):
        raise SystemExit("a rank failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", help="names, or parts of them; default: all")
    parser.add_argument("--keep", type=Path, help="where recordings lie, and stay; those that are there are judged again")
    parser.add_argument("--write", action="store_true", help="write the dated result")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank_of:
        train(options.rank_of, options.faults)
        return
    names = [name for name in CASES if not options.faults or any(word in name for word in options.faults)]
    lines = [f"{'kinds':8} {'fault':46} {'verdict':10} right  named  ever"]
    good = named = total = wanted = wrong = 0
    with tempfile.TemporaryDirectory(prefix="sentinel-functions-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "0-all").exists():
            run_ranks(folder, names)
        for number, name in enumerate(names):
            case = CASES[name]
            for kinds in ("all", "borders"):
                judge = Judge(load_pack())
                revisions, num_rows = [], 0
                for view, decision in recorded_views(RunPaths.of(folder / f"{number}-{kinds}"), None, recompute=True):
                    revisions += judge.judge(decision, view).incidents
                    num_rows += view.num_rows
                assert num_rows, name
                one = gravest([each for each in revisions if each.opened_step >= AT])
                if case.right == {"nothing"} and one is not None and one.severity is Severity.INFO:
                    one = None  # What is written down is told to nobody.
                suspected = one.suspected if one is not None else "nothing"
                ever = {each.suspected for each in revisions}
                is_right = suspected in case.right
                is_named = one is not None and bool(case.word) and any(case.word in line for line in one.evidence)
                total, good = total + 1, good + is_right
                wanted, named = wanted + bool(case.word), named + is_named
                wrong += "hardware" in ever - case.right
                word = "yes" if is_named else "NO" if case.word else ""
                lines.append(
                    f"{kinds:8} {name:46} {suspected:10} {'yes' if is_right else 'NO':5}  {word:5}  {' '.join(sorted(ever))}"
                )
                print(lines[-1], flush=True)
                for line in one.evidence[:5] if one is not None else ():
                    print(f"         {line}", flush=True)
    lines += [
        "",
        f"right: {good} of {total}; the function named: {named} of {wanted}; wrong hardware verdicts, ever: {wrong}",
    ]
    print(lines[-1])
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-attribution-functions.txt"
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
