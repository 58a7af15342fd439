"""What questions to a long history take in two trees of Sentinel, beside each other: processor time and clock.

    python benchmarks/history_beside.py --before DIR --keep DIR [--rounds 3] [--asks 5]

`--before`: a checkout of the tree that is compared with this one. `--keep`: where `history_scale.py` kept its histories.
Each round asks one tree and then the other, each in a process of its own, so that both meet the same load. First: the first
question of a process, behind its imports. Again: the median of `--asks` further ones, as a page that is open asks them.
Processor time is that of all threads of the process; on a machine on which others work it says more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

_ASKS = """
import json, sys, time
from pathlib import Path
import sentinel
import sentinel.history.pictures
from sentinel.daemon.history_api import HistoryQueries, HistoryRequest
import duckdb

sentinel.history.pictures.ANSWER_S = 600.0  # Other programs may have the machine; nothing is given up.
many, num = Path(sys.argv[1]), int(sys.argv[2])
queries, opened = HistoryQueries(), sentinel.open(many)
of = lambda *asked: HistoryRequest.parse([("run", "many"), *asked])
layers, scalars = of(("kind", "wgrad"), ("columns", "1000")), of(("name", "loss"), ("name", "grad_norm"))
old = of(("kind", "wgrad"), ("from", "500000"), ("to", "509999"))
steps = of(("kind", "steps"))
questions = {
    "layers x steps, all": lambda: queries.heatmap(many, layers),
    "layers x steps, 10,000 old steps": lambda: queries.heatmap(many, old),
    "plots of two scalars, all steps": lambda: queries.series(many, scalars),
    "plot of the time of a step, all steps": lambda: queries.series(many, steps),
    "the list of what there is": lambda: queries.held(many, scalars),
    "one series, all steps (sentinel.open)": lambda: opened.series("layers.7.weight", "std"),
}
found = {}
for name, ask in questions.items():
    took = []
    for _ in range(1 + num):
        begun, before = time.perf_counter(), time.process_time()
        ask()
        took.append((1e3 * (time.process_time() - before), 1e3 * (time.perf_counter() - begun)))
    found[name] = took
print(json.dumps(found))
"""
Took = Mapping[str, Sequence[tuple[float, float]]]
"""Question -> (processor, clock) in ms of each time it was asked."""


def asked(tree: Path, many: Path, num: int) -> Took:
    """Return what a process of a tree took."""
    done = subprocess.run(
        [sys.executable, "-c", _ASKS, str(many), str(num)],
        capture_output=True, text=True, check=False, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr[-2000:]}")
    took: Took = json.loads(done.stdout.splitlines()[-1])
    return took


def main() -> None:
    """Ask both trees in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR")
    parser.add_argument("--keep", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--asks", type=int, default=5)
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": Path(__file__).resolve().parents[1]}
    load = "/".join(f"{one:.1f}" for one in os.getloadavg())
    took: dict[str, list[Took]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            took[name].append(asked(tree, options.keep.resolve() / "many", options.asks))
    end = "/".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{os.cpu_count()} cores ({platform.machine()}), load {load} at the start, {end} at the end\n")
    print("| question | processor, ms: first, before | after | again, before | after | ratio | clock, ms: before | after |")
    print("|---|---|---|---|---|---|---|---|")
    for question in took["before"][0]:
        first = {name: median(one[question][0][0] for one in rounds) for name, rounds in took.items()}
        again = {name: median(each[0] for one in rounds for each in one[question][1:]) for name, rounds in took.items()}
        clock = {name: median(each[1] for one in rounds for each in one[question][1:]) for name, rounds in took.items()}
        print(
            f"| {question} | {first['before']:.0f} | {first['after']:.0f} | {again['before']:.0f} | {again['after']:.0f} "
            f"| {again['after'] / again['before']:.2f} | {clock['before']:.0f} | {clock['after']:.0f} |"
        )


if __name__ == "__main__":
    main()
