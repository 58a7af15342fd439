"""Verdicts held against planted causes: the fault library x layouts, judged by the daemon's own Judge.

    python benchmarks/attribution.py [--layouts 2,2,1 1,4,1] [--faults "lr x100"] [--seeds 3] [--write]

Layouts are pp,dp,tp. A run is healthy for 60 steps, then one fault strikes. The verdict is that of the gravest incident
that the fault opened, in its last revision; `ever` is each verdict that any of its incidents ever had. `right` are the
verdicts that the layout can show at best; a `hardware` that is not among them is wrong whenever it is said.
`strict` counts only the cause itself.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
from attribution_faults import PLANTS, Plant, Said

from sentinel.anomaly import Incident
from sentinel.daemon.judge import Judge
from sentinel.ingest.merge import Layout, RankStep, StepView
from sentinel.rules.loader import load_pack
from sentinel.testing import SyntheticRun

LAYOUTS = ("1,1,1", "1,2,1", "1,4,1", "1,8,1", "2,2,1", "2,1,1", "2,2,2", "1,2,2", "4,3,1")
HEALTHY_STEPS = 60
ROOT = Path(__file__).parents[1]


class Rig:
    """One layout: a healthy past, judged once, and what comes after it, judged for each fault."""

    def __init__(self, layout: str, seed: int, dtype: str) -> None:
        pp, dp, tp = map(int, layout.split(","))
        self.run = SyntheticRun(
            Path(tempfile.mkdtemp()) / f"{layout}-{seed}", pp=pp, dp=dp, tp=tp, layers=4, elements=32, seed=seed, ranks=(),
            d_model=32, kinds=("param", "wgrad", "activation", "dgrad"),
        )  # fmt: skip
        self._descriptors = {}
        for rank in range(self.run.num_ranks):
            told = self.run.descriptor(rank)
            tensors = tuple(msgspec.structs.replace(one, dtype=dtype) for one in told.tensors)
            self._descriptors[rank] = msgspec.structs.replace(told, tensors=tensors)
        self._layout = Layout(self._descriptors)
        self._positions = []
        for one in self.run._ranks:
            of = np.zeros(len(one.table.descriptor.tensors), np.int64)
            of[one.table.rows["tensor"]] = one.table.position
            self._positions.append(of)
        self._pack = load_pack()
        judge = Judge(self._pack)
        self.num_rows = 0
        self.early: list[Incident] = []
        for step in range(HEALTHY_STEPS):
            self.early += judge.judge(None, self.view(step, None)).incidents
        self._snapshot = judge.snapshot()

    def view(self, step: int, plant: Plant | None) -> StepView:
        """Return one step of all ranks, a fault in it."""
        parts = []
        for rank in range(self.run.num_ranks):
            rows, end = self.run.observe(rank, step)
            rows = rows.copy()
            if plant is not None and plant.change is not None:
                said = Said(
                    self.run, self.run.place(rank), step - HEALTHY_STEPS, rows, end, self._positions[rank][rows["tensor"]]
                )
                plant.change(said)
                end = said.end
            parts.append(
                RankStep(rank=rank, descriptor=self._descriptors[rank], rows=rows, end_step=end, time=float(step))
            )
        self.num_rows = sum(len(part.rows) for part in parts)
        return StepView(run=self.run.run, attempt=0, step=step, layout=self._layout, parts=parts)

    def revisions(self, plant: Plant) -> list[Incident]:
        """Return all revisions of the incidents that a fault opened."""
        judge = Judge(self._pack)
        judge.restore(self._snapshot)
        self.run.faults[:] = plant.faults(self.run, HEALTHY_STEPS) if plant.faults is not None else []
        self.run._values._poisoned_from = None
        found: list[Incident] = []
        for step in range(HEALTHY_STEPS, HEALTHY_STEPS + plant.steps):
            found += judge.judge(None, self.view(step, plant)).incidents
            self.run._values.settle(step)
        self.run.faults[:] = []
        self.run._values._poisoned_from = None
        return [one for one in found if one.opened_step >= HEALTHY_STEPS]


def gravest(revisions: list[Incident]) -> Incident | None:
    """Return the newest revision of the incident that is the gravest, the oldest of several."""
    newest = {one.id: one for one in revisions}
    own = [one for one in newest.values() if one.state != "merged"]
    return min(own, key=lambda one: (-one.severity.level, one.opened_step, one.id), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--faults", nargs="*", help="names, or parts of them; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--verbose", action="store_true", help="evidence of every verdict")
    parser.add_argument("--write", action="store_true", help="write the dated result")
    options = parser.parse_args()
    plants = [one for one in PLANTS if not options.faults or any(word in one.name for word in options.faults)]
    results: list[tuple[str, Plant, str, set[str], set[str], Incident | None]] = []
    began = time.process_time()
    for layout in options.layouts:
        for seed in range(options.seeds):
            rigs: dict[str, Rig] = {}
            for plant in plants:
                if plant.dtype not in rigs:
                    rigs[plant.dtype] = Rig(layout, seed, plant.dtype)
                rig = rigs[plant.dtype]
                if not plant.needs(rig.run):
                    continue
                revisions = rig.revisions(plant)
                one = gravest(revisions)
                ever = {revision.verdict for revision in revisions}
                verdict = one.verdict if one is not None else "nothing"
                results.append((layout, plant, verdict, ever, plant.right(rig.run), one))
                right = plant.right(rig.run)
                if options.verbose or verdict not in right:
                    print(f"{layout} seed {seed}: {plant.name}: {verdict} (right: {sorted(right)}; ever {sorted(ever)})")
                    for line in one.evidence if one is not None else ():
                        print(f"      {line}")
    lines = report(results, time.process_time() - began)
    print("\n".join(lines))
    if options.write:
        name = f"{datetime.date.today()}-attribution.txt"
        (ROOT / "benchmarks" / "results" / name).write_text("\n".join(lines) + "\n")


def report(results: list[tuple[str, Plant, str, set[str], set[str], Incident | None]], seconds: float) -> list[str]:
    """Return the tables."""
    words = ["batch", "model", "precision", "hardware", "unknown", "nothing"]
    lines = ["fault (rows) x verdict (columns), all layouts and seeds", ""]
    lines.append(f"{'cause':10} {'fault':50}" + "".join(f"{word:>10}" for word in words) + "   right")
    names = list(dict.fromkeys(plant.name for _, plant, *_ in results))
    for name in names:
        own = [one for one in results if one[1].name == name]
        count = Counter(one[2] for one in own)
        good = sum(one[2] in one[4] for one in own)
        cells = "".join(f"{count[word] or '.':>10}" for word in words)
        lines.append(f"{own[0][1].cause:10} {name:50}{cells}   {good}/{len(own)}")
    lines += ["", f"{'cause':10}" + "".join(f"{word:>10}" for word in words)]
    for cause in ("batch", "model", "precision", "hardware", "program"):
        count = Counter(verdict for _, plant, verdict, *_ in results if plant.cause == cause)
        lines.append(f"{cause:10}" + "".join(f"{count[word] or '.':>10}" for word in words))
    good = sum(verdict in right for _, _, verdict, _, right, _ in results)
    causes = {"program": "unknown"}
    strict = sum(verdict == causes.get(plant.cause, plant.cause) for _, plant, verdict, *_ in results)
    wrong = [(layout, plant.name) for layout, plant, _, ever, right, _ in results if "hardware" in ever - right]
    total = max(len(results), 1)
    lines += [
        "",
        f"right, for what the layout can show: {good} of {total} ({good / total:.1%})",
        f"the cause itself: {strict} of {total} ({strict / total:.1%})",
        f"wrong hardware verdicts, at any time: {len(wrong)} {wrong[:6] if wrong else ''}".rstrip(),
        f"{seconds:.0f} s of processor time",
    ]
    by_layout = {layout: [one for one in results if one[0] == layout] for layout in dict.fromkeys(one[0] for one in results)}
    lines += [f"layout {layout}: {sum(o[2] in o[4] for o in own)} of {len(own)}" for layout, own in by_layout.items()]
    return lines


if __name__ == "__main__":
    main()
