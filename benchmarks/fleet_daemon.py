"""What a fleet costs beside a daemon on one disk, and how long it takes to be well again; all of it in real processes.

    python benchmarks/fleet_daemon.py [verdict] [drain] [takeover] [--steps 1000] [--rounds 3] [--outage-s 60]

verdict: processor time of the process that judges, a row, from the broker to the verdict: `sentinel join` of spools as they
are (`ship`) and of digests (`node`) beside `sentinel serve` over the same frames, in turn; and of digests that a `sentinel
worker` makes of frames, beside what that takes. drain: a run that goes on while
the broker is dead; how long a step takes to be written meanwhile, and how many times faster than real time the rest is
judged once it is back. takeover: from `kill -9`, and from SIGSTOP, of the join that works
until the other one judges.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from kill9 import progress

from sentinel.testing import SyntheticRun
from tests.support.nats_broker import NatsBroker

RANKS_PER_NODE = 4
STEP_S = 0.5
"""Of the run of `drain`."""
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
    for when, seconds in written.items():
        ordered = sorted(seconds)
        print(f"  a step written, {when}: median {1e3 * statistics.median(ordered):.2f} ms, "
              f"p99 {1e3 * ordered[int(0.99 * (len(ordered) - 1))]:.2f} ms ({len(ordered)} steps)")  # fmt: skip


def takeover(where: Path, rounds: int) -> None:
    """Print how long nobody judged, after a kill and after a stop."""
    run = SyntheticRun(where / "node0" / "run", layers=4, d_model=16)
    joined = where / "joined"
    took: dict[str, list[float]] = {"kill -9": [], "SIGSTOP": []}
    with NatsBroker(where / "broker") as broker, shipping([where / "node0"], broker.url):
        arguments = [*SENTINEL, "join", str(joined), "--server", broker.url, "--no-http"]
        joins: list[subprocess.Popen[bytes]] = []
        try:
            joins.append(subprocess.Popen(arguments, stderr=subprocess.DEVNULL))
            for how in [one for one in took for _ in range(rounds)]:
                run.write(3)
                while progress(joined / "run")[1] < run.step - 2:
                    time.sleep(0.01)
                joins.append(subprocess.Popen(arguments, stderr=subprocess.DEVNULL))
                time.sleep(5.0)  # The other one stands by.
                run.write(3)
                active = joins.pop(0)
                active.send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGSTOP)
                judged, began = progress(joined / "run")[1], time.perf_counter()
                while progress(joined / "run")[1] <= max(judged, run.step - 3):
                    run.write(1)
                    time.sleep(0.1)
                took[how].append(time.perf_counter() - began)
                if how == "SIGSTOP":
                    active.send_signal(signal.SIGCONT)
                    print(
                        f"  a join that was stopped, and goes on after its successor took over, ends with {active.wait(60)}"
                    )
                active.wait()
        finally:
            for one in joins:
                one.terminate()
                one.wait(30)
    for how, seconds in took.items():
        print(
            f"takeover after {how}, {rounds} times: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
        )


def main() -> None:
    """Run the parts that are named, all where none is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="verdict, drain, takeover")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--outage-s", type=float, default=60.0)
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
                takeover(where, options.rounds)


if __name__ == "__main__":
    main()
