"""The fault library: each fault really planted in each trainer, and what the default pack says of it, how soon.

    python benchmarks/faults.py [--recipes gpt moe] [--faults "NaN in a gradient"] [--keep DIR] [--write]

Each model trains healthily, watched and judged, once; then, for every fault, from that very state on with it planted, and
once without (the control, which takes its own noise out). Time is counted in steps since the fault: 0 is the step in which
it struck. `loss` is the first step at which the logged loss leaves that of the control by 4 of its own standard deviations.
What `--keep` holds is not trained again, only judged: by the rules as they are now.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from healthy_faults import LIBRARY
from healthy_judging import JudgedStretch, Replay
from healthy_training import RECIPES, Recipe, Training

from sentinel.anomaly import Anomaly, Severity
from sentinel.ingest.merge import ClosedStep
from sentinel.judge.recorded import recorded_views
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Pack
from sentinel.store.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
CONTROL = "none (control)"
HEALTHY = "healthy"
WITHIN_STEPS = 2
"""An anomaly is to be recorded so soon."""


@dataclasses.dataclass
class Found:
    """What was said of one planted fault. Steps since it struck; -1: never."""

    recipe: str
    fault: str
    first: int = -1
    first_rules: tuple[str, ...] = ()
    warned: int = -1
    paged: int = -1
    loss: int = -1
    rules: tuple[str, ...] = ()
    num_onsets: int = 0
    num_incidents: int = 0
    """Incidents above info, without those that went into another: one fault is one."""
    grows: bool = False

    @property
    def is_in_time(self) -> bool:
        """Whether an anomaly was recorded within two steps."""
        return 0 <= self.first <= WITHIN_STEPS


class Bench:
    """One model, trained healthily to a point from which every fault starts; recordings lie in a folder of their own."""

    def __init__(self, name: str, folder: Path, healthy_steps: int, after: int, seed: int, pack: Pack | None = None) -> None:
        # Nothing but the fault may happen in the steps that are looked at.
        self.recipe: Recipe = dataclasses.replace(RECIPES[name], grows_at=1.0, crash_at=1.0)
        self.name, self.steps, self.seed, self.after = name, healthy_steps, seed, after
        self.folder, self.pack = folder / f"{name}-{healthy_steps}-{seed}-{after}", pack or load_pack()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._start: dict[str, Any] | None = None

    def record(self, faults: Sequence[str]) -> None:
        """Train what the folder lacks."""
        self._recorded(HEALTHY)
        for fault in filter(self.applies, faults):
            began = time.monotonic()
            self._recorded(fault)
            print(f"{self.name}: {fault}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    def judge_healthy(self) -> None:
        """Train and judge the healthy steps, and the control."""
        self._recorded(HEALTHY)
        replay = Replay(self.pack)
        self.healthy = replay.take(self._views(HEALTHY), JudgedStretch())
        self._judge = replay.judge.snapshot()
        self.control, self.control_losses = self._run(CONTROL)

    def plant(self, fault: str) -> Found:
        """Return what was said of the fault."""
        said, losses = self._run(fault)
        usual = {_key(one) for one in self.control.onsets}
        new = [one for one in said.onsets if _key(one) not in usual]
        return summarise(
            self.name, fault, new, said, self.steps, loss_leaves(losses, self.control_losses), LIBRARY[fault].grows
        )

    def applies(self, fault: str) -> bool:
        """Return whether the fault means anything for this model."""
        training = self._training()
        training.restore(self._checkpoint())
        return LIBRARY[fault].applies(training)

    def _run(self, fault: str) -> tuple[JudgedStretch, list[float]]:
        losses = self._recorded(fault)
        replay = Replay(self.pack)
        replay.judge.restore(self._judge)
        return replay.take(self._views(fault), JudgedStretch()), losses

    def _recorded(self, fault: str) -> list[float]:
        """Train with the fault, unless the folder holds it; return the losses."""
        run = _slug(fault)
        truth = self.folder / f"{run}.json"
        if truth.exists():
            losses: list[float] = json.loads(truth.read_text())
            return losses
        shutil.rmtree(self.folder / run, ignore_errors=True)
        training = self._training()
        if fault == HEALTHY:
            training.attach(self.folder, run)
            losses = [training.step(step) for step in range(self.steps)]
            training.detach()
            torch.save(training.checkpoint(), self.folder / "start.pt")
        else:
            training.restore(self._checkpoint())
            training.attach(self.folder, run, first_step=self.steps)
            strike = LIBRARY[fault].make()
            losses = [training.step(self.steps + since, strike, since) for since in range(self.after)]
            strike.remove(training)
            training.detach()
        truth.write_text(json.dumps(losses))
        return losses

    def _checkpoint(self) -> dict[str, Any]:
        if self._start is None:
            self._start = torch.load(self.folder / "start.pt", weights_only=False)
        return self._start

    def _training(self) -> Training:
        # The horizon of the schedule: faults strike in the middle of it.
        return Training(self.recipe, 3 * self.steps, self.seed)

    def _views(self, fault: str) -> list[ClosedStep]:
        paths = RunPaths.of(self.folder / _slug(fault))
        return [view for view, _ in recorded_views(paths, None, recompute=True)]


def _slug(fault: str) -> str:
    return re.sub("[^a-z0-9]+", "-", fault.lower()).strip("-")


def summarise(
    recipe: str, fault: str, onsets: Sequence[Anomaly], said: JudgedStretch, steps: int, loss: int, grows: bool = False
) -> Found:
    """Return the times and rules of the onsets that are news."""
    first = min((one.step for one in onsets), default=steps - 1) - steps
    warned = [one.step - steps for one in onsets if one.severity is not Severity.INFO]
    at_first = sorted({one.rule for one in onsets if one.step - steps == first})
    return Found(
        recipe=recipe,
        fault=fault,
        first=first,
        first_rules=tuple(at_first),
        warned=min(warned, default=-1),
        paged=min((step - steps for step, _ in said.paged.values()), default=-1),
        loss=loss,
        rules=tuple(sorted({one.rule for one in onsets})),
        num_onsets=len(onsets),
        num_incidents=sum(one.severity is not Severity.INFO and one.state != "merged" for one in said.incidents.values()),
        grows=grows,
    )


def loss_leaves(losses: Sequence[float], control: Sequence[float]) -> int:
    """Return the first step at which a loss is not that of the control, by 4 deviations of the control's; -1: none."""
    usual = 4.0 * max(statistics.pstdev(control), 1e-3)
    return next((at for at, (a, b) in enumerate(zip(losses, control, strict=False)) if not abs(a - b) <= usual), -1)


def _key(one: Anomaly) -> tuple[str, str, str, str, int]:
    return one.rule, one.tag_name, one.kind, one.statistic, one.step


def table(found: Sequence[Found]) -> str:
    """Return a table in Markdown."""
    lines = [
        "| fault | model | first anomaly, steps | by | warning | page | incidents | loss shows it | rules |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        by = ", ".join(one.first_rules[:3]) + (f" and {len(one.first_rules) - 3} more" if len(one.first_rules) > 3 else "")
        first, warned, paged, loss = ("-" if at < 0 else str(at) for at in (one.first, one.warned, one.paged, one.loss))
        if not one.is_in_time and one.fault != CONTROL:
            first += " (grows)" if one.grows else " **late**" if one.first > 0 else " **missed**"
        rules = f"{len(one.rules)}: {', '.join(one.rules)}"
        lines.append(
            f"| {one.fault} | {one.recipe} | {first} | {by} | {warned} | {paged} | {one.num_incidents} | {loss} | {rules} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Plant and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--faults", nargs="*", default=[name for name in LIBRARY if name != CONTROL])
    parser.add_argument("--steps", type=int, default=150, help="healthy steps before the fault; default 150")
    parser.add_argument("--after", type=int, default=16, help="steps that are trained with the fault; default 16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where recordings lie, and stay; default: a directory that goes again")
    parser.add_argument("--only-record", action="store_true", help="judge nothing")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-faults.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: list[Found] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sentinel-faults-") as scratch:
        for name in options.recipes:
            bench = Bench(name, options.keep or Path(scratch), options.steps, options.after, options.seed)
            if options.only_record:
                bench.record([CONTROL, *options.faults])
                continue
            bench.judge_healthy()
            notes.append(
                f"{name}: {bench.healthy.num_rows} rows judged before the fault, {len(bench.healthy.onsets)} onsets"
                f" ({bench.healthy.num_of(Severity.WARNING)} warnings), {len(bench.healthy.paged)} pages; control:"
                f" {len(bench.control.onsets)} onsets, {len(bench.control.paged)} pages"
            )
            print(notes[-1], file=sys.stderr, flush=True)
            for fault in options.faults:
                if bench.applies(fault):
                    found.append(bench.plant(fault))
                    print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    found.sort(key=lambda one: (list(LIBRARY).index(one.fault), one.recipe))
    events = [one for one in found if not one.grows]
    share = sum(one.is_in_time for one in events)
    paged, warned = sum(one.paged >= 0 for one in events), sum(one.warned >= 0 for one in events)
    notified = (
        f"{share} of {len(events)} events had an anomaly within {WITHIN_STEPS} steps; {paged} paged, {warned} warned. "
    )
    notified += f"{sum(one.num_incidents > 1 for one in found)} of {len(found)} faults had several incidents above info."
    text = "\n".join([*(f"- {note}" for note in notes), "", table(found), "", notified])
    print(text)
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-faults.md"
        path.write_text(f"# Fault library\n\n`python {' '.join(sys.argv)}`\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
