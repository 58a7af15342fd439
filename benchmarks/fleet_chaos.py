"""Faults of a fleet, at random, over and over: nodes, a broker, two joins on one directory, compared with one daemon.

    python benchmarks/fleet_chaos.py [--seeds 500] [--first 0] [--digests | --workers] [--paced]

A schedule is a seed: while a recorded run of four ranks on two nodes is written, shippers are killed and stopped, nodes
are cut off (wholly, or in one direction), joins are killed, stopped past their lease, cut off from the broker, or stopped
in the middle of a turn: before a commit, before the files behind it, before a message and while that is under way. The
broker is killed, forgets what it acknowledged and who has the lease, is full, and holds junk; messages are lost, repeated
and reordered, a node's clock jumps by an hour, trainers delete what is committed, and (every fifth seed) a file of a spool
is gone before anybody read it.

With --digests nodes send these in place of rows, which a join asks for where it wants them: copies may lack them then.
With --workers two workers are between the nodes, which ship to them, and the joins, which get digests: workers are killed,
stopped past their leases and cut off, and the broker forgets who has which partition, and frames.

With --paced nodes are asked to speak as seldom as those of a large fleet, and so say nothing of spools that only beat.

Held against each seed: copies that are the spools byte for byte, where these come whole; anomalies, incidents and decisions
of one daemon on one disk; each message told, and once to a sink that goes by its key; epochs that only grow. It runs in one
thread by a clock of its own (`tests/support/fleet_faults.py`): the broker is a list, what decides is the real thing. Real
brokers and processes are killed, stopped and taken over from in `tests/fleet/`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sentinel.fleet import copied_runs
from tests.support.fleet_faults import DigestedFleet, FaultyFleet, RecordedFleet
from tests.support.relayed_faults import RelayedFleet

EACH = 5
"""One of so many seeds has a file that was deleted early."""


def main() -> int:
    """Print what was tried and what failed; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--digests", action="store_const", dest="kind", const=DigestedFleet, default=FaultyFleet)
    of.add_argument("--workers", action="store_const", dest="kind", const=RelayedFleet)
    parser.add_argument("--paced", action="store_true")
    options = parser.parse_args()
    if options.paced:
        copied_runs.IDLE_NODES_A_SECOND = 1
    # Ranks of a machine are merged there.
    kind, shape = options.kind, {} if options.kind is FaultyFleet else {"ranks_per_host": 2}
    logging.disable(logging.CRITICAL)
    began, counts, failed, num_epochs = time.process_time(), Counter[str](), list[int](), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        where = Path(name)
        recorded = RecordedFleet.synthetic(where / "recorded", **shape)
        pruned = RecordedFleet.synthetic(where / "pruned", is_pruned=True, **shape)
        for seed in range(options.first, options.first + options.seeds):
            with tempfile.TemporaryDirectory(dir=where) as place:
                world = kind(Path(place), pruned if seed % EACH == 0 else recorded, seed)
                try:
                    world.run()
                except AssertionError as error:
                    failed.append(seed)
                    print(f"FAILED {error}", flush=True)
            counts += world.counts
            num_epochs += len(world.epochs)
            if (seed + 1) % 50 == 0:
                print(f"seed {seed}: {len(failed)} failed, {time.process_time() - began:.0f} s of CPU", flush=True)
    print(f"{options.seeds} seeds from {options.first} on, {len(failed)} failed: {failed}")
    print(f"{num_epochs} leases, {time.process_time() - began:.0f} s of CPU")
    for what, number in sorted(counts.items()):
        print(f"  {what:34} {number}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
