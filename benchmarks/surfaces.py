"""How long report, watch, what-if and mirrors take, and how large a report is.

    python benchmarks/surfaces.py [--ranks 64] [--incidents 100] [--times 3] [--what-ifs 10] [--mirror-steps 2000]

Two runs that nobody trained: a pipeline of `--ranks` ranks with a NaN and so many incidents, of which reports are written,
and one of 300 steps, of which a rule is asked about with other numbers. Commands are processes of their own, from start
to end; their processor time, imports among it, says more than the clock where others work on the machine. Mirrors: 500
values a step, in batches of 100 steps, until the mirror has written them.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sentinel.daemon.rules_api import RuleQueries, WhatIfRequest
from sentinel.judge.config import JudgingConfig
from sentinel.mirrors.mirror import Mirror, MirrorBatch, MirroredStep, MirrorParts
from sentinel.mirrors.tensorboard_mirror import TensorBoardConfig
from sentinel.mirrors.wandb_mirror import WandbConfig
from sentinel.testing import LossJump
from tests.support.large_run import write_wide_run
from tests.support.serving import catch_up, loaded_packs, served, small_run

VALUES, BATCH = 500, 100
"""Series of a mirror by default, and steps of a batch."""


class Took(NamedTuple):
    """One time."""

    clock_s: float
    processor_s: float
    """Of this process and of those that it started and that ended."""


def took(act: Callable[[], object]) -> Took:
    """Return how long something takes."""
    begun, before = time.perf_counter(), _processor_s()
    act()
    return Took(time.perf_counter() - begun, _processor_s() - before)


def _processor_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def command(*words: object) -> None:
    """Run a verb of `sentinel`."""
    done = subprocess.run(
        [sys.executable, "-m", "sentinel.cli", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"sentinel {' '.join(map(str, words))}: {done.returncode}: {done.stderr[-2000:]}")


def row(what: str, times: Sequence[Took], more: str = "") -> None:
    """Print a line of the table."""
    clock, processor = sorted(one.clock_s for one in times), [one.processor_s for one in times]
    p95 = clock[min(len(clock) - 1, math.ceil(0.95 * len(clock)) - 1)]
    print(f"| {what} | {len(times)} | {median(processor):.2f} | {median(clock):.2f} | {p95:.2f} | {more} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--incidents", type=int, default=100)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--what-ifs", type=int, default=10)
    parser.add_argument("--mirror-steps", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        wide, plain = folder / "wide", folder / "plain"
        write_wide_run(wide, num_ranks=options.ranks, num_scalars=20, num_incidents=options.incidents)
        small_run(plain).plant(LossJump(step=200)).write(300)
        load = "/".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"{os.cpu_count()} cores ({platform.machine()}), load {load}, Python {platform.python_version()}\n")
        target = folder / "report.html"
        print("| what | times | processor, s, p50 | clock, s, p50 | p95 | |\n|---|---|---|---|---|---|")
        for what, words in (("report of the run", (wide,)), ("report of its worst incident", (wide, "worst"))):
            times = [took(functools.partial(command, "report", *words, "-o", target)) for _ in range(options.times)]
            row(f"`sentinel report`: {what}", times, f"{target.stat().st_size / 1e6:.2f} MB")
        times = [took(lambda: command("watch", wide, "--once")) for _ in range(options.times)]
        row("`sentinel watch --once`", times)
        mirrors(folder, options.mirror_steps)
        what_ifs(plain, options.what_ifs)
    print(f"\nLoad at the end {'/'.join(f'{one:.1f}' for one in os.getloadavg())}, this script's own included.")


def what_ifs(run_dir: Path, num: int) -> None:
    """Ask what a rule with other numbers would have said, each time with others."""
    packs = loaded_packs()
    run = served(run_dir, packs=packs)
    catch_up(run)
    queries = RuleQueries(packs)
    asked = [WhatIfRequest(run=run_dir.name, rule="loss-spike", numbers={"k": 5.0 + at}) for at in range(num)]
    with mock.patch("sentinel.daemon.what_if_process.LIMIT_S", 600.0):
        # However much else is at work, the whole run is judged again.
        times = [took(functools.partial(queries.what_if, run, one, JudgingConfig())) for one in asked]
    if times:
        row("what-if over 300 steps", times)
    run.close()


def mirrors(folder: Path, num_steps: int) -> None:
    """Write steps into mirrors that need no server."""
    names = [f"value.{at}" for at in range(VALUES)]
    for config in (TensorBoardConfig(), WandbConfig()):
        run_dir = folder / config.name
        run_dir.mkdir()
        mirror = config.build(MirrorParts(run=config.name, key="5e171e1", run_dir=run_dir, mark=""))

        def write(mirror: Mirror = mirror) -> None:
            for first in range(0, num_steps, BATCH):
                steps = [
                    MirroredStep(attempt=0, step=at, time=1e9 + at, values=tuple((name, float(at)) for name in names))
                    for at in range(first, first + BATCH)
                ]
                mirror.write(MirrorBatch(steps=steps))
            mirror.close(is_over=True)

        one = took(write)
        num = num_steps * VALUES
        row(f"mirror `{config.name}`, {num:,} values", [one], f"{num / one.processor_s:,.0f} values a second of processor")


if __name__ == "__main__":
    main()
