"""False pages, bounded further: each healthy recording judged again from many starts, thinned, and beside itself.

    python benchmarks/healthy_replays.py DIR [DIR ...] [--write]

DIR holds recordings of benchmarks/healthy.py. Each is read once and handed to many judges: one from the start; others that
begin at a later step, so that warm-up falls elsewhere (and the learning rate, the batch and the loss are in mid-course);
others that see every 2nd, 3rd, 5th step. All count their points, but they are not independent: the same numbers come again
under other baselines. What is independent are the points of the first judge, and only they bound a rate; the others say how
much hangs on where a warm-up fell.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

from healthy_judging import JudgedStretch, Replay

from sentinel.anomaly import Severity
from sentinel.judge.recorded import recorded_views
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths

PACK = load_pack()
STARTS = (0.03, 0.08, 0.15, 0.25, 0.37, 0.5, 0.61, 0.75, 0.88)
"""Shares of a recording at which a judge begins; of the first 3 % the learning rate still rises."""
THINNED = ((2, 0), (2, 1), (3, 1), (5, 2))
"""(every so many steps, from which on)."""


@dataclasses.dataclass
class Listener:
    """One judge, and the steps it sees."""

    name: str
    start: int = 0
    every: int = 1
    phase: int = 0
    replay: Replay = dataclasses.field(default_factory=lambda: Replay(PACK))
    said: JudgedStretch = dataclasses.field(default_factory=JudgedStretch)

    def matches(self, number: int) -> bool:
        """Return whether it sees the step of this number."""
        return number >= self.start and number % self.every == self.phase


def listen(truth_file: Path) -> list[Listener]:
    """Return the listeners of one recording, its healthy steps heard."""
    truth = json.loads(truth_file.read_text())
    num = truth["healthy_until"]
    listeners = [Listener("whole")]
    listeners += [Listener(f"from step {int(share * num)}", start=int(share * num)) for share in STARTS]
    listeners += [Listener(f"every {every}th, from {phase}", every=every, phase=phase) for every, phase in THINNED]
    for number, (view, _) in enumerate(recorded_views(RunPaths.of(truth_file.with_suffix("")), None, recompute=True)):
        if view.step >= num:
            break
        for one in listeners:
            if one.matches(number):
                one.replay.take([view], one.said)
    return listeners


def main() -> int:
    """Judge, print. Exit 1 on a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="recordings whose names begin so")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    files = [file for folder in options.folders for file in sorted(folder.glob("*.json"))]
    print("| recording | judges | steps judged | tensor-steps | points | pages | warnings, whole | of the others |")
    print("|---|---|---|---|---|---|---|---|")
    total, independent, pages, rules = Counter[str](), Counter[str](), 0, Counter[tuple[str, str]]()
    for file in files:
        if options.only and not file.stem.startswith(tuple(options.only)):
            continue
        began = time.monotonic()
        received = listen(file)
        for one in received:
            for counts in (total, independent)[: 2 if one.name == "whole" else 1]:
                counts.update(steps=one.said.num_steps, tensors=one.said.num_tensor_steps, points=one.said.num_points)
            pages += len(one.said.paged)
            rules.update(one.said.by_rule())
            for step, title in one.said.paged.values():
                print(f"PAGE {file.stem} {one.name}: step {step}: {title}", file=sys.stderr)
        sums = [sum(getattr(one.said, name) for one in received) for name in ("num_steps", "num_tensor_steps", "num_points")]
        notified = [one.said.num_of(Severity.WARNING) for one in received]
        cells = [file.stem, len(received), *sums, sum(len(one.said.paged) for one in received), notified[0]]
        others = ", ".join(map(str, notified[1:]))
        print(f"| {' | '.join(map(str, cells))} | {others} |", flush=True)
        print(f"{file.stem}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print("\nOnsets, all judges: " + (", ".join(f"{r} {s} {n}" for (r, s), n in sorted(rules.items())) or "none"))
    for what, counts in (("independent", independent), ("all judges", total)):
        print(f"{what}: {counts['steps']:.3g} steps, {counts['tensors']:.3g} tensor-steps, {counts['points']:.3g} points")
    print(f"{pages} pages", end="")
    if not pages:
        bound = f"fewer than one in {independent['tensors'] / 3:.2g} tensor-steps, {independent['points'] / 3:.2g} points"
        print(f": {bound} (95 %, rule of three, independent points alone)", end="")
    print(".")
    return 1 if pages else 0


if __name__ == "__main__":
    sys.exit(main())
