"""What questions to a history in an object store ask of the store, and how long they take, by how late the store answers.

    python benchmarks/history_store.py [--steps 200000] [--tensors 200] [--asks 10] [--delays-ms 0 20 50]

The store is moto's, which speaks as S3 does, in this process: what it computes is in the time. Each of its answers goes
`--delays-ms` later than it is had, as from a store that is far. The history is that of `history_scale.py`. First: a process
that has just opened the run; again: the same question of the same process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from long_history import LongHistory, bytes_of

import sentinel
from sentinel.history.manifest import read_manifest
from sentinel.history.opened_runs import OpenedRuns
from sentinel.history.push import push
from sentinel.history.remote_run import RemoteRun
from tests.support.object_store import ObjectStore, object_store

NAME = "layers.7.weight"


def questions(steps: int) -> dict[str, Callable[[OpenedRuns], object]]:
    """Return what is asked, by what it is called."""
    return {
        "loss, all steps": lambda run: run.series("loss"),
        "one series, all steps": lambda run: run.series(NAME, "std"),
        "one series, the newest 5,000 steps": lambda run: run.sql(
            f"SELECT step, std FROM moments WHERE name = '{NAME}' AND step >= {steps - 5000}"
        ),
        "tensors": lambda run: run.tensors(),
        "anomalies": lambda run: run.anomalies(),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--asks", type=int, default=10)
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 20.0, 50.0])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, object_store() as store:
        run = Path(name) / "run"
        run.mkdir(mode=0o700)
        LongHistory(run, options.tensors, options.steps).write()
        num_bytes = sum(size for *_, size in bytes_of(read_manifest(run / "history")))
        remote = RemoteRun("s3://bucket/runs/run")
        begun = time.perf_counter()
        push(run, remote)
        print(f"{num_bytes / 1e6:.0f} MB pushed in {time.perf_counter() - begun:.1f} s; load {os.getloadavg()[0]:.1f}\n")
        print("| question | store answers after | requests | KB | first, ms, p50 | longest | again, p50 | longest |")
        print("|---|---|---|---|---|---|---|---|")
        for what, ask in questions(options.steps).items():
            for delay_ms in options.delays_ms:
                store.delay_s = delay_ms / 1e3
                _measure(store, remote.url, what, ask, options.asks)


def _measure(store: ObjectStore, url: str, what: str, ask: Callable[[OpenedRuns], object], num: int) -> None:
    first, again = [], []
    for _ in range(num):
        store.requests.clear()
        opened = sentinel.open(url)
        for times in (first, again):
            begun = time.perf_counter()
            ask(opened)
            times.append(1e3 * (time.perf_counter() - begun))
            if times is first:
                asked, fetched = len(store.requests), sum(one.num_bytes for one in store.requests)
    print(
        f"| {what} | {1e3 * store.delay_s:.0f} ms | {asked} | {fetched / 1e3:.0f} | {statistics.median(first):.0f} | "
        f"{max(first):.0f} | {statistics.median(again):.0f} | {max(again):.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
