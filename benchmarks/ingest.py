"""Records a second from spool files to merged steps: follow, assemble, merge; one core.

usage: ingest.py [--ranks 8] [--layers 64] [--steps 200] [--directory DIR]

Writes the spools of a run with planted nothing first, then times reading them to `StepView.stats` of every step, with
decisions encoded as the journal would have them. Prints a table: all together, then each part alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

import msgspec

from sentinel.ingest.follow import RunFollower
from sentinel.ingest.steps import StepAssembler
from sentinel.testing import SyntheticRun


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        run = SyntheticRun(Path(name) / "run", dp=options.ranks, layers=options.layers, micro_steps=1, elements=4)
        run.write(options.steps)
        run.end()
        num_records = run.rows_per_step * options.steps
        print(
            f"{options.ranks} ranks x {run.num_rows(0)} rows x {options.steps} steps = {num_records} records of 136 B, "
            f"{os.cpu_count()} CPUs, {platform.machine()}"
        )
        for what in ("follow", "follow, assemble", "follow, assemble, merge"):
            best = min(once(run.directory, what, num_records) for _ in range(3))
            print(f"{what:>26}  {num_records / best / 1e6:8.2f} M records/s  {1e3 * best / options.steps:8.3f} ms a step")
    return 0


def once(run_dir: Path, what: str, num_records: int) -> float:
    """Return the seconds that one pass over the spools takes."""
    follower = RunFollower(run_dir)
    journal: list[bytes] = []

    assembler = StepAssembler("run")
    seen = 0
    begun = time.perf_counter()
    while records := follower.poll(final=True):
        if what == "follow":
            seen += sum(record.frame.header.row_count for record in records)
            continue
        assembler.take(records, 0.0)
        for view in assembler.close(0.0, follower.behind):
            journal.append(msgspec.msgpack.encode(view.decision))
            seen += view.num_rows
            if "merge" in what:
                assert len(view.stats) == len(view.tensors)
    took = time.perf_counter() - begun
    assert seen == num_records, (seen, num_records)
    return took


if __name__ == "__main__":
    raise SystemExit(main())
