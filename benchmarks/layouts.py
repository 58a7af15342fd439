"""Added step time on each layout that runs on a CPU over gloo: without Sentinel, by default, and with everything measured.

Within the same processes the variants take turns, round by round, on the same model; a figure is the median over rounds of
(variant's mean step time) / (bare mean step time of the same round), on rank 0.

    python benchmarks/layouts.py [--rounds 5] [--steps 6] [--layout ddp ...] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1]))

CPU = torch.device("cpu")
WIDTH, NUM_BLOCKS, TOKENS = 256, 8, 1536
EVERYTHING = ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]
VARIANTS: dict[str, dict[str, Any] | None] = {"bare": None, "default": {}, "everything": {"kinds": EVERYTHING}}
WORLD = 2

Step = Callable[[], None]


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Net(nn.Module):
    """`count` blocks, numbered from `first`."""

    def __init__(self, first: int = 0, count: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(first + n): Block() for n in range(count)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean square."""
    return (output - target).square().mean()


def loop(model: nn.Module, optimizer: Any) -> tuple[list[nn.Module], Any, Step]:
    """A plain loop with clipping."""
    x = torch.randn(TOKENS // WORLD, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), -x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return [model], optimizer, step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), 1e-4)


def ddp() -> Any:
    """DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(Net())
    return loop(model, adamw(model))


def zero_redundancy() -> Any:
    """DDP with the optimizer's state cut over the ranks."""
    model = nn.parallel.DistributedDataParallel(Net())
    return loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4))


def fsdp1() -> Any:
    """FSDP1 with original parameters."""
    model = FSDP1(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=CPU)
    return loop(model, adamw(model))


def fsdp2() -> Any:
    """fully_shard on every block."""
    mesh, model = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",)), Net()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, adamw(model))


def tp() -> Any:
    """Column- and row-parallel linears; every rank sees all tokens."""
    mesh, model = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)), Net()
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    x, optimizer = torch.randn(TOKENS // WORLD, WIDTH), adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), -x).backward()
        optimizer.step()

    return [model], optimizer, step


def pipeline(schedule: str, chunks: int) -> Any:
    """torch.distributed.pipelining, 4 micro-batches."""
    rank, num = dist.get_rank(), WORLD * chunks
    indices = [rank, num - 1 - rank] if "ZBV" in schedule else [rank + n * WORLD for n in range(chunks)]
    per = NUM_BLOCKS // num
    models: list[nn.Module] = [Net(index * per, per) for index in indices]
    stages = [PipelineStage(model, index, num, CPU) for model, index in zip(models, indices, strict=True)]
    runner = getattr(schedules, schedule)(stages if chunks > 1 else stages[0], 4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], 1e-4)
    x = torch.randn(TOKENS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        runner.step(*((x,) if 0 in indices else ()), target=-x if num - 1 in indices else None)
        optimizer.step()

    return models, optimizer, step


LAYOUTS: dict[str, Callable[[], Any]] = {
    "ddp": ddp,
    "zero_redundancy": zero_redundancy,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "tp": tp,
    "pp 1f1b": lambda: pipeline("Schedule1F1B", 1),
    "pp interleaved": lambda: pipeline("ScheduleInterleaved1F1B", 2),
    "pp zbv": lambda: pipeline("ScheduleZBVZeroBubble", 2),
}


def run_rank(rank: int, port: int, layout: str, rounds: int, steps: int, folder: str) -> None:
    """Time all variants of one layout, in turns."""
    os.environ.update(SENTINEL_DIR=folder, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    import sentinel

    models, optimizer, step = LAYOUTS[layout]()
    step()
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        names = list(VARIANTS)
        for name in names[number % 3 :] + names[: number % 3]:
            config = VARIANTS[name]
            monitor = None
            if config is not None:
                target = models if len(models) > 1 else models[0]
                monitor = sentinel.attach(target, optimizer, {**config, "run": f"{name}-{number}"})
            step()
            step()
            gc.collect()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            dist.barrier()
            times[name].append((time.perf_counter() - began) / steps)
            if monitor is not None:
                assert monitor.is_alive
                monitor.detach()
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def measure(layout: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return the figures of one layout."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(run_rank, args=(port, layout, rounds, steps, folder), nprocs=WORLD)
        times = json.loads((Path(folder) / "times.json").read_text())
    found: dict[str, Any] = {"layout": layout, "bare_ms": round(1e3 * statistics.median(times["bare"]), 1)}
    for name in ("default", "everything"):
        ratios = [ours / bare for ours, bare in zip(times[name], times["bare"], strict=True)]
        found[name] = round(statistics.median(ratios), 3)
        found[f"{name}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layout", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    options = parser.parse_args()
    print(f"{'layout':<18}{'bare ms':>9}{'default':>10}{'everything':>12}   range of default, of everything", flush=True)
    results = []
    for layout in options.layout:
        one = measure(layout, options.rounds, options.steps)
        ranges = f"{one['default_range']} {one['everything_range']}"
        print(f"{layout:<18}{one['bare_ms']:>9}{one['default']:>10}{one['everything']:>12}   {ranges}", flush=True)
        results.append(one)
    if options.write:
        report = {
            "date": datetime.date.today().isoformat(), "torch": str(torch.__version__), "machine": platform.machine(),
            "cores": os.cpu_count(), "ranks": WORLD, "parameters": NUM_BLOCKS * 8 * WIDTH * WIDTH, "results": results,
        }  # fmt: skip
        path = Path(__file__).parent / "results" / f"{report['date']}-layouts.json"
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
