"""Real young trainings: ordinary data of which nobody is to skip anything, and a router that collapses, probed or not.

    python benchmarks/attribution_young.py [--seeds 2] [--write]

Small models of `healthy_models.py`, judged from their first step on. Healthy runs of 70 steps: what a sink that hears
warnings is told, and batches that somebody is told to skip. A router that collapses after 8 and after 40 steps, all kinds,
then without the router's probe: the diagnosis in the end. Labels: healthy runs tell nothing; the collapse is `model` with
the probe, `model` or `unknown` without, and no batch.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import warnings
from pathlib import Path

import torch
from attribution import gravest, notified
from healthy_faults import LIBRARY
from healthy_training import RECIPES, Training

import sentinel
from sentinel.anomaly import Severity
from sentinel.incident import Incident
from sentinel.judge.judge import Judge
from sentinel.judge.recorded import recorded_views
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
KINDS = ("param", "wgrad", "activation", "dgrad", "exp_avg", "exp_avg_sq", "update_ratio")
TEXT = ("gpt", "tiny", "lstm", "moe", "fp16")


def judged(folder: Path, recipe: str, seed: int, num_steps: int, at: int, kinds: tuple[str, ...]) -> list[Incident]:
    """Return the revisions of a training whose router collapses at a step; at < 0: nothing happens to it."""
    training = Training(RECIPES[recipe], 400, seed=seed)
    config = {"directory": str(folder), "run": "run", "kinds": list(kinds)}
    training.monitor = sentinel.attach(training.model, training.optimizers, config)
    fault = LIBRARY["router collapse"].make() if at >= 0 else None
    for step in range(num_steps):
        training.step(step, fault, step - at if fault is not None else -1)
    training.detach()
    judge, found = Judge(load_pack()), list[Incident]()
    for view, decision in recorded_views(RunPaths.of(folder / "run"), None, recompute=True):
        found += judge.judge(decision, view).incidents
    return [one for one in found if set(one.detectors) != {"SlowRank"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--recipes", nargs="*", default=list(TEXT))
    parser.add_argument("--write", action="store_true", help="write the dated result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = []
    num_messages = num_skips = num_right = num_cases = 0
    for recipe in options.recipes:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as scratch:
                messages = notified(judged(Path(scratch), recipe, seed, 70, -1, KINDS))
            skips = sorted({step for _, one, _ in messages for step in one.skip_steps})
            num_messages, num_skips = num_messages + len(messages), num_skips + bool(skips)
            lines.append(f"healthy {recipe:5} seed {seed}: {len(messages)} messages; told to skip {skips}")
            lines += sorted({f"      {one.title}: {one.suspected}" for _, one, _ in messages})
            print(*lines[-1 - len({one.title for _, one, _ in messages}) :], sep="\n", flush=True)
    for at in (8, 40):
        for kinds, right in (((*KINDS, "router"), {"model"}), (KINDS, {"model", "unknown"})):
            with tempfile.TemporaryDirectory() as scratch:
                revisions = [one for one in judged(Path(scratch), "moe", 0, at + 24, at, kinds) if one.last_step >= at]
            one = gravest([each for each in revisions if each.severity is not Severity.INFO])
            suspected = one.suspected if one is not None else "nothing"
            skips = sorted({step for _, each, _ in notified(revisions) for step in each.skip_steps})
            num_cases, num_right = num_cases + 1, num_right + (suspected in right and not skips)
            probe = "with" if "router" in kinds else "without"
            lines.append(f"router collapses after {at} steps, {probe} its probe: {suspected}; told to skip {skips}")
            lines += [f"      {line}" for line in (one.title, *one.evidence[:3])] if one is not None else []
            print(*lines[-5:], sep="\n", flush=True)
    lines.append(
        f"healthy: {num_messages} messages, {num_skips} runs told to skip a batch; router: {num_right} of {num_cases} right"
    )
    print(lines[-1])
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-attribution-young.txt"
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
