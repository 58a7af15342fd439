"""How long the daemon takes for what the page asks of a run of many ranks: the first time, and again.

    python benchmarks/page_answers.py [--ranks 2048] [--series 10000] [--incidents 500] [--steps 50] [--again 5]

The daemon is a thread of this process, its run is over and judged; each rank has traced one tensor in `--steps` steps.
First: nobody asked before. Again: median of `--again` times. Another step: one of the pipeline that nobody asked for yet.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.daemon import Daemon, ServeOptions
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.tokens import load_tokens
from sentinel.dump import HEAD_KEY
from sentinel.history.config import HistoryConfig
from sentinel.tensor_file import write_tensors
from sentinel.trace import TracedTensor, TraceHead, ring_dir, step_path
from tests.support.large_run import BAD, write_wide_run

READY_S = 600.0
QUESTIONS = (
    ("pipeline of the incident", "pipeline?run=wide&incident={incident}"),
    ("pipeline of another step", f"pipeline?run=wide&step={BAD + 1}"),
    ("rules", "rules?run=wide"),
    ("runs", "runs"),
    ("incidents", "incidents?run=wide&limit=100"),
    ("the incident", "incidents/{incident}?run=wide"),
    ("one series", "series?run=wide&name=loss"),
    ("new traces of a rank", "traces?run=wide&rank=7&after={behind}"),
    ("new traces of all ranks", "traces?run=wide&after={behind}"),
)
"""What is asked, and its path below `/api/v1/`."""


def write_traces(run_dir: Path, num_ranks: int, num_steps: int) -> None:
    """Have each rank trace one picture of 8 x 8 in each of some steps."""
    shape = (8, 8)
    about = TracedTensor(kind="activation", name="layers.0", shape=(64, 64), dtype="float32")
    for rank in range(num_ranks):
        folder = ring_dir(run_dir, 0, rank)
        for step in range(num_steps):
            head = TraceHead(run=run_dir.name, attempt=0, rank=rank, step=step, time=float(step), tensors={"a": about})
            metadata = {"format": "pt", HEAD_KEY: msgspec.json.encode(head).decode()}
            write_tensors(step_path(folder, step), {"a": ("F32", shape, bytes(4 * 64))}, metadata)


@contextlib.contextmanager
def served(runs: Path) -> Iterator[str]:
    """Yield the address of a daemon in a thread of this process that serves a directory of runs."""
    config = DaemonConfig(history=HistoryConfig(enabled=True, flush_s=1.0))
    options = ServeOptions(directory=runs, config=config, http=HttpConfig(port=0), drain_s=2.0)
    one = Daemon(options, {}, io.StringIO())
    with mock.patch("sentinel.daemon.loop_requests.signal.signal"):
        thread = threading.Thread(target=one.run)
        thread.start()
        try:
            until(one.api.is_ready)
            yield str(json.loads((runs / ".daemon" / "http.json").read_text())["url"])
        finally:
            one.stop()
            thread.join(60)


def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + READY_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {READY_S:g} s")
        time.sleep(0.1)


def asked(address: str, path: str) -> Any:
    """Return what the API answers."""
    with urllib.request.urlopen(f"{address}/api/v1/{path}", timeout=READY_S) as answer:
        return json.load(answer)


def answer_ms(address: str, path: str, token: str) -> float:
    """Return the milliseconds until an answer is there, whole."""
    request = urllib.request.Request(f"{address}/api/v1/{path}", headers={"Authorization": f"Bearer {token}"})
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=READY_S) as answer:
        answer.read()
    return 1000 * (time.perf_counter() - begun)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--incidents", type=int, default=500)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--again", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = Path(directory)
        runs.chmod(0o700)
        write_wide_run(runs / "wide", num_ranks=options.ranks, num_scalars=options.series, num_incidents=options.incidents)
        write_traces(runs / "wide", options.ranks, options.steps)
        (runs / "wide").chmod(0o700)
        with served(runs) as address:
            incidents = asked(address, "incidents?run=wide&limit=1000")["incidents"]
            incident = next(one["id"] for one in incidents if "born" in one["title"])
            print(
                f"{options.ranks} ranks that trace, {options.series} values, {len(incidents)} incidents; "
                f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
                f"Python {platform.python_version()}\n"
            )
            token = load_tokens(runs / ".daemon").read
            print("| answer of | first, ms | again, ms |\n|---|---|---|")
            for name, path in QUESTIONS:
                asks = path.format(incident=incident, behind=options.steps - 2)
                first = answer_ms(address, asks, token)
                again = median(answer_ms(address, asks, token) for _ in range(options.again))
                print(f"| {name} | {first:.0f} | {again:.0f} |", flush=True)


if __name__ == "__main__":
    main()
