"""Stragglers of 1.5 to 30 times on data-, pipeline- and tensor-parallel ranks: is the right rank told, within 3 steps, once?

    python benchmarks/stragglers.py [--layouts dp2,pp2] [--sizes 1.5,4,30] [--seeds 1] [--young] [--keep DIR] [--write]
    python benchmarks/stragglers.py --beginnings [--layouts dp2,pp2] [--seeds 1] [--keep DIR]

Each rank of a small GPT (examples/gpt, gloo) works a fixed time a step, most of it sleep, so that a busy machine changes
little. Older noise first, still open when the straggler comes: one step of another rank 1.8 times as long at step 16, one of
a third rank (of the same, where there are two) at 22. From step 31 on one rank takes the given times as long, for
ten steps. --young: the straggler comes at step 5 without noise, in steps of 30 ms. A case is right when warnings or pages
name that rank alone, the first within 3 steps, and none is told twice. --beginnings: no straggler, but what ordinary first
steps cost one rank (compiling, caches that fill, files read for the first time, autotuning, a checkpoint): right is that
no rank is told.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sentinel.incident import Incident
from sentinel.judge.replay import replay
from sentinel.report.alert import RouteConfig, change_of
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
GPT = ROOT / "examples" / "gpt"
LAYOUTS = {
    # name: (ranks, pipeline stages, tensor-parallel ranks)
    "dp2": (2, 1, 1),
    "dp4": (4, 1, 1),
    "pp2": (2, 2, 1),
    "pp4": (4, 4, 1),
    "tp2": (2, 1, 2),
    "pp2dp2": (4, 2, 1),
    "pp2tp2": (4, 2, 2),
}
WITHIN = 3
BEGINNINGS: dict[str, dict[int, float]] = {
    # name: step -> steps that one rank takes longer
    "nothing": {},
    "compile": {0: 30.0, 1: 25.0, 2: 6.0, 3: 2.0},
    "recompile": {0: 30.0, 2: 12.0, 3: 5.0, 4: 9.0, 6: 14.0},
    "cache": {0: 9.0, 1: 8.0, 2: 6.0, 3: 4.5, 4: 3.0, 5: 1.6, 6: 1.0, 7: 0.5},
    "files": {1: 1.0, 3: 2.0, 4: 7.0, 5: 0.6, 6: 12.0},
    "autotune": {0: 8.0, 1: 8.0, 2: 3.0, 3: 11.0, 4: 5.0},
    "checkpoint": {5: 40.0, 6: 0.6, 7: 0.5, 8: 0.2},
}


def place_of(rank: int, layout: str) -> tuple[int, int, int]:
    """Return (pp_rank, dp_rank, tp_rank) of a rank: pp outermost, tp innermost."""
    world, pp, tp = LAYOUTS[layout]
    dp = world // (pp * tp)
    return rank // (dp * tp), rank // tp % dp, rank % tp


def micro_batches(layout: str) -> int:
    """Return the micro-batches of a step: at least as many as pipeline stages."""
    return max(2, LAYOUTS[layout][1])


def sleep(rank: int, layout: str, steps: range, seconds: float) -> dict[str, Any]:
    """Return a fault that makes a rank work longer in some steps: an equal part of it before each of its micro-batches."""
    stage, dp_rank, tp_rank = place_of(rank, layout)
    return {
        "type": "sleep", "module": f"blocks.{stage}", "steps": list(steps), "seconds": seconds / micro_batches(layout),
        "dp_rank": dp_rank, "tp_rank": tp_rank,
    }  # fmt: skip


def case(layout: str, size: float, culprit: int, *, young: bool, work_s: float) -> tuple[list[dict[str, Any]], int, int]:
    """Return the faults of a run, the step from which the culprit is slow, and the number of steps."""
    world = LAYOUTS[layout][0]
    begin, num_steps = (5, 20) if young else (31, 46)
    usual = [sleep(rank, layout, range(num_steps), work_s) for rank in range(world)]
    slow = [sleep(culprit, layout, range(begin, begin + 10), (size - 1.0) * work_s)]
    other, third = (culprit + 1) % world, (culprit + 2) % world
    noise = [] if young else [
        sleep(other, layout, range(16, 17), 0.8 * work_s), sleep(third, layout, range(22, 23), 0.8 * work_s),
    ]  # fmt: skip
    return usual + slow + noise, begin, num_steps


def beginning(layout: str, name: str, rank: int, work_s: float) -> tuple[list[dict[str, Any]], int]:
    """Return the faults of a run in which a rank begins so, and the number of steps."""
    usual = [sleep(one, layout, range(16), work_s) for one in range(LAYOUTS[layout][0])]
    return usual + [sleep(rank, layout, range(at, at + 1), work_s * more) for at, more in BEGINNINGS[name].items()], 16


def train(folder: Path, layout: str, faults: list[dict[str, Any]], num_steps: int, seed: int) -> Path:
    """Train with these faults; return the run's directory."""
    world, pp, tp = LAYOUTS[layout]
    folder.mkdir(mode=0o700, parents=True)
    (folder / "faults.json").write_text(json.dumps(merged(faults)))
    command = [
        sys.executable, str(GPT / "launch.py"), "-n", str(world), "--", str(GPT / "train.py"), "--pp", str(pp), "--tp",
        str(tp), "--layers", str(max(pp, 2)), "--width", "32", "--sequence", "16", "--micro-batch", "2",
        "--micro-batches", str(micro_batches(layout)), "--steps", str(num_steps), "--seed", str(seed),
        "--faults", str(folder / "faults.json"),
    ]  # fmt: skip
    environment = {"SENTINEL_DIR": str(folder / "runs"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{layout}: the training failed: {done.stderr[-2000:]}")
    (run,) = (one for one in (folder / "runs").iterdir() if one.is_dir())
    return run


def merged(faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return faults of which each rank has one a step: the sleeps of one step add up."""
    seconds: dict[tuple[str, int, int, int], float] = {}
    for one in faults:
        for step in one["steps"]:
            key = one["module"], one["dp_rank"], one["tp_rank"], step
            seconds[key] = seconds.get(key, 0.0) + one["seconds"]
    same: dict[tuple[str, int, int, float], list[int]] = {}
    for (module, dp_rank, tp_rank, step), each in seconds.items():
        same.setdefault((module, dp_rank, tp_rank, round(each, 6)), []).append(step)
    return [
        {"type": "sleep", "module": module, "dp_rank": dp_rank, "tp_rank": tp_rank, "seconds": each, "steps": sorted(steps)}
        for (module, dp_rank, tp_rank, each), steps in same.items()
    ]


def messages(run: Path) -> list[tuple[str, Incident]]:
    """Return what a sink that hears warnings is told of a run: (change, the revision)."""
    with tempfile.TemporaryDirectory() as out:
        replay(RunPaths.of(run), Path(out), pack=load_pack(), recompute=True)
        file = Path(out) / "incidents.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
    newest: dict[str, Incident] = {}
    notified = []
    for line in lines:
        one = msgspec.json.decode(line, type=Incident)
        change = change_of(newest.get(one.id), one, RouteConfig())
        newest[one.id] = one
        if change is not None:
            notified.append((change, one))
    return notified


def judge(notified: list[tuple[str, Incident]], culprit: int, begin: int) -> tuple[str, list[str]]:
    """Return `right` or what is wrong, and what was told."""
    lines = [f"step {one.last_step}: {change} ({one.severity.value}) {one.title}" for change, one in notified]
    opened = [one for change, one in notified if change in ("opened", "raised", "worse")]
    blamed = [one for one in opened if culprit in one.ranks and "SlowRank" in one.detectors]
    wrong = [one for one in opened if "SlowRank" in one.detectors and culprit not in one.ranks]
    if wrong:
        return f"rank {wrong[0].ranks} blamed", lines
    if not blamed:
        return "missed", lines
    if blamed[0].last_step > begin + WITHIN - 1:
        return f"late by {blamed[0].last_step - begin - WITHIN + 1}", lines
    if len(blamed) > 1:
        return f"told {len(blamed)} times", lines
    return "right", lines


def judge_beginnings(layouts: list[str], seeds: int, work_s: float, keep: Path) -> None:
    """Train and judge ordinary first steps, and print who was told."""
    num_right = num = 0
    for layout in layouts:
        for name in BEGINNINGS:
            for seed in range(seeds):
                faults, num_steps = beginning(layout, name, seed % LAYOUTS[layout][0], work_s)
                notified = messages(trained(keep / f"{layout}-{name}-{seed}", layout, faults, num_steps, seed))
                slow = [(change, one) for change, one in notified if "SlowRank" in one.detectors]
                lines = [f"step {one.last_step}: {change} {one.title}" for change, one in slow]
                num, num_right = num + 1, num_right + (not lines)
                print(f"| {layout} | {name} | rank {seed % LAYOUTS[layout][0]} | {'<br>'.join(lines)} |", flush=True)
    print(f"{num_right} of {num} right")


def trained(folder: Path, layout: str, faults: list[dict[str, Any]], num_steps: int, seed: int) -> Path:
    """Return the run in a folder, which is trained first where it is not there."""
    if not folder.exists():
        return train(folder, layout, faults, num_steps, seed)
    (run,) = (one for one in (folder / "runs").iterdir() if one.is_dir())
    return run


def main() -> None:
    """Train and judge every case, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--sizes", default="1.5,2,4,10,30")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--work-s", type=float, default=0.2, help="seconds that every rank works a step")
    parser.add_argument("--young", action="store_true")
    parser.add_argument("--beginnings", action="store_true", help="ordinary first steps instead, in steps of 0.1 s")
    parser.add_argument("--keep", type=Path, help="keep the runs here; what is there is judged, not trained again")
    parser.add_argument("--write", action="store_true", help="write the table to results/")
    options = parser.parse_args()
    work_s = 0.03 if options.young else options.work_s
    rows = ["| layout | size | culprit | outcome | told |", "|---|---|---|---|---|"]
    num_right = num = 0
    with tempfile.TemporaryDirectory() as scratch:
        if options.beginnings:
            judge_beginnings(options.layouts.split(","), options.seeds, 0.1, options.keep or Path(scratch))
            return
        for layout in options.layouts.split(","):
            for size in map(float, options.sizes.split(",")):
                for seed in range(options.seeds):
                    culprit = (seed + int(size)) % LAYOUTS[layout][0]
                    faults, begin, num_steps = case(layout, size, culprit, young=options.young, work_s=work_s)
                    name = f"{layout}-{size:g}-{seed}{'-young' if options.young else ''}"
                    run = trained((options.keep or Path(scratch)) / name, layout, faults, num_steps, seed)
                    outcome, lines = judge(messages(run), culprit, begin)
                    num, num_right = num + 1, num_right + (outcome == "right")
                    rows.append(f"| {layout} | {size:g} | rank {culprit} | {outcome} | {'<br>'.join(lines)} |")
                    print(rows[-1], flush=True)
    print(f"{num_right} of {num} right")
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-stragglers{'-young' if options.young else ''}.md"
        head = f"# Stragglers, {num_right} of {num} right\n\n`python benchmarks/stragglers.py {' '.join(sys.argv[1:])}`\n\n"
        path.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
