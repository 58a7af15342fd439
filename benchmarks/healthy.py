"""Silence on healthy runs: real small trainings with every probe on, judged by the default pack; each ends with a fault.

    python benchmarks/healthy.py --keep DIR                  # records what DIR lacks, then judges all of it again
    python benchmarks/healthy.py --keep DIR --rules PATH     # by other rules, merged over the default pack
    python benchmarks/healthy.py --short                     # two models, 80 steps, in a directory of its own

A recording is a spool as any run leaves it; judging is that of `sentinel replay --recompute`. Every row that was sent is
judged (asserted). The fault that is planted in the last steps must be found by the same judge: silence alone proves nothing.
With no page in n series-steps the rate of false pages is below 3 / n, at 95 % confidence.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from healthy_faults import LAST, LIBRARY
from healthy_judging import JudgedStretch, judge_recording
from healthy_training import RECIPES, record

from sentinel.anomaly import Severity
from sentinel.judge.packs import RulePacks
from sentinel.rules.language.schema import Pack

ROOT = Path(__file__).parents[1]
SHORT = ("lstm", "tiny")
SHORT_STEPS = 80
WITHIN_STEPS = 2


def recorded_at(keep: Path, recipe: str, num_steps: int, seed: int) -> Path:
    """Record a run unless `keep` holds it whole; return the file beside its directory that says what is true of it."""
    run = f"{recipe}-{num_steps}-{seed}"
    truth = keep / f"{run}.json"
    if not truth.exists():
        shutil.rmtree(keep / run, ignore_errors=True)
        began = time.monotonic()
        notified = record(
            keep, run, RECIPES[recipe], num_steps, seed, LIBRARY[LAST[recipe]].make,
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
        truth.write_text(json.dumps({**notified, "fault": LAST[recipe], "seconds": round(time.monotonic() - began)}))
    return truth


def judged(truth_file: Path, pack: Pack | None = None) -> tuple[dict[str, Any], JudgedStretch, JudgedStretch]:
    """Return what is true of a recording, and what was said of its healthy steps and of those with the fault."""
    truth = json.loads(truth_file.read_text())
    healthy, faulty = judge_recording(truth_file.with_suffix(""), truth["healthy_until"], pack)
    num_steps = healthy.num_steps + faulty.num_steps
    assert num_steps == truth["steps_ended"], f"{num_steps} steps judged, {truth['steps_ended']} were trained"
    return truth, healthy, faulty


def found_after(truth: dict[str, Any], faulty: JudgedStretch) -> tuple[int, str]:
    """Return the steps until an anomaly of the fault was recorded, -1: never, and the rules that said so first."""
    first = min((one.step for one in faulty.onsets), default=-1)
    rules = sorted({one.rule for one in faulty.onsets if one.step == first})
    return (first - truth["healthy_until"] if rules else -1), ", ".join(rules)


def report(results: list[tuple[dict[str, Any], JudgedStretch, JudgedStretch]]) -> str:
    """Return the table, the rules that spoke, and the bound."""
    lines = [
        "| recording | steps judged | rows judged = sent | tensor-steps | points scored | pages | warnings | infos "
        "| fault at the end | found after, steps | by | page |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rules: Counter[tuple[str, str]] = Counter()
    for truth, healthy, faulty in results:
        after, by = found_after(truth, faulty)
        page = min((step for step, _ in faulty.paged.values()), default=-1)
        cells = [
            truth["run"], healthy.num_steps, healthy.num_rows, healthy.num_tensor_steps, healthy.num_points,
            len(healthy.paged), healthy.num_of(Severity.WARNING), healthy.num_of(Severity.INFO), truth["fault"],
            after if after >= 0 else "missed", by, page - truth["healthy_until"] if page >= 0 else "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
        rules.update(healthy.by_rule())
    points, steps = (sum(getattr(one, name) for _, one, _ in results) for name in ("num_points", "num_tensor_steps"))
    pages = sum(len(one.paged) for _, one, _ in results)
    lines += ["", "Onsets on healthy steps: " + (", ".join(f"{r} {s} {n}" for (r, s), n in sorted(rules.items())) or "none")]
    bound = f"fewer than one in {points / 3:.2g} points scored, {steps / 3:.2g} tensor-steps" if not pages else "not bounded"
    lines += ["", f"{pages} pages in {steps:.3g} tensor-steps and {points:.3g} points: {bound} (95 %, rule of three)."]
    return "\n".join(lines)


def main() -> int:
    """Record, judge, print. Exit 1 on a page, or on a fault that was not found in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="where recordings lie, and stay; default: a directory that goes again")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--steps", type=int, default=2000, help="healthy steps; default 2000")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--rules", nargs="*", default=[], help="packs merged over the default one")
    parser.add_argument("--only-judge", action="store_true", help="judge what --keep holds, whole recordings alone")
    parser.add_argument("--only-record", action="store_true", help="judge nothing")
    parser.add_argument("--short", action="store_true", help=f"{' and '.join(SHORT)}, {SHORT_STEPS} steps")
    parser.add_argument("--say", action="store_true", help="print every warning that healthy steps got")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-healthy.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pack = RulePacks(tuple(options.rules)).load()
    with tempfile.TemporaryDirectory(prefix="sentinel-healthy-") as scratch:
        keep = options.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        if options.only_judge:
            files = sorted(keep.glob("*.json"))
        else:
            recipes, steps = (SHORT, SHORT_STEPS) if options.short else (options.recipes, options.steps)
            files = [recorded_at(keep, recipe, steps, seed) for seed in options.seeds for recipe in recipes]
        results = [judged(file, pack) for file in files if not options.only_record]
    if options.only_record:
        return 0
    text = report(results)
    print(text)
    if options.say:
        for truth, healthy, _ in results:
            for one in healthy.onsets:
                if one.severity is not Severity.INFO:
                    print(f"{truth['run']} attempt {one.attempt} step {one.step} {one.severity.value} {one.message}")
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-healthy.md"
        path.write_text(f"# Healthy runs\n\n`python {' '.join(sys.argv)}`\n\n{text}\n")
    is_silent = not any(healthy.paged for _, healthy, _ in results)
    is_found = all(0 <= found_after(truth, faulty)[0] <= WITHIN_STEPS for truth, _, faulty in results)
    return 0 if is_silent and is_found else 1


if __name__ == "__main__":
    sys.exit(main())
