"""What is on disk of a training that dies in a step: the rows of the steps before, those of that step, and how it ended.

A child trains and dies in the middle of step 3, between forward and backward:

    exception    Python raises (the device is well)
    abort        SIGABRT, as a C++ library ends a process
    assert       a device assert: `torch._assert_async` of something that is false
    illegal      a kernel writes to an address that nobody has
    none         nothing happens: it must end well, and shows that the device still works behind all that

`assert` and `illegal` need a GPU. From there on every call of the runtime in that process fails, while pinned memory stays
readable by the host; such a process may end by an exception, or by SIGABRT where a destructor meets the error. Each child
has a time limit, writes no dump of its memory, and is left behind where even SIGKILL does not end it at once: what it did
is one line of the result, and the next one runs.

The rows of steps 0 to 2 must be there, complete and readable, in every case; the activations of step 3's forward, which
were measured before it died, must be there after an exception, of Python or the device's; and its end must be recorded with
the exception's words. SIGABRT leaves nobody to write: it is found by the daemon, as the end of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import results
import torch
from dense import EVERYTHING, Training

from sentinel.ingest.follow import RunFollower
from sentinel.messages import Bye
from sentinel.record import ROW_DTYPE, Flag
from sentinel.wire.frame import FrameType

DIES_IN = 3
ENDS = {"cuda": ("exception", "abort", "assert", "illegal", "none"), "cpu": ("exception", "abort", "none")}
"""What cannot spoil the device comes first."""
CHILD_S = 40
SAID = 12_000
"""Characters of what a child said that are kept: an abort prints its stack last."""
WRITTEN_S = 10
"""Seconds in which the rows of the steps before must be on disk."""
KILLED_S = 10
"""Seconds that a killed child has to go: one inside of a call of the driver may take longer, or for ever."""


def die(how: str, device: str) -> None:
    """End this process, one way or another."""
    if how == "exception":
        raise ValueError("the child dies")
    if how == "abort":
        os.abort()
    if how == "assert":
        torch._assert_async(torch.zeros(1, dtype=torch.bool, device=device))
    else:
        from wild_write import write_wild

        write_wild()
    # Where the trainer would notice: at its next call that waits for the device.
    torch.cuda.synchronize()
    raise SystemExit("the device did not notice")


EXPECTED = {
    "exception": ("exit 1",), "abort": ("SIGABRT",), "assert": ("exit 1", "SIGABRT"), "illegal": ("exit 1", "SIGABRT"),
    "none": ("exit 0",),
}  # fmt: skip


def child(options: argparse.Namespace) -> None:
    """Train, and die."""
    faulthandler.enable()  # Where Python stood at an abort.
    # A process that has met a GPU maps terabytes: whoever dumps it is busy for minutes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    training = Training(options, "small", 4)
    monitor = training.attach({**EVERYTHING, "directory": str(options.folder)}, options.child)
    for _ in range(DIES_IN):
        training.step(monitor)
    if options.child == "none":
        monitor.detach()
        return
    training.loss()
    results.synchronize(options.device)
    wait_for_rows(options.folder / options.child)
    die(options.child, options.device)


def wait_for_rows(run_dir: Path) -> None:
    """Give whoever writes the time that a step of a real model leaves: on a busy machine it has none in a tiny one."""
    deadline = time.monotonic() + WRITTEN_S
    while not left(run_dir)["rows"].get(DIES_IN - 1) and time.monotonic() < deadline:
        time.sleep(0.05)


def ended(command: list[str], words: Path, limit_s: float = CHILD_S) -> int | None:
    """Run a child that writes its words to a file; return its exit code, None where it hung and was killed."""
    with words.open("wb") as file:
        # A file, not a pipe: whatever the child started may keep a pipe open behind it.
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        return None


def end_in_words(code: int | None) -> str:
    """Return how a child ended: an exit code, a signal, or that it hung."""
    if code is None:
        return f"hung, killed after {CHILD_S} s"
    return f"exit {code}" if code >= 0 else signal.Signals(-code).name


def left(run_dir: Path) -> dict[str, Any]:
    """Return what a reader finds: rows that count by step, rows that never arrived, and the last words."""
    if not run_dir.is_dir():
        return {"rows": {}, "rows_lost": 0, "undecodable": 0, "last_words": ""}
    follower = RunFollower(run_dir)
    num_rows: Counter[int] = Counter()
    num_lost = 0
    words = ""
    while records := follower.poll(final=True):
        for record in records:
            header = record.frame.header
            if header.type == FrameType.ROWS:
                rows = np.frombuffer(record.frame.payload, ROW_DTYPE)
                is_lost = (rows["flags"] & np.uint16(Flag.DEGRADED)) != 0
                num_rows[header.step] += int((~is_lost).sum())
                num_lost += int(is_lost.sum())
            elif isinstance(record.message, Bye):
                words = f"{record.message.reason}: {record.message.error} {record.message.message[:200]}"
    broken = follower.num_undecodable + follower.num_corrupt
    return {"rows": dict(sorted(num_rows.items())), "rows_lost": num_lost, "undecodable": broken, "last_words": words}


def fault_of(how: str, found: dict[str, Any]) -> str:
    """Return what is not as it must be; empty: nothing."""
    whole = [found["rows"].get(step, 0) for step in range(DIES_IN)]
    if found["end"] not in EXPECTED[how]:
        return f"{how}: expected {' or '.join(EXPECTED[how])}, got {found['end']}"
    if min(whole) == 0 or min(whole[1:]) != max(whole[1:]):
        return f"{how}: rows of the steps before are missing: {found['rows']}"
    if found["undecodable"]:
        return f"{how}: {found['undecodable']} frames cannot be read"
    if how in ("abort", "none"):
        return ""
    if found["rows"].get(DIES_IN, 0) == 0:
        return f"{how}: no row of the step in which it died"
    if not found["last_words"].startswith("exception"):
        return f"{how}: its end is not recorded: {found['last_words']!r}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", choices=ENDS["cuda"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = results.options_of(parser)
    if options.child:
        child(options)
        return
    # Read when the driver starts: no dump of the device's memory either.
    os.environ["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] = "0"
    result = results.Result("crash", options)
    found: dict[str, dict[str, Any]] = {}
    faults = []
    for how in ENDS[options.device]:
        with tempfile.TemporaryDirectory(prefix="sentinel-gpu-crash-", ignore_cleanup_errors=True) as folder:
            command = [sys.executable, __file__, "--device", options.device, "--child", how, "--folder", folder]
            command += ["--tiny"] if options.tiny else []
            words = Path(folder) / "words"
            code = ended(command, words)
            said = words.read_text(errors="replace").replace(f"{results.ROOT}/", "")[-SAID:]
            found[how] = {"end": end_in_words(code), "said": said, **left(Path(folder) / how)}
        result.note("ends", found)
        faults += [fault] if (fault := fault_of(how, found[how])) else []
        print(f"{how}: {found[how]['end']}; rows by step {found[how]['rows']}, lost {found[how]['rows_lost']}; ", end="")
        print(f"last words: {found[how]['last_words'] or 'none'}", flush=True)
    if faults:
        raise SystemExit("\n".join(faults))
    died = ", ".join(how for how in found if how != "none")
    result.complete(f"{died}: rows of all steps before are there, and of the last one where anybody was left to write")


if __name__ == "__main__":
    main()
