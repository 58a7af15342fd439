"""What handing over 1000 rows costs the training thread: p50, p99, p99.9 and worst, with a disk, with none, with a full one.

usage: handover.py [--steps 500] [--rows 1000] [--directory DIR]

The training thread computes for 10 ms between steps (numpy, which lets go of the GIL), then hands a buffer over; what is
timed is `Handover.submit` alone. Beside it: a plain append of the same rows in the training thread, and waking a thread
that does nothing: what the scheduler of the machine charges anybody. The last column is how long the 10 ms take while the
writer thread works. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sentinel.collect.writing.handover import Handover
from sentinel.collect.writing.step_batch import StepBatch
from sentinel.messages import EndStep, Heartbeat
from sentinel.record import NONE_ID, ROW_DTYPE, Kind
from sentinel.wire import spool

POOL = 6
COMPUTE_S = 0.010


def full(fd: int, buffers: object) -> int:
    """Stand in for a disk that is full."""
    raise OSError(28, "No space left on device")


def stalled(fd: int, buffers: object) -> int:
    """Stand in for a disk that never answers."""
    threading.Event().wait()
    return 0


def make_rows(num_rows: int) -> np.ndarray:
    """Return a step's rows: half weights, half activations of two micro-steps that the writer folds."""
    rows = np.zeros(num_rows, ROW_DTYPE)
    half = num_rows // 2
    rows["tensor"][:half], rows["micro_step"][:half] = np.arange(half), -1
    rows["tensor"][half:] = half + np.arange(num_rows - half) // 2
    rows["micro_step"][half:], rows["kind"][half:] = np.arange(num_rows - half) % 2, Kind.ACTIVATION
    rows["count"], rows["m2"], rows["num_folded"], rows["bad_call_id"] = 1000, 1000.0, 1, NONE_ID
    return rows


def measure(directory: Path, template: np.ndarray, num_steps: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (seconds of each submit, seconds of each computation beside it, steps that lost rows)."""
    handover = Handover(
        directory,
        incarnation=os.urandom(16),
        run="run",
        rank=0,
        position=lambda: Heartbeat(step=0, call_id=0, activity="train"),
    )
    free = [template.copy() for _ in range(POOL)]
    x = np.random.default_rng(0).random(1_000_000)
    took, computed = np.empty(num_steps), np.empty(num_steps)
    for step in range(num_steps):
        begun = time.perf_counter()
        while time.perf_counter() - begun < COMPUTE_S:
            np.sqrt(x[:50_000])
        computed[step] = time.perf_counter() - begun
        if not free:
            handover.free_buffer()
        rows = free.pop() if free else template.copy()
        rows[:] = template
        batch = StepBatch(
            step=step, rows=rows, num_rows=len(rows), release=lambda rows=rows: free.append(rows),  # type: ignore[misc]
            end_step=EndStep(step=step, num_rows=len(rows), num_calls=len(rows), scalars={"loss": 1.0}),
        )  # fmt: skip
        begun = time.perf_counter()
        handover.submit(batch)
        took[step] = time.perf_counter() - begun
    dropped = handover.num_cut_steps
    handover.close(timeout_s=2.0)
    return took, computed, dropped


def wait_again(event: threading.Event) -> None:
    """Be woken, do nothing, wait again: what the machine itself takes for a hand-over."""
    while True:
        event.wait()
        event.clear()


def beside(work: Callable[[], object], num_steps: int) -> np.ndarray:
    """Return the seconds of something else done in the training thread at the same places, no writer thread there."""
    took = np.empty(num_steps)
    x = np.random.default_rng(0).random(1_000_000)
    for step in range(num_steps):
        begun = time.perf_counter()
        while time.perf_counter() - begun < COMPUTE_S:
            np.sqrt(x[:50_000])
        begun = time.perf_counter()
        work()
        took[step] = time.perf_counter() - begun
    return took


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    template = make_rows(options.rows)
    cases: list[tuple[str, Callable[..., int] | None]] = [("disk", None), ("full disk", full), ("dead disk", stalled)]
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    print(f"{options.rows} rows ({template.nbytes} bytes), {options.steps} steps, {machine}")
    print(f"{'us':>22} {'p50':>8} {'p99':>8} {'p99.9':>8} {'worst':>8}   dropped  10 ms of compute, p50/p99")
    writev = os.writev
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        for at, (case, replacement) in enumerate(cases):
            spool.os.writev = replacement or writev  # type: ignore[assignment]
            took, computed, dropped = measure(Path(name) / str(at), template, options.steps)
            a, b, c, d = (1e6 * np.quantile(took, q) for q in (0.5, 0.99, 0.999, 1.0))
            e, f = (1e3 * np.quantile(computed, q) for q in (0.5, 0.99))
            print(f"{case:>22} {a:8.1f} {b:8.1f} {c:8.1f} {d:8.1f}  {dropped:8d}  {e:.2f} / {f:.2f} ms")
        spool.os.writev = writev  # type: ignore[assignment]
        fd = os.open(Path(name) / "plain", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        event = threading.Event()
        raw = template.tobytes()
        others: list[tuple[str, Callable[[], object]]] = [
            ("append in the thread", lambda: os.write(fd, raw)),
            ("wake an idle thread", event.set),
        ]
        waiter = threading.Thread(target=wait_again, args=(event,), daemon=True)
        waiter.start()
        for case, work in others:
            took = beside(work, options.steps)
            a, b, c, d = (1e6 * np.quantile(took, q) for q in (0.5, 0.99, 0.999, 1.0))
            print(f"{case:>22} {a:8.1f} {b:8.1f} {c:8.1f} {d:8.1f}")
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a writer thread still hangs on its dead disk
