"""Is the planted origin named first? NaN in every module x {forward, backward} x micro-batch of the demo's model.

One run of real processes: cell k strikes at step k + FIRST_STEP, the trainer skips the bad step, so every cell meets a
healthy model. Afterwards the judged run is read as a user would read it: the anomalies of one step, in causal order.

    python benchmarks/origin_sweep.py                    # all layouts, monitoring on, late and off; prints a table
    python benchmarks/origin_sweep.py --layout pp2dp2 --monitoring off --every 10 --json

With monitoring on, or switched on late, the first cause must name module, rank and micro-batch; off, segment, rank and
micro-batch. A fault that touches nothing but a parameter's gradient (an embedding's, in backward) must name the parameter;
its ranks were already reduced. Where a tensor-parallel group exchanges data before anything can be seen, its ranks are first
causes together.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import torch

from sentinel.anomaly import Anomaly
from sentinel.order.causes import leading_causes
from sentinel.order.origin import origin
from sentinel.rules.language.loader import load_pack

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "gpt"
FIRST_STEP = 2
NUM_LAYERS, NUM_MICRO_STEPS = 4, 4
ALL_KINDS = ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]
EXCHANGING = (".attn.proj", ".mlp.fc2")
"""Modules that in forward exchange data within a tensor-parallel group, before what they hand on can be seen."""
INNER = ("", ".ln1", ".attn", ".attn.qkv", ".attn.proj", ".ln2", ".mlp", ".mlp.fc1", ".mlp.gelu", ".mlp.fc2")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the four ranks are laid out."""

    name: str
    arguments: tuple[str, ...]
    num_stages: int
    dp: int
    tp: int = 1

    def stage_of(self, module: str) -> int:
        """Return the pipeline rank that holds `module`."""
        if module in ("tok", "pos"):
            return 0
        if module in ("norm", "head"):
            return 1
        layer = int(module.split(".")[1])
        return layer * self.num_stages // NUM_LAYERS % 2

    def rank_of(self, module: str, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank that holds this copy of `module`."""
        return (self.stage_of(module) * self.dp + dp_rank) * self.tp + tp_rank


LAYOUTS = {
    one.name: one
    for one in (
        Layout("pp2dp2", (), 2, 2),
        Layout("interleaved", ("--schedule", "interleaved1f1b"), 4, 2),
        Layout("gpipe", ("--schedule", "gpipe"), 2, 2),
        Layout("pp2tp2", ("--tp", "2"), 2, 1, 2),
    )
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One planted fault."""

    step: int
    module: str
    phase: str
    micro_step: int
    dp_rank: int
    tp_rank: int

    def segment(self, layout: Layout) -> str:
        """Return the segment of the black box that holds the module."""
        if self.module in ("tok", "pos"):
            return "stage0.stem"
        last = f"stage{layout.num_stages - 1}.head"
        return last if self.module in ("norm", "head") else ".".join(self.module.split(".")[:2])

    @property
    def touches_parameter_only(self) -> bool:
        """Nothing but a parameter's gradient goes bad."""
        return self.phase == "backward" and self.module in ("tok", "pos")


def cells(layout: Layout, every: int) -> list[Cell]:
    """Return every `every`-th cell. Replicas take turns."""
    modules = ["tok", "pos", *(f"blocks.{n}{inner}" for n in range(NUM_LAYERS) for inner in INNER), "norm", "head"]
    coordinates = [
        (module, phase, micro_step)
        for module in modules
        for phase in ("forward", "backward")
        for micro_step in range(NUM_MICRO_STEPS)
    ]
    return [
        Cell(FIRST_STEP + at, *one, dp_rank=at % layout.dp, tp_rank=at % layout.tp)
        for at, one in enumerate(coordinates[::every])
    ]


def train(
    layout: Layout,
    planted: list[Cell],
    folder: Path,
    *,
    is_monitored: bool,
    is_sudden: bool,
    extra: list[str],
    factors: list[float] | None = None,
    is_late: bool = False,
) -> Path:
    """Run the trainer with a daemon beside it; return the run's directory.

    factors: no NaN, but so many times as large. is_late: monitoring is switched on where the faults begin.
    """
    faults = [
        {
            "module": cell.module, "phase": cell.phase, "micro_step": cell.micro_step, "steps": [cell.step],
            "dp_rank": cell.dp_rank, "tp_rank": cell.tp_rank, "is_sudden": is_sudden,
        }
        for cell in planted
    ]  # fmt: skip
    for fault, factor in zip(faults, factors or (), strict=False):
        fault.update(type="scale", factor=factor)
    (folder / "faults.json").write_text(json.dumps(faults))
    # Escalation would switch monitoring on by itself: here the two promises are looked at one at a time.
    config = {"kinds": ALL_KINDS if is_monitored else ALL_KINDS[:2], "allow_commands": []}
    config |= {"start_step": FIRST_STEP} if is_late else {}
    (folder / "monitor.yaml").write_text(json.dumps(config))
    write_pack(folder, is_finite=bool(factors))
    command = [
        sys.executable, "-m", "sentinel.cli", "run", "--dir", str(folder), "--name", "run", "--quiet",
        "--rules", str(folder / "pack.yaml"), "--drain-s", "120", "--",
        sys.executable, str(EXAMPLE / "launch.py"), "-n", "4", "--", str(EXAMPLE / "train.py"), *layout.arguments,
        "--steps", str(planted[-1].step + 3), "--print-every", "100000", "--micro-batches", str(NUM_MICRO_STEPS),
        "--layers", str(NUM_LAYERS), "--faults", str(folder / "faults.json"),
        "--sentinel-config", str(folder / "monitor.yaml"), *extra,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("SENTINEL_DISABLE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"the run ended with exit code {done.returncode}\n{done.stderr[-4000:]}")
    return folder / "run"


def write_pack(folder: Path, *, is_finite: bool) -> None:
    """Write the rules of a run: the default pack, each plant an episode of its own, however soon it follows another."""
    # A blow-up on one tensor-parallel rank leaves copies of weights behind that differ for good: that is said once.
    lasting = ("replica-divergence",)
    names = [rule.name for rule in load_pack([]).rules if rule.name not in lasting] if is_finite else ["non-finite"]
    (folder / "pack.yaml").write_text("rules:\n" + "".join(f"  - {{name: {n}, episode_quiet_steps: 0}}\n" for n in names))


def read(run_dir: Path) -> dict[int, list[Anomaly]]:
    """Return the onsets of each step."""
    decode = msgspec.json.Decoder(Anomaly).decode
    by_step = defaultdict(list)
    for path in sorted((run_dir / "anomalies").glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            anomaly = decode(line)
            if anomaly.event == "onset":
                by_step[anomaly.step].append(anomaly)
    return by_step


def outcome(layout: Layout, cell: Cell, found: list[Anomaly], *, is_monitored: bool) -> str:
    """Return an empty string when the first cause names what was planted, else what it named."""
    roots = leading_causes(found)
    if not roots:
        return "nothing was found"
    first = origin(found[roots[0]], found)
    rank = layout.rank_of(cell.module, cell.dp_rank, cell.tp_rank)
    exchanges = not is_monitored or (cell.phase == "forward" and cell.module.endswith(EXCHANGING))
    if layout.tp > 1 and exchanges and rank in {found[at].rank for at in roots}:
        # Where a tensor-parallel group sums its parts before they can be seen (at the end of a block, or of the module
        # itself), all its ranks show the same fault at the same moment: the planted one must be among the first causes.
        rank = first.rank if first.rank is not None else rank
    if cell.touches_parameter_only:
        is_right = first.module == cell.module and first.kind == "wgrad"
    elif is_monitored:
        # A block is a segment too: then the segment's name is the module's.
        is_right = (first.module or first.name, first.rank, first.micro_step) == (cell.module, rank, cell.micro_step)
    else:
        is_right = (first.segment, first.rank, first.micro_step) == (cell.segment(layout), rank, cell.micro_step)
    if is_right:
        return ""
    return (
        f"{first.kind} of {first.name} (module {first.module or '?'}, segment {first.segment or '?'}), "
        f"rank {first.rank}, micro-step {first.micro_step}; expected rank {rank}"
    )


def first_by_call_id(found: list[Anomaly]) -> Anomaly:
    """Return what sorting by call_id alone would put first: the order that only one rank's own clock knows."""
    return min(found, key=lambda one: (one.call_id is None, one.call_id or 0, one.rank or 0))


def sweep(
    layout: Layout, *, monitoring: str, is_sudden: bool, every: int, extra: list[str], keep: Path | None
) -> dict[str, object]:
    """Run one layout and return its figures."""
    planted = cells(layout, every)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="origin-sweep-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        is_monitored, is_late = monitoring != "off", monitoring == "late"
        run = train(layout, planted, folder, is_monitored=is_monitored, is_sudden=is_sudden, extra=extra, is_late=is_late)
        by_step = read(run)
    wrong, by_call_id_wrong, kinds = [], 0, Counter()
    for cell in planted:
        found = by_step.get(cell.step, [])
        said = outcome(layout, cell, found, is_monitored=is_monitored)
        kinds[cell.phase, not said] += 1
        if said:
            wrong.append({**dataclasses.asdict(cell), "said": said})
        naive = first_by_call_id(found) if found else None
        rank = layout.rank_of(cell.module, cell.dp_rank, cell.tp_rank)
        by_call_id_wrong += naive is None or (naive.rank is not None and naive.rank != rank)
    strays = sorted(set(by_step) - {cell.step for cell in planted})
    return {
        "layout": layout.name,
        "monitoring": monitoring,
        "sudden": is_sudden,
        "cells": len(planted),
        "forward_right": kinds["forward", True],
        "backward_right": kinds["backward", True],
        "right": len(planted) - len(wrong),
        "wrong": wrong,
        "call_id_alone_names_another_rank": by_call_id_wrong,
        "steps_with_anomalies_but_nothing_planted": [
            step for step in strays if any(one.value_text or one.statistic == "nans" for one in by_step[step])
        ],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant a NaN everywhere in turn; is the origin named first?")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), action="append", help="default: all")
    parser.add_argument("--monitoring", choices=("on", "late", "off", "all"), default="all")
    parser.add_argument("--every", type=int, default=1, help="take every N-th cell; default 1: all")
    parser.add_argument(
        "--sudden", action="store_true", help="broken code runs only when it strikes, and changes the graph in that step"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    parser.add_argument("--keep", type=Path, help="leave the run's files in this folder (one layout, one monitoring)")
    parser.add_argument("trainer", nargs="*", help="further arguments of the trainer, behind --")
    options = parser.parse_args()
    results = [
        sweep(
            LAYOUTS[name],
            monitoring=monitored,
            is_sudden=options.sudden,
            every=options.every,
            extra=options.trainer,
            keep=options.keep,
        )
        for name in options.layout or LAYOUTS
        for monitored in (("on", "late", "off") if options.monitoring == "all" else (options.monitoring,))
    ]
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        print("layout       monitoring  cells  right  forward  backward  call_id alone on another rank  seconds")
        for one in results:
            print(
                f"{one['layout']:<12} {one['monitoring']:<10} {one['cells']:>6} {one['right']:>6} {one['forward_right']:>8} "
                f"{one['backward_right']:>9} {one['call_id_alone_names_another_rank']:>30} {one['seconds']:>8}"
            )
            for cell in one["wrong"]:
                print(f"    {cell}")
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.datetime.now(datetime.UTC).date()}-origin_sweep.json"
        path.parent.mkdir(exist_ok=True)
        notified = {"command": "python benchmarks/origin_sweep.py " + " ".join(sys.argv[1:]), "torch": torch.__version__}
        path.write_text(json.dumps({**notified, "cores": os.cpu_count(), "results": results}, indent=1) + "\n")
    return 0 if all(one["right"] == one["cells"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
