"""How long each export format takes, and its memory: by processes, in one pass and in two.

usage: export.py [--steps 200] [--rounds 3]

A run of 4 ranks (2 stages, 2 replicas) is written once; then every contender exports it in a process of its own, in turns.
Times are minima over the rounds, memory is the process's peak. `resumed` is the same run with a second life of each rank
that repeats no step: what a first pass costs. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sentinel.testing import SyntheticRun

FORMS = ("csv", "jsonl", "parquet", "tensorboard", "msprobe-csv", "megatron-stats")


def once(run: Path, form: str, scratch: Path, *arguments: str) -> tuple[float, float, int]:
    """Return (seconds, MiB at the peak, bytes written) of one export in a process of its own."""
    out = scratch / "out"
    command = [sys.executable, "-m", "sentinel.cli", "export", str(run), "--format", form, "-o", str(out), "--quiet"]
    command += arguments
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"{form}: {process.stderr.read().decode() if process.stderr else status}")
    paths = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in paths)
    out.unlink() if out.is_file() else shutil.rmtree(out)
    return seconds, usage.ru_maxrss / 1024, num_bytes


def shares(run: Path, form: str, scratch: Path) -> tuple[float, float]:
    """Return CPU seconds of the process that reads and writes, and of the two that encode: what more processes can share."""
    from sentinel.cli.main import run_cli

    def spent() -> list[float]:
        return [resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]

    before = spent()
    out = scratch / "out"
    if run_cli(["export", str(run), "--format", form, "-o", str(out), "--quiet", "--jobs", "2"]):
        raise SystemExit(form)
    after = spent()
    out.unlink() if out.is_file() else shutil.rmtree(out)
    return after[0] - before[0], after[1] - before[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        run = SyntheticRun(scratch / "run", pp=2, dp=2, layers=24, d_model=64, elements=8)
        run.write(given.steps)
        resumed = SyntheticRun(scratch / "resumed", pp=2, dp=2, layers=24, d_model=64, elements=8)
        resumed.write(given.steps // 2)
        resumed.restart(resumed.step, attempt=1)
        resumed.write(given.steps - given.steps // 2)
        num_rows = run.rows_per_step * given.steps
        contenders: dict[str, tuple[Path, str, tuple[str, ...]]] = {}
        for form in FORMS:
            contenders[form] = (scratch / "run", form, ())
            contenders[f"{form}, 2 processes"] = (scratch / "run", form, ("--jobs", "2"))
        contenders["csv, resumed"] = (scratch / "resumed", "csv", ())
        contenders["parquet --per-rank"] = (scratch / "run", "parquet", ("--per-rank",))
        contenders["nothing (one step)"] = (scratch / "run", "csv", ("--steps", "0"))
        found: dict[str, list[tuple[float, float, int]]] = {label: [] for label in contenders}
        for _ in range(given.rounds):
            for label, (path, form, arguments) in contenders.items():
                found[label].append(once(path, form, scratch, *arguments))
        parts = {form: shares(scratch / "run", form, scratch) for form in FORMS}
        spool = sum(path.stat().st_size for path in (scratch / "run").rglob("*.spool"))
    load = "/".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{given.steps} steps, {num_rows} recorded rows, {spool / 2**20:.0f} MiB of spool; {given.rounds} rounds")
    print(f"{os.cpu_count()} cores, load {load} (1/5/15 min) at the end, this script's own included")
    print(f"{'contender':32} {'s (min)':>8} {'s (max)':>8} {'rows/s':>9} {'peak MiB':>9} {'MiB out':>8}")
    for label, several in found.items():
        seconds = [one[0] for one in several]
        best = min(seconds)
        peak, size = max(one[1] for one in several), several[0][2] / 2**20
        print(f"{label:32} {best:8.2f} {max(seconds):8.2f} {num_rows / best:9.0f} {peak:9.0f} {size:8.1f}")
    print(f"\n{'with --jobs 2, CPU seconds':32} {'reading':>8} {'encoding':>9}")
    for form, (reading, encoding) in parts.items():
        print(f"{form:32} {reading:8.2f} {encoding:9.2f}")
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
