"""What a fleet costs beside a daemon on one disk, and how long it takes to be well again; all of it in real processes.

    python benchmarks/fleet_daemon.py [verdict] [drain] [takeover] [--steps 1000] [--rounds 3] [--outage-s 60] [--stop-s 60]

verdict: processor time of the process that judges, a row, from the broker to the verdict: `sentinel join` of spools as they
are (`ship`) and of digests (`node`) beside `sentinel serve` over the same frames, in turn; and of digests that a `sentinel
worker` makes of frames, beside what that takes. drain: a run that goes on while
the broker is dead; how long a step takes to be written meanwhile, and how many times faster than real time the rest is
judged once it is back. takeover: from `kill -9`, and from SIGSTOP, of the join that works
until the other one has the lease, and from then until it judges; who was stopped goes on after --stop-s, and what it writes
then is counted: it should be nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from kill9 import different_replay, progress
from recording import lines_of

from sentinel.fleet.broker import BrokerConfig, connect
from sentinel.fleet.join_lease import LeaseRecord
from sentinel.fleet.subjects import LEASE
from sentinel.testing import Nan, SyntheticRun
from tests.support.nats_broker import NatsBroker

if TYPE_CHECKING:
    from nats.aio.msg import Msg

RANKS_PER_NODE = 4
STEP_S = 0.5
"""Of the runs of `drain` and `takeover`."""
RESTART_S = 2.0
"""As in deploy/systemd/sentinel-join.service."""
GIVEN_UP = 10
"""Times the outage after which it is waited no longer for the join to catch up."""
SENTINEL = (sys.executable, "-m", "sentinel.cli")


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command of Sentinel, and end it. What it logs is printed where it ends by itself."""
    log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
    process = subprocess.Popen([*SENTINEL, *arguments], stdout=subprocess.DEVNULL, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is not None:
            log.seek(0)
            print(f"{arguments} ended with {process.returncode}: {log.read()[-2000:].decode()}")
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def kept_running(*arguments: str) -> Iterator[None]:
    """Start a command of Sentinel, and start it again when it ends by itself, as a service manager does."""
    over = threading.Event()
    log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the processes)

    def keep() -> None:
        while not over.is_set():
            process = subprocess.Popen([*SENTINEL, *arguments], stdout=subprocess.DEVNULL, stderr=log)
            while process.poll() is None and not over.is_set():
                over.wait(0.05)
            if process.returncode is None:
                process.terminate()
                process.wait(30)
            else:
                print(f"  {arguments[0]} ended with {process.returncode}, and is started again after {RESTART_S:g} s")
                over.wait(RESTART_S)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a process in seconds, all threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until_judged(run: Path, steps: int, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Return (seconds, seconds of processor time) from the first decision until as many steps are judged."""
    while not progress(run)[0]:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        time.sleep(0.002)
    began, cpu = time.perf_counter(), cpu_s(process)
    while progress(run)[1] < steps:
        time.sleep(0.01)
    return time.perf_counter() - began, cpu_s(process) - cpu


def on_nodes(run: Path, where: Path) -> list[Path]:
    """Copy the spools of a run to the machines that its ranks are on, and return their directories of runs."""
    for folder in (run / "spool").iterdir():
        node = where / f"node{int(folder.name[1:6]) // RANKS_PER_NODE}"
        shutil.copytree(folder, node / "run" / "spool" / folder.name)
    return sorted(where.glob("node*"))


@contextlib.contextmanager
def shipping(nodes: list[Path], url: str, verb: str = "ship", *others: str) -> Iterator[None]:
    """Run `sentinel ship`, or `sentinel node`, for each node. others: further arguments of it."""
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.enter_context(started(verb, str(node), "--server", url, "--node", node.name, "--drain-s", "1", *others))
        yield


def verdict(where: Path, steps: int, rounds: int) -> None:
    """Print the processor time of each, and their ratios."""
    ratios: dict[str, list[float]] = {"ship": [], "node": []}
    for number in range(rounds):
        at = where / str(number)
        run = SyntheticRun(
            at / "whole" / "run", pp=2, dp=4, layers=16, d_model=16, elements=4, ranks_per_host=RANKS_PER_NODE
        )
        run.write(steps)
        run.end()
        rows = run.rows_per_step * steps
        nodes = on_nodes(run.directory, at)
        with started("serve", str(at / "whole"), "--no-http") as daemon:
            alone_s, alone = until_judged(run.directory, steps, daemon)
        print(
            f"{rows} rows: serve {rows / alone / 1e6:.2f} M rows a second of a core ({alone_s:.1f} s by the clock)",
            flush=True,
        )
        for verb, found in ratios.items():
            joined = at / f"joined-{verb}"
            with (
                NatsBroker(at / f"broker-{verb}") as broker,
                started("join", str(joined), "--server", broker.url, "--no-http") as join,
                shipping(nodes, broker.url, verb),
            ):
                joined_s, cpu = until_judged(joined / "run", steps, join)
            found.append(alone / cpu)
            print(f"  join of {verb}: {rows / cpu / 1e6:.2f} ({joined_s:.1f} s): {alone / cpu:.2f} of it", flush=True)
        behind_worker(at, nodes, steps, rows, alone)
        shutil.rmtree(at)
    for verb, found in ratios.items():
        print(f"join of {verb}: {statistics.median(found):.2f} of serve's rows a second of a core (median)")


def behind_worker(at: Path, nodes: list[Path], steps: int, rows: int, alone: float) -> None:
    """Print what a worker takes for the frames of these nodes, and the join for what the worker makes of them.

    alone: seconds of processor time that `serve` takes for the same rows.
    """
    joined = at / "joined-worker"
    with (
        NatsBroker(at / "broker-worker") as broker,
        started("join", str(joined), "--server", broker.url, "--no-http") as join,
        started("worker", str(at / "worker"), "--server", broker.url) as worker,
    ):
        # Both wait for their leases; what they take until then is that of starting.
        time.sleep(15.0)
        idle = cpu_s(worker)
        time.sleep(10.0)
        begun = cpu_s(worker)
        with shipping(nodes, broker.url, "ship", "--to-workers"):
            joined_s, cpu = until_judged(joined / "run", steps, join)
            worked = cpu_s(worker) - begun
            on_disk = [1024 * int(subprocess.run(["du", "-sk", one], capture_output=True).stdout.split()[0])
                       for one in (at / "worker", joined / "run" / "spool")]  # fmt: skip
    print(
        f"  worker and join: {1e6 * worked / rows:.2f} + {1e6 * cpu / rows:.2f} us a row, serve {1e6 * alone / rows:.2f} "
        f"({joined_s:.1f} s by the clock): the join takes {cpu / alone:.2f} of serve, the worker {worked / alone:.2f}; idle "
        f"the worker takes {10 * (begun - idle):.1f} % of a core; at the end its copies are {on_disk[0] >> 20} MiB, the "
        f"join's {on_disk[1] >> 20} MiB",
        flush=True,
    )


def drain(where: Path, outage_s: float) -> None:
    """Print how long steps took to be written, and how fast the rest was judged."""
    nodes = [where / "node0", where / "node1"]
    half = range(RANKS_PER_NODE), range(RANKS_PER_NODE, 2 * RANKS_PER_NODE)
    shape = {"pp": 2, "dp": 4, "layers": 16, "d_model": 16, "elements": 4}
    runs = [SyntheticRun(node / "run", ranks=ranks, **shape) for node, ranks in zip(nodes, half, strict=True)]
    rows = runs[0].rows_per_step
    joined = where / "joined"
    written: dict[str, list[float]] = {"broker there": [], "broker dead": [], "broker back": []}

    def train(seconds: float, when: str) -> int:
        began, number = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            before = time.perf_counter()
            for run in runs:
                run.write(1)
            written[when].append(time.perf_counter() - before)
            number += 1
            time.sleep(max(0.0, began + number * STEP_S - time.perf_counter()))
        return number

    with (
        NatsBroker(where / "broker") as broker,
        kept_running("join", str(joined), "--server", broker.url, "--no-http"),
        shipping(nodes, broker.url),
    ):
        train(25.0, "broker there")  # Its first join waits ten seconds for the lease.
        usual = runs[0].step - progress(joined / "run")[1]
        broker.kill()
        train(outage_s, "broker dead")
        behind = runs[0].step - progress(joined / "run")[1]
        broker.start()
        began, judged = time.perf_counter(), progress(joined / "run")[1]
        reached = None
        while runs[0].step - progress(joined / "run")[1] > max(4, usual):
            train(STEP_S, "broker back")
            if time.perf_counter() - began > GIVEN_UP * outage_s:
                print(f"drain: given up {runs[0].step - progress(joined / 'run')[1]} steps behind; what follows says little")
                break
            if reached is None and progress(joined / "run")[1] > judged:
                reached = time.perf_counter()
        took, first = time.perf_counter() - began, (reached or began) - began
        drained = progress(joined / "run")[1] - judged
    print(
        f"drain: {rows} rows a step, a step each {STEP_S:g} s, {usual} of them on their way at any time; "
        f"{outage_s:g} s without a broker left {behind} steps to judge"
    )
    print(
        f"  back at real time after {took:.1f} s, of which {first:.1f} s until the first verdict: "
        f"{drained * STEP_S / took:.1f} times real time, {drained * STEP_S / max(1e-9, took - first):.1f} from then on"
    )
    # After a short outage there is nothing to be drained.
    for when, seconds in ((when, seconds) for when, seconds in written.items() if seconds):
        ordered = sorted(seconds)
        print(f"  a step written, {when}: median {1e3 * statistics.median(ordered):.2f} ms, "
              f"p99 {1e3 * ordered[int(0.99 * (len(ordered) - 1))]:.2f} ms ({len(ordered)} steps)")  # fmt: skip


class JoinOfMany:
    """One of several `sentinel join` on one directory."""

    def __init__(self, joined: Path, url: str, log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*SENTINEL, "join", str(joined), "--server", url, "--no-http"], stdout=output, stderr=output
            )

    def wait_until_it_stands_by(self) -> None:
        while b"join: standby of" not in self.log.read_bytes():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.process.args!r} ended with {self.process.returncode}: {self.log.read_text()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Have it stand still, and wait until it does."""
        self.process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def written_bytes(self) -> int:
        """Return the bytes that it has written to files until now, those of its log left out; also after its end."""
        counters = Path(f"/proc/{self.process.pid}/io").read_text().split()
        return int(counters[counters.index("wchar:") + 1]) - self.log.stat().st_size


class Leases:
    """What the joins of a broker say of their lease, as it comes, to a thread."""

    def __init__(self, url: str) -> None:
        self.taken: dict[int, float] = {}
        """Epoch -> when it was heard of first, by `time.perf_counter`."""
        self._url, self._over = url, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._hear()))

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _hear(self) -> None:
        client = await connect(BrokerConfig(server=self._url), "benchmark")

        async def note(message: Msg) -> None:
            record = msgspec.msgpack.decode(message.data, type=LeaseRecord)
            self.taken.setdefault(record.epoch, time.perf_counter())

        await client.subscribe(LEASE, cb=note)
        while not self._over.is_set():
            await asyncio.sleep(0.1)
        await client.close()


class Takeovers(NamedTuple):
    """Seconds of each takeover of one kind."""

    lease: list[float]
    """Until the standby has the lease."""
    verdict: list[float]
    """From then on, until it has judged the first step."""
    kept_up: list[float]
    """From then on, until it has judged all but the newest two."""


def takeover(where: Path, rounds: int, stop_s: float) -> None:
    """Print how long nobody judged, after a kill and after a stop, and what those that were stopped wrote afterwards."""
    run = SyntheticRun(where / "node0" / "run", layers=4, d_model=16)
    modules = run.modules()
    for step in range(10, 100_000, 100):
        run.plant(Nan(step=step, module=modules[step // 100 % len(modules)]))
    joined = where / "joined"
    took = {how: Takeovers([], [], []) for how in ("kill -9", "SIGSTOP")}
    ends: list[tuple[int, int]] = []
    rng = random.Random(0)
    joins: list[JoinOfMany] = []
    written_at = 0.0

    def judged() -> int:
        """Return the steps that are judged, and go on training meanwhile."""
        nonlocal written_at
        if time.perf_counter() >= written_at + STEP_S:
            written_at = time.perf_counter()
            run.write(1)
        time.sleep(0.01)
        return progress(joined / "run")[1]

    def train(seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            judged()

    with NatsBroker(where / "broker") as broker, shipping([where / "node0"], broker.url), Leases(broker.url) as leases:
        try:
            joins.append(JoinOfMany(joined, broker.url, where / "join-0.log"))
            for number, how in enumerate(one for one in took for _ in range(rounds)):
                while judged() < max(1, run.step - 2):
                    pass
                joins.append(JoinOfMany(joined, broker.url, where / f"join-{number + 1}.log"))
                joins[-1].wait_until_it_stands_by()
                # At any moment of the two seconds between two renewals.
                train(2.0 + rng.uniform(0.0, 2.0))
                active, epoch = joins.pop(0), max(leases.taken)
                if how == "kill -9":
                    active.process.kill()
                    active.process.wait()
                else:
                    active.stop()
                began, before = time.perf_counter(), progress(joined / "run")[1]
                while judged() <= before:
                    pass
                first = time.perf_counter()
                while judged() < run.step - 2:
                    pass
                has_lease = leases.taken[epoch + 1]
                took[how].lease.append(has_lease - began)
                took[how].verdict.append(first - has_lease)
                took[how].kept_up.append(time.perf_counter() - first)
                if how == "SIGSTOP":
                    train(began + stop_s - time.perf_counter())
                    written = active.written_bytes()
                    active.process.send_signal(signal.SIGCONT)
                    while (ended := os.waitid(os.P_PID, active.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
                        judged()
                    ends.append((ended.si_status, active.written_bytes() - written))
                    active.process.wait()
                lease, verdict, kept_up = (seconds[-1] for seconds in took[how])
                wrote = f"; exit code {ends[-1][0]}, wrote {ends[-1][1]} bytes" if how == "SIGSTOP" else ""
                print(
                    f"  {how} {number % rounds + 1}: lease {lease:.1f} s, verdict {verdict:.1f} s, kept up {kept_up:.1f} s"
                    f"{wrote} (load {os.getloadavg()[0]:.1f})",
                    flush=True,
                )
            run.end()
            while progress(joined / "run")[1] < run.step:
                time.sleep(0.1)
        finally:
            for one in joins:
                one.process.send_signal(signal.SIGCONT)
                one.process.terminate()
                one.process.wait(30)
    for how, found in took.items():
        both = [one + other for one, other in zip(found.lease, found.verdict, strict=True)]
        print(f"takeover after {how}, {rounds} times: {_spread(both)}")
        print(f"  until the lease: {_spread(found.lease)}")
        print(f"  from the lease to the first verdict: {_spread(found.verdict)}")
        print(f"  from there until all but two steps were judged: {_spread(found.kept_up)}")
    refused = sum("another process has taken over" in path.read_text() for path in where.glob("join-*.log"))
    print(
        f"stopped for {stop_s:g} s, {len(ends)} times: exit code 1 {sum(code == 1 for code, _ in ends)} times; "
        f"{sum(size for _, size in ends)} bytes written after SIGCONT; refused by the journal {refused} times"
    )
    words = different_replay(joined / "run", where)
    print(
        f"{run.step} steps, {sum(1 for _ in lines_of(joined / 'run'))} lines of anomalies and incidents: "
        f"{'; '.join(words) if words else 'a replay by one process comes to the same bytes'}"
    )


def _spread(seconds: list[float]) -> str:
    """Return median, p99 and longest in words; of fewer than 100 the p99 is all but the longest one."""
    ordered = sorted(seconds)
    p99 = statistics.quantiles(ordered, n=100, method="inclusive")[98] if len(ordered) > 1 else ordered[0]
    return f"p50 {statistics.median(ordered):.1f} s, p99 {p99:.1f} s, longest {ordered[-1]:.1f} s"


def main() -> None:
    """Run the parts that are named, all where none is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="verdict, drain, takeover")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--outage-s", type=float, default=60.0)
    parser.add_argument("--stop-s", type=float, default=60.0)
    options = parser.parse_args()
    parts = options.parts or ["verdict", "drain", "takeover"]
    if unknown := set(parts) - {"verdict", "drain", "takeover"}:
        parser.error(f"expected verdict, drain or takeover, got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for part in parts:
            where = Path(name) / part
            where.mkdir()
            if part == "verdict":
                verdict(where, options.steps, options.rounds)
            elif part == "drain":
                drain(where, options.outage_s)
            else:
                takeover(where, options.rounds, options.stop_s)


if __name__ == "__main__":
    main()
