"""Verdicts on real training: examples/gpt over gloo, real processes, faults really planted, judged by the daemon's Judge.

    python benchmarks/attribution_real.py [--layouts 2,2,1 1,4,1 2,1,2 1,1,1] [--faults batch lr] [--keep DIR] [--write]

A run is healthy for 110 steps, then one fault strikes; 15 steps more. Each run is recorded by Sentinel in the trainer, then
judged as `sentinel replay --recompute` does. `--keep DIR` keeps the recordings, and judges those that are there already.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from attribution import gravest

from sentinel.incident import Incident
from sentinel.judge.judge import Judge
from sentinel.judge.recorded import recorded_views
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
AT, STEPS = 110, 126
NAN = {"type": "nan", "steps": [AT], "is_sudden": True, "micro_step": 0}
COMPARED, DATA = {"hardware"}, {"batch"}
NOT_TO_BE_KNOWN = {"unknown"}
"""Replicas see other data: a NaN of one alone proves no machine."""
# name: (cause, faults of the example, fault of attribution_trainer.py, right where dp > 1, right where dp == 1)
FAULTS: dict[str, tuple[str, list[dict[str, object]], str, set[str], set[str]]] = {
    "batch, all replicas": ("batch", [{"type": "batch", "steps": [AT]}], "", DATA, DATA),
    "batch, two in a row": ("batch", [{"type": "batch", "steps": [AT, AT + 1]}], "", DATA, DATA),
    "batch of one replica": ("batch", [{"type": "batch", "steps": [AT], "dp_rank": 1}], "", DATA, set()),
    "bad data of one replica, ten steps": (
        "batch", [{"type": "batch", "steps": list(range(AT, AT + 10)), "dp_rank": 1}], "", {"unknown", "batch"}, set(),
    ),
    "lr x100": ("model", [], "lr", {"model"}, {"model"}),
    "attention x30": ("model", [], "attention", {"model"}, {"model"}),
    "zeroed gradient": ("model", [], "zeroed", {"model"}, {"model"}),
    "NaN on one rank, inside": ("hardware", [{**NAN, "module": "blocks.2.mlp.fc2", "dp_rank": 1}], "", NOT_TO_BE_KNOWN,
                                set()),
    "NaN, one replica": ("hardware", [{**NAN, "module": "blocks.2.mlp.fc2"}], "", set(), NOT_TO_BE_KNOWN),
    "NaN on one rank, backward": (
        "hardware", [{**NAN, "module": "blocks.2.mlp.fc2", "phase": "backward", "dp_rank": 1}], "", NOT_TO_BE_KNOWN,
        set(),
    ),
    "NaN in the first block of one replica": (
        "batch", [{**NAN, "module": "blocks.0.attn.qkv", "dp_rank": 1}], "", {"unknown", "batch"}, set(),
    ),
    "flip: weight x4": ("hardware", [{"type": "flip", "module": "blocks.1.mlp.fc1", "steps": [AT], "dp_rank": 1}], "",
                        COMPARED, set()),
    "flip: absurd weight": ("hardware", [], "absurd", COMPARED, set()),
    "flip: top exponent bit": ("hardware", [], "top", COMPARED, {"hardware", "unknown"}),
    "flip: a norm of one tensor-parallel rank": ("hardware", [], "norm", set(), COMPARED),
    "weights of one replica scaled": ("program", [], "reload", {"program", "unknown"}, set()),
}  # fmt: skip


def train(folder: Path, layout: tuple[int, int, int], faults: list[dict[str, object]], kind: str) -> Path:
    """Return the recorded run; RuntimeError when the trainer failed."""
    pp, dp, tp = layout
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "faults.json"
    plan.write_text(json.dumps(faults))
    command = [
        sys.executable, str(ROOT / "examples/gpt/launch.py"), "-n", str(pp * dp * tp), "--",
        str(ROOT / "benchmarks/attribution_trainer.py"), "--steps", str(STEPS), "--pp", str(pp), "--tp", str(tp),
        "--width", "32", "--sequence", "32", "--micro-batches", "2", "--micro-batch", "8", "--faults", str(plan),
        "--print-every", "1000",
    ]  # fmt: skip
    notified = {
        "SENTINEL_DIR": str(folder),
        "ATTRIBUTION_FAULT": kind,
        "ATTRIBUTION_STEP": str(AT),
        "ATTRIBUTION_DP": str(dp),
    }
    done = subprocess.run(command, env={**os.environ, **notified}, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        raise RuntimeError(f"{folder}: the trainer failed\n{done.stderr[-2000:]}")
    return recording(folder)


def recording(folder: Path) -> Path:
    """Return the run in a folder."""
    return next(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def judge(run: Path) -> tuple[list[Incident], int, int]:
    """Return all revisions of the incidents from the fault on, the steps judged, and the rows."""
    judge = Judge(load_pack())
    found: list[Incident] = []
    num_steps = num_rows = 0
    for view, decision in recorded_views(RunPaths.of(run), None, recompute=True):
        found += judge.judge(decision, view).incidents
        num_steps += 1
        num_rows += view.num_rows
    return [one for one in found if one.opened_step >= AT], num_steps, num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=["2,2,1", "1,4,1", "2,1,2", "1,1,1"])
    parser.add_argument("--faults", nargs="*")
    parser.add_argument("--keep")
    parser.add_argument("--recorded", action="store_true", help="judge what --keep holds, and train nothing")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = [f"{'layout':8} {'fault':40} {'cause':10} {'verdict':10} right  opened  ever"]
    good = strict = total = wrong = 0
    table: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for layout in options.layouts:
            shape = tuple(map(int, layout.split(",")))
            for name, (cause, faults, kind, replicated, alone) in FAULTS.items():
                right = replicated if shape[1] > 1 else alone
                if "tensor-parallel" in name and shape[2] == 1:
                    continue
                if not right or (options.faults and not any(word in name for word in options.faults)):
                    continue
                words = name.translate({ord(" "): "-", ord(":"): None, ord(","): None})
                folder = Path(options.keep or scratch) / f"{layout}-{words}"
                if options.recorded and not folder.exists():
                    continue
                try:
                    run = recording(folder) if folder.exists() else train(folder, shape, faults, kind)  # type: ignore[arg-type]
                except (RuntimeError, subprocess.TimeoutExpired, StopIteration) as error:
                    print(f"{layout} {name}: not trained: {error}", file=sys.stderr)
                    continue
                revisions, num_steps, num_rows = judge(run)
                if options.recorded and num_steps < STEPS:
                    continue  # Still at it.
                assert num_steps == STEPS and num_rows, f"{run}: judged {num_steps} steps, {num_rows} rows"
                # Ranks that share two cores are late at times, and truly: that is of no account here.
                one = gravest([revision for revision in revisions if revision.nature != "liveness"])
                suspected = one.suspected if one is not None else "nothing"
                ever = sorted({revision.suspected for revision in revisions if revision.nature != "liveness"})
                total += 1
                good += suspected in right
                strict += suspected == cause or (cause == "program" and suspected == "unknown")
                wrong += "hardware" in ever and "hardware" not in right
                table[cause, suspected] += 1
                lines.append(
                    f"{layout:8} {name:40} {cause:10} {suspected:10} {'yes' if suspected in right else 'NO':5}  "
                    f"{one.opened_step - AT if one else '':>6}  {' '.join(ever)}"
                )
                print(lines[-1], flush=True)
                for line in one.evidence[:4] if one is not None else ():
                    print(f"         {line}", flush=True)
    columns = ["batch", "model", "precision", "hardware", "program", "unknown", "nothing"]
    lines += ["", f"{'cause':10}" + "".join(f"{word:>10}" for word in columns)]
    lines += [
        f"{cause:10}" + "".join(f"{table[cause, word] or '.':>10}" for word in columns)
        for cause in ("batch", "model", "hardware", "program")
    ]
    lines += [
        "", f"right, for what the layout can show: {good} of {total}", f"the cause itself: {strict} of {total}",
        f"wrong hardware verdicts, at any time: {wrong}",
    ]  # fmt: skip
    print("\n".join(lines))
    if options.write:
        name = f"{datetime.date.today()}-attribution-real.txt"
        (ROOT / "benchmarks" / "results" / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
