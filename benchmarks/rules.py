"""Records judged a second by Engine.judge with the default pack, one core, on healthy steps made in memory.

usage: rules.py [--steps 200]

Merging is ingest's work and is done before the clock starts; what is timed is judging alone: the median step,
for other work shares the machine. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import numpy as np

from sentinel.ingest.merge import Layout, RankStep, StepView
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, Kind
from sentinel.rules.engine import Engine
from sentinel.rules.loader import load_pack
from sentinel.version import VERSION

KINDS = ("param", "wgrad", "activation", "dgrad")
WARMUP_STEPS = 60


def make_layout(num_tensors: int, num_ranks: int) -> Layout:
    """Return data-parallel ranks that hold the same tensors, a quarter of each kind."""
    tensors = tuple(
        TensorInfo(id=at, name=f"layers.{at // 4}.mlp", kind=KINDS[at % 4], shape=(1000,), site_pos=at // 4)
        for at in range(num_tensors)
    )
    return Layout(
        {
            rank: Descriptor(
                version=VERSION,
                place=Place(rank=rank, world_size=num_ranks, dp_rank=rank, dp_size=num_ranks),
                chunks=(ChunkInfo(vpp_stage=0, depth=0),),
                tensors=tensors,
                row_fields=(),
                row_bytes=ROW_DTYPE.itemsize,
            )
            for rank in range(num_ranks)
        }
    )


def make_view(layout: Layout, step: int, rng: np.random.Generator) -> StepView:
    """Return a healthy step, merged."""
    parts = []
    for rank, descriptor in layout.descriptors.items():
        n = len(descriptor.tensors)
        rows = np.zeros(n, ROW_DTYPE)
        rows["tensor"] = rows["call_id"] = np.arange(n)
        rows["kind"] = [int(Kind.of(tensor.kind)) for tensor in descriptor.tensors]
        rows["bad_call_id"], rows["bad_micro_step"], rows["count"] = NONE_ID, -1, 1000
        norm = np.exp(0.1 * rng.standard_normal(n))
        rows["m2"], rows["m4"] = norm**2, (3.0 + 0.1 * rng.random(n)) * norm**4 / 1000
        rows["min"], rows["max"] = -norm, norm
        scalars = {"loss": 3.0 + 0.05 * rng.standard_normal(), "grad_norm": 1.0 + 0.1 * rng.random(), "lr": 1e-3}
        end = EndStep(step=step, num_rows=n, num_calls=n, scalars=scalars)
        parts.append(RankStep(rank=rank, descriptor=descriptor, rows=rows, end_step=end, time=float(step)))
    view = StepView(run="benchmark", attempt=0, step=step, layout=layout, parts=parts)
    _ = view.stats, view.present, view.moments, view.scalars
    return view


def measure(num_tensors: int, num_ranks: int, num_steps: int) -> tuple[float, float, float, int]:
    """Return records/s in millions, us a step, state bytes a tensor series, and anomalies found."""
    layout, rng = make_layout(num_tensors, num_ranks), np.random.default_rng(3)
    views = [make_view(layout, step, rng) for step in range(WARMUP_STEPS + num_steps)]
    engine = Engine(load_pack())
    num_anomalies = sum(len(engine.judge(view)) for view in views[:WARMUP_STEPS])
    before = engine.num_rows_judged
    times = []
    for view in views[WARMUP_STEPS:]:
        began = time.perf_counter()
        num_anomalies += len(engine.judge(view))
        times.append(time.perf_counter() - began)
    rows = engine.num_rows_judged - before
    assert rows == sum(view.num_expected for view in views[WARMUP_STEPS:])
    middle = sorted(times)[len(times) // 2]
    return rows / num_steps / middle / 1e6, middle * 1e6, engine.state_bytes_per_tensor, num_anomalies


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("| tensors | ranks | records a step | M records/s | us a step | state B/tensor | anomalies |")
    print("|---|---|---|---|---|---|---|")
    for num_tensors, num_ranks, factor in ((2000, 1, 1), (2000, 8, 1), (20000, 1, 4), (16000, 4, 8)):
        speed, per_step, state, found = measure(num_tensors, num_ranks, max(steps // factor, 10))
        total = num_tensors * num_ranks
        print(f"| {num_tensors} | {num_ranks} | {total} | {speed:.1f} | {per_step:.0f} | {state:.0f} | {found} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
