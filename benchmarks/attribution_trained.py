"""Verdicts on trained models: the fault library of `faults.py`, really planted, on one replica: nothing can be compared.

    python benchmarks/attribution_trained.py [--recipes tiny moe] [--faults "NaN"] [--keep FILE] [--write]

Each model trains healthily, watched and judged, once; then each fault is planted from that very state on. The verdict is
that of the gravest incident that opened from the fault on, in its last revision. `known` are the verdicts that are right for
what one replica can show; `model` stands for whatever the program does on all replicas alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import tempfile
import warnings
from pathlib import Path

import torch
from attribution import gravest
from healthy_faults import LIBRARY
from healthy_training import RECIPES, Training

from sentinel.incident import Incident
from sentinel.judge.judge import Judge
from sentinel.judge.recorded import recorded_views
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
ONE = {"hardware", "unknown"}
CAUSES: dict[str, tuple[str, set[str]]] = {
    "NaN in an activation": ("hardware", ONE),
    "inf in an activation": ("hardware", ONE),
    "NaN in a gradient": ("hardware", ONE),
    "inf in a gradient": ("hardware", ONE),
    "activation x1000, one step": ("hardware", ONE),
    "one activation element 1e4": ("hardware", ONE),
    "exponent bit of a weight": ("hardware", ONE),
    "fp16 overflow of an activation": ("precision", {"precision"}),
    "learning rate x100, 3 steps": ("model", {"model"}),
    "learning rate x10 from now on": ("model", {"model"}),
    "corrupted batch, one step": ("batch", {"batch"}),
    "batch of padding, one step": ("batch", {"batch"}),
    "labels shuffled, 5 steps": ("batch", {"batch"}),
    "a layer's weights zeroed": ("model", {"model"}),
    "a layer's gradient zeroed": ("model", {"model"}),
    "a layer frozen": ("model", {"model"}),
    "a layer left out of the optimizer": ("model", {"model"}),
    "gradients x8 (a missing mean)": ("model", {"model"}),
    "query weights x30": ("model", {"model"}),
    "router collapse": ("model", {"model"}),
    "an expert dies": ("model", {"model"}),
    "exp_avg_sq lost": ("model", {"model"}),
    "momentum lost": ("model", {"model"}),
}
"""Fault -> (cause, verdicts that are right for what one replica can show)."""


class Trained:
    """One model, trained healthily and judged to a point from which every fault starts."""

    def __init__(self, name: str, folder: Path, steps: int, after: int, seed: int, *, is_recorded: bool) -> None:
        # Nothing but the fault may happen in the steps that are looked at.
        self._recipe = dataclasses.replace(RECIPES[name], grows_at=1.0, crash_at=1.0)
        self._folder, self._steps, self._after, self._seed, self._pack = folder, steps, after, seed, load_pack()
        self._is_recorded = is_recorded
        if not is_recorded:
            training = self._training()
            training.attach(folder, "healthy")
            for step in range(steps):
                training.step(step)
            training.detach()
            self._saved = training.checkpoint()
        judge = Judge(self._pack)
        self.healthy = self._judged(judge, "healthy")
        self._judge = judge.snapshot()

    def _training(self) -> Training:
        # The horizon of the schedule: faults strike in the middle of it.
        return Training(self._recipe, 3 * self._steps, self._seed)

    def _judged(self, judge: Judge, run: str) -> list[Incident]:
        found: list[Incident] = []
        for view, _ in recorded_views(RunPaths.of(self._folder / run), None, recompute=True):
            found += judge.judge(None, view).incidents
        return found

    def applies(self, fault: str) -> bool:
        """Return whether the fault means anything for this model, or was recorded."""
        if self._is_recorded:
            return (self._folder / _folder_name(fault)).exists()
        training = self._training()
        training.restore(self._saved)
        return LIBRARY[fault].applies(training)

    def plant(self, fault: str) -> list[Incident]:
        """Return all revisions of the incidents that opened from the fault on."""
        run = _folder_name(fault)
        if not self._is_recorded:
            self._record(fault, run)
        judge = Judge(self._pack)
        judge.restore(self._judge)
        return [one for one in self._judged(judge, run) if one.opened_step >= self._steps]

    def _record(self, fault: str, run: str) -> None:
        training = self._training()
        training.restore(self._saved)
        training.attach(self._folder, run, first_step=self._steps)
        strike = LIBRARY[fault].make()
        for since in range(self._after):
            training.step(self._steps + since, strike, since)
        strike.remove(training)
        training.detach()


def _folder_name(fault: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in fault)


def main() -> None:
    """Plant and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=["tiny", "convnet", "lstm", "moe", "fp16"], choices=list(RECIPES))
    parser.add_argument("--faults", nargs="*")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--after", type=int, default=20)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a folder for the recordings")
    parser.add_argument("--recorded", action="store_true", help="judge what --keep holds, and train nothing")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = [f"{'model':8} {'fault':36} {'cause':10} {'verdict':10} known  ever"]
    good = strict = total = wrong = seen = 0
    with tempfile.TemporaryDirectory(prefix="sentinel-verdicts-") as scratch:
        for name in options.recipes:
            folder = (options.keep or Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            bench = Trained(name, folder, options.steps, options.after, options.seed, is_recorded=options.recorded)
            for fault, (cause, known) in CAUSES.items():
                if (options.faults and not any(word in fault for word in options.faults)) or not bench.applies(fault):
                    continue
                if not options.recorded and fault not in LIBRARY:
                    raise SystemExit(f"{fault}: not in the library of healthy_faults.py")
                revisions = bench.plant(fault)
                one = gravest(revisions)
                suspected = one.suspected if one is not None else "nothing"
                ever = sorted({revision.suspected for revision in revisions})
                total, seen = total + 1, seen + (one is not None)
                good, strict = good + (suspected in known), strict + (suspected == cause)
                wrong += "hardware" in ever and "hardware" not in known
                lines.append(
                    f"{name:8} {fault:36} {cause:10} {suspected:10} {'yes' if suspected in known else 'NO':5}  "
                    f"{' '.join(ever)}"
                )
                print(lines[-1], flush=True)
                for line in one.evidence[:4] if one is not None else ():
                    print(f"         {line}", flush=True)
    lines += [
        "", f"planted: {total}, of which an incident was opened in {seen}",
        f"names the cause itself: {strict} of {seen} seen, {strict} of {total} planted",
        f"right for what can be known: {good} of {seen} seen", f"wrong hardware verdicts, at any step: {wrong}",
    ]  # fmt: skip
    print("\n".join(lines[-4:]))
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-attribution-trained.txt"
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
