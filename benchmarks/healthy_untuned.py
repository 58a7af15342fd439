"""Healthy trainings that no threshold was chosen on, judged by the default pack: whatever is told of them is false.

    python benchmarks/healthy_untuned.py [--later] [--programs NAME ...] [--seeds 0 1 2] [--steps 600] [--keep DIR] [--write]

Twenty programs of `healthy_programs.py`, or with `--later` twelve of `healthy_programs_later.py`, which were written after
rules had been changed on the first; half of the seeds with the kinds that are measured by default, half with most.
A recording that `--keep` holds is judged again. Counted are onsets at warning and above, and messages that a sink gets.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import warnings
from pathlib import Path

import torch
from attribution import notified
from healthy_programs import PROGRAMS
from healthy_programs_later import PROGRAMS as LATER

import sentinel
from sentinel.anomaly import Anomaly, Severity
from sentinel.incident import Incident
from sentinel.judge.judge import Judge
from sentinel.judge.recorded import recorded_views
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
MOST = (
    "param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in", "exp_avg", "exp_avg_sq", "update_ratio",
    "saturation",
)  # fmt: skip


def recorded_at(keep: Path, name: str, seed: int, num_steps: int) -> Path:
    """Record a program unless `keep` holds it whole; return its directory."""
    run = f"{name}-{num_steps}-{seed}"
    done = keep / f"{run}.done"
    if not done.exists():
        torch.manual_seed(seed)
        program = (PROGRAMS | LATER)[name](seed, num_steps)
        kinds = [*(MOST if seed % 2 else ("param", "wgrad") if program.kinds else ()), *program.kinds]
        config = {"directory": str(keep), "run": run, **({"kinds": kinds} if kinds else {})}
        monitor = sentinel.attach(program.models, program.optimizers, config)
        for step in range(num_steps):
            monitor.log(**program.step(step))
        monitor.detach()
        done.touch()
    return keep / run


def judged(run: Path) -> tuple[int, list[Anomaly], list[Incident]]:
    """Return the steps judged, the onsets at warning and above, and what a sink that hears warnings is told.

    How long a step takes on a busy machine says nothing of numbers: slow ranks are left out.
    """
    judge, steps = Judge(load_pack()), 0
    onsets, revisions = list[Anomaly](), list[Incident]()
    for view, decision in recorded_views(RunPaths.of(run), None, recompute=True):
        judgement = judge.judge(decision, view)
        steps += 1
        onsets += [one for one in judgement.anomalies if one.event == "onset" and one.severity is not Severity.INFO]
        revisions += [one for one in judgement.incidents if set(one.detectors) != {"SlowRank"}]
    return steps, [one for one in onsets if one.detector != "SlowRank"], [one for _, one, _ in notified(revisions)]


def main() -> int:
    """Record, judge, print. Exit 1 where anything was told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--later", action="store_true", help="the programs of healthy_programs_later.py")
    parser.add_argument("--programs", nargs="*", choices=[*PROGRAMS, *LATER])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--keep", type=Path, help="where recordings lie, and stay; default: a directory that goes again")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write benchmarks/results/<date>-healthy-{'later' if options.later else 'untuned'}.md",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table, lines = ["| program | seed | steps | onsets | messages |", "|---|---|---|---|---|"], []
    totals = [0, 0, 0]
    with tempfile.TemporaryDirectory(prefix="sentinel-healthy-") as scratch:
        keep = options.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        for name in options.programs or (LATER if options.later else PROGRAMS):
            for seed in options.seeds:
                num_steps, onsets, messages = judged(recorded_at(keep, name, seed, options.steps))
                counts = (num_steps, len(onsets), len(messages))
                totals = [total + count for total, count in zip(totals, counts, strict=True)]
                table.append(f"| {name} | {seed} | {' | '.join(map(str, counts))} |")
                lines += [f"- {name} {seed}, step {one.step}, {one.severity.value}: {one.message}" for one in onsets]
                lines += [f"- {name} {seed}, told at {one.last_step}: {one.title}; {one.suspected}" for one in messages]
                print(table[-1], *lines[len(lines) - len(onsets) - len(messages) :], sep="\n", flush=True)
    table.append(f"| all | | {' | '.join(map(str, totals))} |")
    print(table[-1])
    if options.write:
        how = f"{'--later ' if options.later else ''}--seeds {' '.join(map(str, options.seeds))} --steps {options.steps}"
        head = f"# Healthy trainings nobody tuned for\n\n`python benchmarks/healthy_untuned.py {how}`\n"
        said = ["", "What was said at warning and above:", "", *(lines or ["- nothing"]), ""]
        path = (
            ROOT
            / "benchmarks"
            / "results"
            / f"{datetime.date.today().isoformat()}-healthy-{'later' if options.later else 'untuned'}.md"
        )
        path.write_text("\n".join([head, *table, *said]))
    return int(totals[2] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
