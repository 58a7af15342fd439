"""What measuring inside a compiled model costs: step time, compile time and graphs, each against the bare compiled model.

    python benchmarks/compiled.py --write       # also writes benchmarks/results/<date>-compiled.json

One process a contender, all in turns, a few steps each: a machine that warms up or is shared slows all of them alike. Each
round gives one ratio a contender; the median over rounds is reported, with its quartiles. `host` is the same ratio of
processor seconds. Losses are compared with the bare model's, bit by bit. `op` is one call that finds its site not due.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

MODULE_KINDS = ["activation", "activation_in", "dgrad", "dgrad_in"]
VARIANTS: dict[str, dict[str, Any] | None] = {
    "bare compiled": None,
    "attached, everything off": {"kinds": [], "black_box": False},
    "black box": {"kinds": [], "black_box": True},
    "every site in the graph, none due": {"kinds": MODULE_KINDS, "black_box": False, "step_interval": 10**9},
    "every site, every step": {"kinds": MODULE_KINDS, "black_box": True},
}


def contend(pipe: Connection, settings: dict[str, Any] | None, options: argparse.Namespace, folder: str) -> None:
    """Train in this process: a number of steps for each number received."""
    from data import StandardLibrary
    from model import GPT, GPTConfig, next_token_loss
    from torch._dynamo.utils import counters

    import sentinel

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=options.width, layers=options.layers, sequence=options.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = StandardLibrary(options.sequence, options.batch)
    os.environ.update(SENTINEL_DIR=folder, TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor", SENTINEL_RUN=f"run-{os.getpid()}")
    if settings is not None:
        sentinel.attach(model, optimizer, settings)
    call = torch.compile(model, fullgraph=True)
    step = 0
    while True:
        num_steps = pipe.recv()
        if num_steps is None:
            break
        wall, host, losses = [], [], []
        for _ in range(num_steps):
            batch = data.micro_step(step, 0, 0)
            began, began_host = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            loss = next_token_loss(call(batch[:, :-1]), batch[:, 1:])
            loss.backward()
            optimizer.step()
            wall.append(time.perf_counter() - began)
            host.append(time.process_time() - began_host)
            losses.append(float(loss.detach()))
            step += 1
        pipe.send((wall, host, losses, counters["stats"]["unique_graphs"]))


def op_cost_us(threads: int) -> float:
    """Return the time of one op whose site does not listen: dispatch, the Python call, the ticket."""
    from sentinel.collect.compiled.ops import IN_GRAPH, observe

    torch.set_num_threads(threads)
    tensor, site = torch.zeros(8), torch.tensor(-1)
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(2000):
            observe(tensor, site, None, "", IN_GRAPH)
        best = min(best, time.perf_counter() - began)
    return best / 2000 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time of a compiled model with and without Sentinel.")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="steps of a contender in a round; the first does not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sentinel-compiled-") as folder:
        pipes: dict[str, Connection] = {}
        workers = []
        losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for name, settings in VARIANTS.items():
            mine, theirs = context.Pipe()
            worker = context.Process(target=contend, args=(theirs, settings, options, folder), daemon=True)
            worker.start()
            workers.append(worker)
            pipes[name] = mine
            mine.send(1)  # Compiles: one after the other.
            wall, _, first, _ = mine.recv()
            losses[name] += first
            results[name] = {"first_step_s": round(wall[0], 1)}
        ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
        step_ms: list[float] = []
        for turn in range(options.rounds):
            names = list(VARIANTS)
            took: dict[str, tuple[float, float]] = {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                pipes[name].send(options.steps)
                wall, host, more, graphs = pipes[name].recv()
                losses[name] += more
                took[name] = (min(wall[1:]), min(host[1:]))
                results[name]["graphs"] = graphs
            bare = took["bare compiled"]
            step_ms.append(bare[0] * 1e3)
            for name in names:
                ratios[name].append((took[name][0] / bare[0], took[name][1] / bare[1]))
        for pipe in pipes.values():
            pipe.send(None)
        for worker in workers:
            worker.join(20)
    for name, pairs in ratios.items():
        wall = sorted(ratio for ratio, _ in pairs)
        results[name] |= {
            "wall": round(statistics.median(wall), 4),
            "wall_quartiles": [round(wall[len(wall) // 4], 4), round(wall[-1 - len(wall) // 4], 4)],
            "host": round(statistics.median(ratio for _, ratio in pairs), 4),
            "losses_bit_identical": losses[name] == losses["bare compiled"],
        }
    report = {
        "what": "step time as a ratio to the bare compiled model (torch.compile, inductor, fullgraph, fp32, CPU)",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} thread(s), shared with other work",
        "torch": torch.__version__,
        "model": vars(options),
        "bare_step_ms": round(statistics.median(step_ms), 1),
        "op_us": round(op_cost_us(options.threads), 1),
        "load": os.getloadavg(),
        "results": results,
    }
    print(f"{'':36s} wall   (quartiles)        host   graphs  first step  losses")
    for name, one in results.items():
        low, high = one["wall_quartiles"]
        same = "identical" if one["losses_bit_identical"] else "differ"
        print(
            f"{name:36s} {one['wall']:.3f}  ({low:.3f} - {high:.3f})  {one['host']:.3f}  {one['graphs']:6d}"
            f"  {one['first_step_s']:8.1f} s  {same}"
        )
    print(f"bare step {report['bare_step_ms']} ms; one op that nobody listens to: {report['op_us']} us")
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-compiled.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
