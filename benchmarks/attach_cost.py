"""What one `sentinel.attach` takes of the processor, beside that of another checkout.

    python benchmarks/attach_cost.py [--before CHECKOUT] [--rounds 3]

A model of eight small layers, so that what is told is the fixed cost: mostly a look through everything that is imported for
functions of torch. Each round starts a process for each checkout in turn; a figure is the median of 15 attaches.
CHECKOUT: a tree whose native part is built (`make setup` in it).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
MANY = ("sympy", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor", "duckdb", "pyarrow.parquet",
        "wandb", "mlflow", "hypothesis")  # fmt: skip
"""Imported where many modules are asked for, as far as they are installed."""
CASES = ("few modules", "many modules", "many modules, attention measured")
CHILD = """
import contextlib, importlib, statistics, sys, tempfile, time

import torch
from torch import nn

import sentinel

case, many = sys.argv[1], sys.argv[2].split(",")
if "many" in case:
    for name in many:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
probes = {"probes": {"attention": {}}} if "attention" in case else {}


def attached():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as directory:
        began = time.process_time()
        monitor = sentinel.attach(model, optimizer, {"directory": directory, **probes})
        took = time.process_time() - began
        monitor.close()
    return took


attached()
print(f"{1e3 * statistics.median(attached() for _ in range(15)):.1f} ms, {len(sys.modules)} modules")
"""


def main() -> None:
    """Print a line for each case, checkout and round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    trees = {"this": HERE} | ({} if options.before is None else {"before": options.before.resolve()})
    for case in CASES:
        for _ in range(options.rounds):
            for name, tree in trees.items():
                done = subprocess.run(
                    [sys.executable, "-c", CHILD, case, ",".join(MANY)], capture_output=True, text=True, cwd=tree,
                    env={**os.environ, "PYTHONPATH": str(tree)},
                )  # fmt: skip
                if done.returncode:
                    raise SystemExit(f"{tree}: {done.stderr[-2000:]}")
                print(f"{case}, {name}: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
