"""The fleet: rows a second from the spools of two nodes to their copies, beside the follower that reads them; and digests.

    python benchmarks/fleet.py [--steps 1000]
    python benchmarks/fleet.py --digests [--steps 200] [--layers 16 70]

One process has both shippers and the join, and nats-server is another: with spools in memory all of it is computing. What is
compared reads the same spools with the follower of the daemon, which also checks and decodes each frame; shipping does not.

With --digests: of the 8 ranks of one machine, how many bytes a node publishes for a byte of spool (digests, and spools
without their rows), and how many rows a second it reads, merges and packs, by the time of one core. Rows that a join asks
for come on top: those of the steps in which something is found.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.join_intake import JoinIntake
from sentinel.fleet.join_lease import JoinLease, LeaseTimes
from sentinel.fleet.node_digests import RunDigests
from sentinel.fleet.node_run import THINNED_BYTES
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.shipping import Shipping
from sentinel.fleet.spool_cursor import SpoolCursor, without_payloads
from sentinel.ingest.follow import RunFollower
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.testing import SyntheticRun
from tests.support.nats_broker import NatsBroker


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0, help="Default: 1000; of digests 200.")
    parser.add_argument("--layers", type=int, nargs="+", default=[16], help="Of the model whose digests are made.")
    parser.add_argument("--digests", action="store_true")
    given = parser.parse_args()
    if given.digests:
        for layers in given.layers:
            digests(given.steps or 200, layers)
        return
    steps = given.steps or 1000
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        where = Path(name)
        run = SyntheticRun(where / "whole" / "run", pp=2, dp=4, layers=16, d_model=16, elements=4)
        run.write(steps)
        run.end()
        num_rows = run.rows_per_step * steps
        nodes = [where / "node0", where / "node1"]
        for folder in (run.directory / "spool").iterdir():
            shutil.copytree(folder, nodes[int(folder.name[1:6]) // 4] / "run" / "spool" / folder.name)
        num_bytes = sum(path.stat().st_size for path in run.directory.rglob("*.spool"))
        began = time.perf_counter()
        follower = RunFollower(run.directory)
        while follower.poll(final=True):
            pass
        read_s = time.perf_counter() - began
        shipped_s, cpu_s, sent = shipped(where, nodes, num_bytes)
    print(f"{num_rows} rows, {num_bytes / 2**20:.0f} MiB of spools of 8 ranks on 2 nodes")
    print(f"follower alone:     {num_rows / read_s / 1e6:.2f} M rows/s")
    print(f"spool to copy:      {num_rows / shipped_s / 1e6:.2f} M rows/s, {shipped_s / read_s:.2f} times as long")
    print(f"this process's CPU: {cpu_s:.2f} s (both shippers and the join; the server's is not in it)")
    print(f"published:          {sent / num_bytes:.4f} bytes a byte of spool")


LAYOUTS: dict[str, dict[str, int]] = {"tensor parallel 8": {"tp": 8}, "data parallel 8": {"dp": 8}, "pipeline 8": {"pp": 8}}
KINDS = {
    "weights, gradients, state, black box": ("param", "wgrad", "exp_avg", "update"),
    "and every module": ("param", "wgrad", "exp_avg", "update", "activation", "dgrad"),
}


def digests(steps: int, layers: int) -> None:
    """Print what digests of one machine's 8 ranks take."""
    carried = Engine(load_pack()).row_kinds
    print(f"{steps} steps of 8 ranks on one machine, {layers} layers; carried: rows of {', '.join(sorted(carried))}")
    print(f"{'layout':20}{'measured':40}{'rows a step':>12}{'digest':>9}{'without rows':>14}{'M rows/s of a core':>20}")
    for layout, sizes in LAYOUTS.items():
        for words, kinds in KINDS.items():
            with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                run = SyntheticRun(Path(name) / "run", layers=layers, d_model=64, elements=64, kinds=kinds, **sizes)
                run.write(steps)
                run.end()
                num_bytes = sum(path.stat().st_size for path in run.directory.rglob("*.spool"))
                made, digested = RunDigests(run.directory, carried), 0
                began = time.process_time()
                while found := list(made.next()):
                    digested += sum(map(len, found))
                took, thin = time.process_time() - began, 0
                for folder in (run.directory / "spool").iterdir():
                    cursor = SpoolCursor(folder)
                    while (piece := cursor.next(THINNED_BYTES)) is not None:
                        thin += len(without_payloads(piece)[0])
                rows = made.num_rows
            figures = f"{rows / steps:12.0f}{digested / num_bytes:9.4f}{thin / num_bytes:14.4f}{rows / took / 1e6:20.2f}"
            print(f"{layout:20}{words:40}{figures}")


def shipped(where: Path, nodes: list[Path], num_bytes: int) -> tuple[float, float, int]:
    """Return (seconds, seconds of CPU, bytes published) until the join has copied all, from the first chunk on."""
    joined = where / "joined"
    joined.mkdir()
    with NatsBroker(where / "broker") as broker:
        copies = CopiedRuns(joined, "bench", begin_s=0.0)
        intake = JoinIntake(copies, BrokerConfig(server=broker.url), JoinLease("bench", LeaseTimes(takeover_s=0.0)))
        intake.start()
        ships = [Shipping(NodeRuns(path, path.name), BrokerConfig(server=broker.url)) for path in nodes]
        threads = [threading.Thread(target=lambda one=one: asyncio.run(one.run())) for one in ships]
        for thread in threads:
            thread.start()
        while not copies.counts["chunks"]:
            time.sleep(0.001)
        began, cpu = time.perf_counter(), time.process_time()
        while copies.counts["bytes"] < num_bytes:
            time.sleep(0.005)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        for one in ships:
            one.stop()
        for thread in threads:
            thread.join()
        intake.close()
    return took, cpu, sum(one.num_published_bytes for one in ships)


if __name__ == "__main__":
    main()
