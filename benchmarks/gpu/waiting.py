"""How long a rank waits for others on the device: what Sentinel reports today, and what two events could tell.

Measured today: nothing. A rank's `wait_s` is host time inside collectives; on an accelerator the host goes on at once and
the stream waits, so `wait_s` is -1 there (not known) and the rule `slow-rank` has only step times, which in a synchronous
group are alike on all ranks. `reported` pins that: -1 for a model on the device.

What could be measured: an event on the current stream before the wait for a collective and one behind it; the time between
them is what the stream stood still. Whoever writes the step reads it when both are done, and nobody synchronises. This part
tries that on one device, where a second stream that sleeps stands for the other ranks: `planted_ms`, what two events say
of it (`seen_ms`), and microseconds of the host for a pair of events (`pair_us`).

What such events would not see, and no single device can show: collectives that run on the current stream itself (NCCL's,
called with async_op=False in newer versions of torch: there the wait is inside of the collective's kernel, and events
would have to be around the call); and waits that C++ makes, as FSDP's for its all-gathers. In the time between two events
is the transfer itself; it is the same for all ranks, so a comparison of them is not disturbed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import results
import torch
from dense import VARIANTS, Training

from sentinel.ingest.follow import RunFollower
from sentinel.messages import EndStep


def reported(options: argparse.Namespace) -> list[float]:
    """Return `wait_s` of three steps, as it lies in the spool."""
    training = Training(options, "small", 2)
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-waiting-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        monitor = training.attach(VARIANTS["default"], "waiting")
        for _ in range(3):
            training.step(monitor)
        monitor.detach()
        follower = RunFollower(Path(folder) / "waiting")
        records = []
        while more := follower.poll(final=True):
            records += more
    return [record.message.wait_s for record in records if isinstance(record.message, EndStep)]


def stalls(planted_s: float) -> list[float]:
    """Return milliseconds between two events around waits for another stream, which sleeps about so long."""
    other = torch.cuda.Stream()
    cycles = int(planted_s * 1e3 * cycles_a_ms())
    pairs = []
    for _ in range(10):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(cycles)
        pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        pair[0].record()
        torch.cuda.current_stream().wait_stream(other)
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairs]


def cycles_a_ms() -> float:
    """Return cycles of `torch.cuda._sleep` in a millisecond, measured."""
    torch.cuda._sleep(1000)
    return 10_000_000 / (1e3 * results.seconds_of(lambda: torch.cuda._sleep(10_000_000), "cuda", 5))


def pair_us() -> float:
    """Return microseconds of the host for two events recorded."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(1000)]
    for pair in pairs[:100]:
        pair[0].record()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for pair in pairs:
        pair[0].record()
        pair[1].record()
    return (time.perf_counter() - began) / len(pairs) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = results.options_of(parser)
    result = results.Result("waiting", options)
    said = reported(options)
    result.note("reported_wait_s", said)
    print(f"wait_s of three steps: {said}")
    if said != [-1.0, -1.0, -1.0]:
        raise SystemExit(f"expected -1, not known, of one process on one device, got {said}")
    if options.device != "cuda":
        result.complete("wait_s is -1, not known; events need a GPU")
        return
    seen = {f"{planted_ms} ms": statistics.median(stalls(planted_ms / 1e3)) for planted_ms in (1, 5, 20)}
    result.note("seen_ms", seen)
    result.note("pair_us", round(pair_us(), 2))
    result.complete(
        "wait_s is -1, not known; events would say "
        + ", ".join(f"{value:.2f} of {planted}" for planted, value in seen.items())
        + f", at {result.cell['pair_us']} us a pair"
    )


if __name__ == "__main__":
    main()
