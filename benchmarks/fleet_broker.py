"""What a fleet asks of its broker, and the most that goes through it; all of it in real processes.

    python benchmarks/fleet_broker.py [used] [most] [told] [--nodes 4] [--steps 20] [--step-s 2] [--layers 280]
        [--replicas 1 3]

Ranks are simulated: 8 of them a node, tensor parallel on each, over pipeline stages, some 985 rows a rank and step.
used: nodes write a step each --step-s, and `sentinel ship`, or `sentinel node`, `sentinel join` and a nats-server, or three
that hold all of it, go on beside; what nodes publish, the sizes of its messages, and the processor time of the servers.
most: as many steps lie in the spools already; how long until the join has copies of all, and has judged all. `publish` is a
client that publishes messages of 512 KiB, 16 at a time, and does nothing else: what the broker takes where nobody computes.
told: as used; how long from when the last rank has written the end of a step until the join has judged and committed it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from fleet_daemon import cpu_s, shipping, started
from fleet_scale import WARM_STEPS, written
from kill9 import progress

from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, connect, ensure_streams
from sentinel.fleet.subjects import RAW, STREAM
from tests.support.fleet_parts import bytes_of
from tests.support.nats_broker import NatsBroker, NatsCluster

if TYPE_CHECKING:
    from nats.aio.msg import Msg

PUBLISH_BYTES = 2**19
PUBLISH_S = 5.0
NUM_AT_ONCE = 16
WAIT_S = 300.0
"""Longest wait for a join to catch up."""


class Overhearing:
    """The sizes of all messages of a fleet, by what they are, heard by a thread."""

    def __init__(self, url: str) -> None:
        self.sizes: dict[str, list[int]] = defaultdict(list)
        self._url, self._over, self._begun = url, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._hear()))

    def __enter__(self) -> Overhearing:
        self._thread.start()
        self._begun.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _hear(self) -> None:
        client = await connect(BrokerConfig(server=self._url), "benchmark")

        async def note(message: Msg) -> None:
            parts = message.subject.split(".")
            self.sizes[parts[2] if len(parts) > 2 else parts[1]].append(len(message.data))

        await client.subscribe("sn.>", cb=note)
        await client.flush()
        self._begun.set()
        while not self._over.is_set():
            await asyncio.sleep(0.05)
        await client.close()


@contextlib.contextmanager
def brokers(where: Path, replicas: int) -> Iterator[tuple[str, list[NatsBroker]]]:
    """Yield the address, and the servers, of a broker that holds all of it so many times."""
    if replicas == 1:
        with NatsBroker(where) as one:
            yield one.url, [one]
    else:
        with NatsCluster(where) as cluster:
            yield cluster.url, cluster.servers


def servers_s(servers: list[NatsBroker]) -> float:
    """Return the processor time of all servers in seconds."""
    return sum(cpu_s(one.process) for one in servers if one.process is not None)


def wait_until_judged(run: Path, steps: int) -> None:
    """Wait for a join; said where it takes too long."""
    until = time.perf_counter() + WAIT_S
    while progress(run)[1] < steps and time.perf_counter() < until:
        time.sleep(0.02)
    if progress(run)[1] < steps:
        print(f"  given up: {progress(run)[1]} of {steps} steps judged")


def used(where: Path, verb: str, replicas: int, given: argparse.Namespace) -> None:
    """Print what a fleet that goes on asks of its broker."""
    run, names = written(where, given.nodes, range(given.nodes), given.layers)
    joined = where / "joined"
    nodes = [where / name for name in names]
    run.write(WARM_STEPS)
    with (
        brokers(where / "broker", replicas) as (url, servers),
        started("join", str(joined), "--server", url, "--no-http", "--replicas", str(replicas)),
        shipping(nodes, url, verb),
    ):
        wait_until_judged(joined / "run", WARM_STEPS - 1)
        with Overhearing(url) as heard:
            before, cpu, began = bytes_of([run.directory]), servers_s(servers), time.perf_counter()
            for number in range(given.steps):
                run.write(1)
                time.sleep(max(0.0, began + (number + 1) * given.step_s - time.perf_counter()))
            took = time.perf_counter() - began
            cpu, spooled = servers_s(servers) - cpu, bytes_of([run.directory]) - before
            sizes = {kind: list(found) for kind, found in heard.sizes.items()}
        wait_until_judged(joined / "run", run.step - 1)
    raw = sizes.get("raw", [0])
    others = sum(sum(found) for kind, found in sizes.items() if kind != "raw")
    print(
        f"{verb:8}{replicas:3}{spooled / took / 1e6:12.2f}{sum(raw) / took / 1e6:12.3f}{others / took / 1e6:12.3f}"
        f"{len(raw) / took:10.1f}{statistics.median(raw) / 1e3:11.1f}{max(raw) / 1e3:11.1f}{100 * cpu / took:10.1f}"
        f"{os.getloadavg()[0]:7.1f}",
        flush=True,
    )


def told(where: Path, verb: str, replicas: int, given: argparse.Namespace) -> None:
    """Print how long after its end a step is judged."""
    run, names = written(where, given.nodes, range(given.nodes), given.layers)
    joined, waits = where / "joined", list[float]()
    run.write(WARM_STEPS)
    with (
        brokers(where / "broker", replicas) as (url, _),
        started("join", str(joined), "--server", url, "--no-http", "--replicas", str(replicas)),
        shipping([where / name for name in names], url, verb),
    ):
        wait_until_judged(joined / "run", WARM_STEPS)
        for _ in range(given.steps):
            run.write(1)
            began = time.perf_counter()
            while progress(joined / "run")[1] < run.step and time.perf_counter() - began < WAIT_S:
                time.sleep(0.002)
            waits.append(time.perf_counter() - began)
            time.sleep(max(0.0, given.step_s - waits[-1]))
    waits.sort()
    p99 = waits[min(len(waits) - 1, int(0.99 * len(waits)))]
    print(
        f"{verb:8}{replicas:3}{given.nodes:7}{len(waits):7}{1e3 * statistics.median(waits):12.0f}{1e3 * p99:10.0f}"
        f"{1e3 * waits[-1]:12.0f}{os.getloadavg()[0]:7.1f}",
        flush=True,
    )


def most(where: Path, verb: str, replicas: int, given: argparse.Namespace) -> None:
    """Print how fast a backlog goes through."""
    run, names = written(where, given.nodes, range(given.nodes), given.layers)
    joined = where / "joined"
    nodes = [where / name for name in names]
    run.write(WARM_STEPS + given.steps)
    run.end()
    spooled = bytes_of([run.directory])
    with (
        brokers(where / "broker", replicas) as (url, servers),
        started("join", str(joined), "--server", url, "--no-http", "--replicas", str(replicas)) as join,
        Overhearing(url) as heard,
    ):
        while not heard.sizes["lease"]:
            time.sleep(0.02)
        with shipping(nodes, url, verb):
            while not heard.sizes["raw"]:
                time.sleep(0.002)
            began, cpu, join_cpu = time.perf_counter(), servers_s(servers), cpu_s(join)
            while bytes_of([joined]) < spooled:
                time.sleep(0.02)
            copied, published = time.perf_counter() - began, sum(heard.sizes["raw"])
            wait_until_judged(joined / "run", run.step)
            judged = time.perf_counter() - began
            cpu, join_cpu = servers_s(servers) - cpu, cpu_s(join) - join_cpu
    print(
        f"{verb:8}{replicas:3}{spooled / 1e6:10.1f}{published / 1e6:11.1f}{copied:10.1f}{spooled / copied / 1e6:13.1f}"
        f"{published / copied / 1e6:13.1f}{judged:10.1f}{join_cpu:10.1f}{cpu:11.1f}{os.getloadavg()[0]:7.1f}",
        flush=True,
    )


def publish(where: Path, replicas: int) -> None:
    """Print what the broker takes of a client that does nothing else."""

    async def run(url: str) -> float:
        client = await connect(BrokerConfig(server=url), "benchmark")
        jetstream = client.jetstream()
        until = time.perf_counter() + 30.0
        while True:
            try:
                await ensure_streams(jetstream, STREAM_BYTES, replicas)
                break
            except Exception:  # The servers have not found each other yet.
                if time.perf_counter() > until:
                    raise
                await asyncio.sleep(0.2)
        data, num_bytes = os.urandom(PUBLISH_BYTES), 0
        began = time.perf_counter()

        async def one() -> None:
            nonlocal num_bytes
            while time.perf_counter() - began < PUBLISH_S:
                await jetstream.publish(RAW.replace("*", "0").replace(">", "0"), data, timeout=30.0)
                num_bytes += len(data)

        await asyncio.gather(*(one() for _ in range(NUM_AT_ONCE)))
        took = time.perf_counter() - began
        await jetstream.purge_stream(STREAM)
        await client.close()
        return num_bytes / took

    with brokers(where, replicas) as (url, _):
        rate = asyncio.run(run(url))
    print(f"publish {replicas:3}{rate / 1e6:10.1f} MB/s of messages of 512 KiB", flush=True)


def main() -> None:
    """Run the parts that are named, all where none is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="used, most, told")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--layers", type=int, default=280)
    parser.add_argument("--replicas", type=int, nargs="+", choices=(1, 3), default=[1, 3])
    given = parser.parse_args()
    parts = given.parts or ["used", "most", "told"]
    if unknown := set(parts) - {"used", "most", "told"}:
        parser.error(f"expected used, most or told, got {', '.join(sorted(unknown))}")
    heads = {
        "used": f"used    {'R':>3}{'spool MB/s':>12}{'chunks MB/s':>12}{'other MB/s':>12}{'chunks/s':>10}{'median kB':>11}"
        f"{'largest kB':>11}{'servers %':>10}{'load':>7}",
        "most": f"most    {'R':>3}{'spool MB':>10}{'chunks MB':>11}{'copied s':>10}{'spool MB/s':>13}{'chunks MB/s':>13}"
        f"{'judged s':>10}{'join s':>10}{'servers s':>11}{'load':>7}",
        "told": f"told    {'R':>3}{'nodes':>7}{'steps':>7}{'median ms':>12}{'p99 ms':>10}{'longest ms':>12}{'load':>7}",
    }
    measures = {"used": used, "most": most, "told": told}
    for part in parts:
        print(heads[part], flush=True)
        for replicas in given.replicas:
            for verb in ("ship", "node"):
                with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                    measures[part](Path(name), verb, replicas, given)
            if part == "most":
                with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                    publish(Path(name), replicas)


if __name__ == "__main__":
    main()
