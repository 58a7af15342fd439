"""How long a rank waits for others on the device: what Sentinel reports of one process, and of two that share the device.

`alone`: a process without others reports -1, not known.

`ddp`, `calls`: two processes on one device, of which the second is held up in each forward, by a kernel that sleeps for
`planted_ms`; what each reports as `wait_s`, median over the steps, must say that the first one waits so long and the
second does not. NCCL refuses two ranks on one device, so the group is gloo's with tensors on the device: `ddp` waits at the
end of a backward, in C++; `calls` calls all_reduce for each gradient behind it.

`streams`: what a single rank can show of NCCL, with a group of its own alone beside the one of two: an all_reduce called
with async_op=False on a stream beside the one that trains, which is then made to wait for it, as FSDP does. A kernel that
sleeps stands behind the collective for the other ranks. And `pair_us`, microseconds of the host for one timed wait.

What one device cannot show: a wait inside of NCCL's own kernel, which newer torch puts on the current stream.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dense import VARIANTS, Training
from torch import nn

import sentinel
from sentinel.collect.accelerator import Accelerator
from sentinel.collect.parallel.stream_waiting import StreamWaits
from sentinel.ingest.follow import RunFollower
from sentinel.messages import EndStep

WORLD, LATE = 2, 1
PLANTED_S = 0.1
NUM_STEPS, NUM_FIRST = 10, 3
"""Steps of each way, and those of them that begin: they compile and allocate."""
WIDTH = 512


def ends_of(folder: str, run: str) -> dict[int, list[EndStep]]:
    """Return the ends of steps that lie in a run's spool, by rank."""
    follower = RunFollower(Path(folder) / run)
    ends: dict[int, list[EndStep]] = {}
    while more := follower.poll(final=True):
        for record in more:
            if isinstance(record.message, EndStep):
                ends.setdefault(record.incarnation.rank, []).append(record.message)
    return ends


def alone(options: argparse.Namespace, folder: str) -> list[float]:
    """Return `wait_s` of three steps of a process without others."""
    training = Training(options, "small", 2)
    monitor = training.attach(VARIANTS["default"], "alone")
    for _ in range(3):
        training.step(monitor)
    monitor.detach()
    return [end.wait_s for end in ends_of(folder, "alone")[0]]


class Sleep:
    """Holds up the device, or the host where there is no device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cycles_a_s = 0.0
        if device == "cuda":
            torch.cuda._sleep(1000)
            self.cycles_a_s = 10_000_000 / results.seconds_of(lambda: torch.cuda._sleep(10_000_000), "cuda", 5)

    def __call__(self, seconds: float) -> None:
        if self.device == "cuda":
            torch.cuda._sleep(int(seconds * self.cycles_a_s))
        else:
            time.sleep(seconds)


def model_on(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device)


def train(way: str, device: str, rank: int, sleep: Sleep) -> None:
    """Train `NUM_STEPS` steps in one of the ways, watched, into the run of its name."""
    model: nn.Module = model_on(device)
    if rank == LATE and way != "streams":
        model[0].register_forward_pre_hook(lambda module, args: sleep(PLANTED_S))
    call = nn.parallel.DistributedDataParallel(model) if way == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = sentinel.attach(call, optimizer, {"run": way})
    gather = side_gather(device, rank, sleep) if way == "streams" else None
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        call(torch.ones(8, WIDTH, device=device)).sum().backward()
        if way == "calls":
            for param in model.parameters():
                dist.all_reduce(param.grad)
        elif gather is not None:
            gather()
        optimizer.step()
    results.synchronize(device)
    monitor.detach()
    dist.barrier()


def side_gather(device: str, rank: int, sleep: Sleep) -> Any:
    """Return a call of NCCL on a stream of its own, for which the current stream waits; only the first rank's is held up."""
    group = [dist.new_group([one], backend="nccl") for one in range(WORLD)][rank]
    side, buffer = torch.cuda.Stream(), torch.ones(1024, device=device)

    def gather() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_reduce(buffer, group=group)
            if rank != LATE:
                sleep(PLANTED_S)
        torch.cuda.current_stream().wait_stream(side)

    return gather


def pair_us(device: str) -> float:
    """Return microseconds of the host for one timed wait; no call is made in it."""
    failures: list[Exception] = []
    clock = StreamWaits(Accelerator(torch.device(device)), lambda site, error, **_: failures.append(error))
    number, times = 1000, []
    for _ in range(5):
        clock.begin_step()
        began = time.perf_counter()
        for _ in range(number):
            clock.enter()
            clock.add(0.0)
        times.append((time.perf_counter() - began) / number * 1e6)
        _, reading = clock.take()
        results.synchronize(device)
        known = reading() if reading is not None else None
        if failures or known is None:
            raise SystemExit(f"a thousand waits were not timed: {failures or known}")
    clock.remove()
    return statistics.median(times[1:])


def run_rank(rank: int, device: str, folder: str) -> None:
    """Train in each way as one of two ranks; the first one leaves `pair_us` in the folder."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK="0", SENTINEL_DIR=folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=WORLD)
    sleep = Sleep(device)
    for way in ways_on(device):
        train(way, device, rank, sleep)
    if device == "cuda" and rank == 0:
        (Path(folder) / "pair_us").write_text(f"{pair_us(device):.2f}")
    dist.barrier()
    dist.destroy_process_group()


def ways_on(device: str) -> tuple[str, ...]:
    """Return the ways that there are on a device."""
    return ("ddp", "calls", "streams") if device == "cuda" else ("ddp", "calls")


def waited(folder: str, way: str) -> dict[int, float]:
    """Return the median wait of each rank in milliseconds, of the steps behind the first ones."""
    found = {}
    for rank, ends in sorted(ends_of(folder, way).items()):
        known = [end.wait_s for end in ends[NUM_FIRST:] if end.wait_s >= 0]
        if 2 * len(known) < NUM_STEPS - NUM_FIRST:
            raise SystemExit(f"{way}: rank {rank}: expected to know most steps' waits, got {[end.wait_s for end in ends]}")
        found[rank] = round(statistics.median(known) * 1e3, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = results.options_of(parser)
    result = results.Result("waiting", options)
    result.note("planted_ms", PLANTED_S * 1e3)
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-waiting-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        said = alone(options, folder)
        result.note("alone_wait_s", said)
        print(f"wait_s of three steps of a process alone: {said}")
        if said != [-1.0, -1.0, -1.0]:
            raise SystemExit(f"expected -1, not known, of one process on one device, got {said}")
        mp.start_processes(run_rank, args=(options.device, folder), nprocs=WORLD, start_method="spawn")
        found = {}
        for way in ways_on(options.device):
            found[way] = waited(folder, way)
            result.note("wait_ms", found)
            print(f"{way}: milliseconds that ranks 0 and {LATE} waited of {PLANTED_S * 1e3:g} planted: {found[way]}")
        if options.device == "cuda":
            result.note("pair_us", float((Path(folder) / "pair_us").read_text()))
    for way, waits in found.items():
        if not (waits[0] > 0.5e3 * PLANTED_S and waits[LATE] < 0.5 * waits[0]):
            raise SystemExit(f"{way}: expected rank 0 to wait {PLANTED_S * 1e3:g} ms and rank {LATE} not to, got {waits}")
    ways = "; ".join(f"{way} {waits[0]:g} and {waits[LATE]:g} ms" for way, waits in found.items())
    us = f", {result.cell['pair_us']} us of the host a wait" if "pair_us" in result.cell else ""
    result.complete(f"alone -1; of {PLANTED_S * 1e3:g} ms planted on rank {LATE}, ranks 0 and {LATE} waited: {ways}{us}")


if __name__ == "__main__":
    main()
