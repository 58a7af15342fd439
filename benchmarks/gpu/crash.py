"""What is on disk of a training that dies in a step: the rows of the steps before, those of that step, and how it ended.

A child trains and dies in the middle of step 3, between forward and backward:

    assert       a device assert: `torch._assert_async` of something that is false
    illegal      a kernel writes to an address that nobody has
    exception    Python raises (the device is well)
    abort        SIGABRT, as a C++ library ends a process

The first two need a GPU. The rows of steps 0 to 2 must be there, complete and readable, in every case; the activations of
step 3's forward, which were measured before it died, must be there after an exception, of Python or the device's; and its
end must be recorded with the exception's words. SIGABRT leaves nobody to write: it is found by the daemon, as the end of
the process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
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
ENDS = {"cuda": ("assert", "illegal", "exception", "abort"), "cpu": ("exception", "abort")}
CHILD_S = 110


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


def child(options: argparse.Namespace) -> None:
    """Train, and die."""
    training = Training(options, "small", 4)
    monitor = training.attach({**EVERYTHING, "directory": str(options.folder)}, options.child)
    for _ in range(DIES_IN):
        training.step(monitor)
    training.loss()
    results.synchronize(options.device)
    die(options.child, options.device)


def ended(command: list[str]) -> tuple[int | None, str]:
    """Run a child; return its exit code, None where it hung and was killed, and what it said."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, stderr = process.communicate(timeout=CHILD_S)
        return process.returncode, stderr
    except subprocess.TimeoutExpired:
        process.kill()
        return None, process.communicate()[1]


def left(run_dir: Path) -> dict[str, Any]:
    """Return what a reader finds: rows that count by step, rows that never arrived, and the last words."""
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


def fault_of(how: str, found: dict[str, Any], code: int | None) -> str:
    """Return what is not as it must be; empty: nothing."""
    whole = [found["rows"].get(step, 0) for step in range(DIES_IN)]
    if code is None:
        return f"{how}: the child hung after {CHILD_S} s"
    if code == 0:
        return f"{how}: the child lived"
    if min(whole) == 0 or min(whole[1:]) != max(whole[1:]):
        return f"{how}: rows of the steps before are missing: {found['rows']}"
    if found["undecodable"]:
        return f"{how}: {found['undecodable']} frames cannot be read"
    if how != "abort" and found["rows"].get(DIES_IN, 0) == 0:
        return f"{how}: no row of the step in which it died"
    if how != "abort" and not found["last_words"].startswith("exception"):
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
    result = results.Result("crash", options)
    found, faults = {}, []
    for how in ENDS[options.device]:
        with tempfile.TemporaryDirectory(prefix="sentinel-gpu-crash-") as folder:
            command = [sys.executable, __file__, "--device", options.device, "--child", how, "--folder", folder]
            command += ["--tiny"] if options.tiny else []
            code, stderr = ended(command)
            found[how] = {"code": code, "stderr": stderr[-600:], **left(Path(folder) / how)}
        result.note("ends", found)
        faults += [fault] if (fault := fault_of(how, found[how], code)) else []
        print(f"{how}: exit {code}; rows by step {found[how]['rows']}, lost {found[how]['rows_lost']}; ", end="")
        print(f"last words: {found[how]['last_words'] or 'none'}")
    if faults:
        raise SystemExit("\n".join(faults))
    result.complete(
        f"{', '.join(found)}: rows of all steps before are there, and of the last one where anybody was left to write"
    )


if __name__ == "__main__":
    main()
