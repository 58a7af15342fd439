"""What groups of tensors cost: judging a rule on them beside the same rule on single tensors, keeping steps, answering.

usage: aggregates.py [--steps 60]

One core, steps made in memory and merged before the clock starts; times are medians, in one process. `first` is the step at
which the tensors of a layout are put into their groups. Prints two tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from sentinel.aggregate import Aggregate
from sentinel.exports.series import Picker, RecentSteps, SeriesQuery
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, Kind
from sentinel.rules.engine import Engine
from sentinel.rules.language.schema import Match, Pack, Rule
from sentinel.step_view import RankStep
from sentinel.version import VERSION

GROUPS = {
    "the model": ("*",),
    "each layer": ("layers.{}.*",),
    "each expert across layers": ("layers.*.experts.{}.*",),
    "all three": ("*", "layers.{}.*", "layers.*.experts.{}.*"),
}


def make_layout(num_tensors: int) -> ModelLayout:
    """Return one rank that holds 20 weight gradients a layer, of ten experts."""
    tensors = tuple(
        TensorInfo(id=at, name=f"layers.{at // 20}.experts.{at % 20 // 2}.w{at % 2}", kind="wgrad", shape=(1000,))
        for at in range(num_tensors)
    )
    chunks = (ChunkInfo(vpp_stage=0, depth=0),)
    descriptor = Descriptor(
        version=VERSION, place=Place(), chunks=chunks, tensors=tensors, row_fields=(), row_bytes=ROW_DTYPE.itemsize
    )
    return ModelLayout({0: descriptor})


def make_view(layout: ModelLayout, step: int, rng: np.random.Generator) -> ClosedStep:
    """Return a healthy step, merged."""
    n = len(layout.tensors)
    rows = np.zeros(n, ROW_DTYPE)
    rows["tensor"] = rows["call_id"] = np.arange(n)
    rows["kind"], rows["bad_call_id"], rows["bad_micro_step"], rows["count"] = Kind.WGRAD, NONE_ID, -1, 1000
    norm = np.exp(0.1 * rng.standard_normal(n))
    rows["m2"], rows["m4"], rows["min"], rows["max"] = norm**2, 3.0 * norm**4 / 1000, -norm, norm
    end = EndStep(step=step, num_rows=n, num_calls=n)
    part = RankStep(rank=0, descriptor=layout.descriptors[0], rows=rows, end_step=end, time=float(step))
    view = ClosedStep(run="benchmark", attempt=0, step=step, layout=layout, parts=[part])
    _ = view.stats, view.present, view.moments, view.bad_rows
    return view


def median_us(calls: list[Callable[[], object]]) -> float:
    """Return the median time of the calls, microseconds."""
    times = []
    for call in calls:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def judged(views: list[ClosedStep], aggregates: tuple[str, ...]) -> tuple[float, float, int]:
    """Return ms of the first step, us of a later one, and the series judged."""
    match = Match(kind=("wgrad",), statistic=("norm",), aggregate=tuple(map(Aggregate.parse, aggregates)))
    engine = Engine(Pack(rules=(Rule(name="groups", detector="AnomalyTurbulence", match=match),)))
    began = time.perf_counter()
    engine.judge(views[0])
    first = time.perf_counter() - began
    later = median_us([lambda view=view: engine.judge(view) for view in views[1:]])  # type: ignore[misc]
    return first * 1e3, later, engine.num_points_judged["groups"] // len(views)


def keeping(views: list[ClosedStep]) -> tuple[float, float, float]:
    """Return us to keep a step for `/api/v1/series`, KB that it takes, and us to form a series a layer of it."""
    recent = RecentSteps(max_bytes=2**30)
    picker = Picker(SeriesQuery(aggregates=(Aggregate.parse("layers.{}.*"),), kinds=("wgrad",), statistics=("norm",)))
    add = median_us([lambda view=view: recent.add(view) for view in views])  # type: ignore[misc]
    steps = recent.steps()
    picker.points(steps[0])
    answer = median_us([lambda step=step: picker.points(step) for step in steps])  # type: ignore[misc]
    return add, recent.num_bytes / len(steps) / 1024, answer


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rng = np.random.default_rng(3)
    # The first of all pays for what is loaded and compiled once.
    judged([make_view(make_layout(20), step, rng) for step in range(3)], ("*",))
    kept = []
    print("| tensors | groups | series | first step ms | us a step | same rule, each tensor, us |")
    print("|---|---|---|---|---|---|")
    for num_tensors in (1000, 20_000):
        layout = make_layout(num_tensors)
        views = [make_view(layout, step, rng) for step in range(steps)]
        _, alone, _ = judged(views, ())
        for name, aggregates in GROUPS.items():
            first, later, series = judged(views, aggregates)
            print(f"| {num_tensors} | {name} | {series} | {first:.0f} | {later:.0f} | {alone:.0f} |")
        kept.append((num_tensors, *keeping(views)))
    print("\n| tensors | keeping a step, us | KB a step | a step of all layers' norms, us |\n|---|---|---|---|")
    for num_tensors, add, size, answer in kept:
        print(f"| {num_tensors} | {add:.0f} | {size:.0f} | {answer:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
