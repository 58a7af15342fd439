"""Whether two versions of Sentinel say the same, byte for byte, of the same recordings: a change of structure must.

    python benchmarks/same_answers.py record DIR                      the runs that are judged
    python benchmarks/same_answers.py compare DIR --before REVISION   by REVISION and by this tree; exit 1: they differ

Recorded are the demo (four pipeline ranks, daemon and escalation, with its journal), a run with every probe, data-parallel,
fully sharded, tensor-parallel and pipelined runs, and a synthetic one of four ranks with NaNs, spikes and a restart; the
labelled logs beside the project are taken too, where they are. Of each run each version writes: anomalies and incidents
judged from the journal and anew, every export, `topk`, `explain` and `struct` as JSON. All those files are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT.parent / "shared" / "trainlogs" / "series"
EXPORTS: dict[str, list[str]] = {
    "merged.csv": ["--format", "csv"],
    "ranks.csv": ["--format", "csv", "--per-rank", "--kind", "param,wgrad,activation,dgrad"],
    "scalars.jsonl": ["--kind", "scalar"],
    "layers.csv": ["--aggregate", "{}=*.{}.*"],
    "vectors.jsonl": ["--vectors"],
    "table.parquet": [],
    "msprobe": ["--format", "msprobe"],
    "msprobe-csv": ["--format", "msprobe-csv"],
    "megatron-stats": ["--format", "megatron-stats"],
    "skip-list.json": ["--format", "skip-list"],
}
"""What an export is written to -> its options."""


def main() -> int:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recorder = verbs.add_parser("record")
    recorder.add_argument("recordings", type=Path)
    comparer = verbs.add_parser("compare")
    comparer.add_argument("recordings", type=Path)
    comparer.add_argument("--before", required=True, metavar="REVISION")
    arguments = parser.parse_args()
    if arguments.verb == "record":
        record(arguments.recordings)
        return 0
    return compare(arguments.recordings, arguments.before)


def record(folder: Path) -> None:
    """Record all runs into a new folder; takes about two minutes on two cores."""
    folder.mkdir(parents=True, mode=0o700)
    subprocess.run([sys.executable, "-m", "sentinel.cli", "demo", "--dir", str(folder / "demo")], check=True)
    sys.path.insert(0, str(ROOT))
    _record_layouts(folder)
    _record_faults(folder)


def _record_layouts(folder: Path) -> None:
    import torch

    from sentinel.monitor_config import MEASURED_LABELS
    from tests.layouts import builds
    from tests.layouts.layout import Build, train_ranks

    everything = {"kinds": list(MEASURED_LABELS), "struct": True}
    layouts: dict[str, tuple[Build, int]] = {
        "every-probe": (builds.one_moe, 1),
        "data-parallel": (builds.ddp, 2),
        "fully-sharded": (builds.fsdp2, 2),
        "tensor-parallel": (builds.tp, 2),
        "pipeline": (partial(builds.pipeline, "Schedule1F1B"), 2),
        "interleaved": (partial(builds.pipeline, "ScheduleInterleaved1F1B", chunks=2), 2),
    }
    for name, (build, world) in layouts.items():
        torch.manual_seed(0)
        train_ranks(folder / name, build, world, config=everything, num_steps=6)


def _record_faults(folder: Path) -> None:
    from recording import Recording

    run = folder / "faults" / "run"
    for attempt, num_steps in ((0, 90), (1, 60)):
        faulty = Recording(run, attempt=attempt, nan_steps=(70, 71, 72), spike_steps=(30, 52))
        for step in range(num_steps):
            faulty.step(step)
        faulty.bye(num_steps - 1)


def compare(recordings: Path, before: str) -> int:
    """Have both versions judge all recordings, and print what differs; return 1 when anything does."""
    with tempfile.TemporaryDirectory(prefix="sentinel-same-") as scratch:
        tree = Path(scratch) / "before"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), before], check=True)
        try:
            # By its own sources: names and arguments of C functions may differ.
            subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)
            print(f"before: {_implementation(tree)}; now: {_implementation(ROOT)}")
            answers = [_answers(recordings, one, Path(scratch) / name) for one, name in ((tree, "old"), (ROOT, "new"))]
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    old, new = answers
    differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    for name in differing:
        print(f"differs: {name}: {old.get(name, 'is missing')} before, {new.get(name, 'is missing')} now")
    print(f"{len(old)} files before ({before}), {len(new)} now, {len(differing)} differ")
    return 1 if differing else 0


def _implementation(tree: Path) -> str:
    """Return what the version in `tree` computes with: `numpy` where its kernels are absent or another version's."""
    command = [sys.executable, "-c", "import sentinel.native; print(sentinel.native.implementation)"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def _answers(recordings: Path, tree: Path, out: Path) -> dict[str, str]:
    """Return name -> hash of all that the version in `tree` says of the recordings."""
    jobs: list[Callable[[], object]] = []
    for run in sorted(_runs(recordings)):
        # A version may write beside what it reads: each has a copy of its own, at the same path.
        jobs += _jobs_of_run(tree, run, out / run.relative_to(recordings))
    if LOGS.exists():
        jobs.append(partial(_say, tree, out / "logs.json", "rules", "backtest", LOGS, "--json", "-q", "-o", out / "logs"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(one) for one in jobs]:
            job.result()
    return {str(path.relative_to(out)): _hash(path) for path in sorted(out.rglob("*")) if path.is_file()}


def _runs(recordings: Path) -> Iterator[Path]:
    for layout in recordings.iterdir():
        yield from (run for run in layout.iterdir() if run.is_dir() and (run / "spool").exists())


def _jobs_of_run(tree: Path, run: Path, out: Path) -> Iterator[Callable[[], object]]:
    out.mkdir(parents=True)
    if (run / ".daemon").exists():
        yield partial(_say, tree, out / "replay.json", "replay", run, "--json", "-o", out / "replay")
    yield partial(_say, tree, out / "anew.json", "replay", run, "--json", "--recompute", "-o", out / "anew")
    yield partial(_say, tree, out / "topk.json", "topk", "--json", "-d", run, "-o", out / "topk")
    yield partial(_say, tree, out / "explain.json", "explain", "--json", "-d", run)
    yield partial(_say, tree, out / "struct.json", "struct", run, "--json")
    for name, options in EXPORTS.items():
        yield partial(_say, tree, out / f"export-{name}.txt", "export", run, "-o", out / name, *options)


def _say(tree: Path, out: Path, *arguments: object) -> None:
    """Run a verb of the version in `tree`; keep its answer, what it says to people and its exit code."""
    command = [sys.executable, "-m", "sentinel.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    # Folders of this run of the benchmark stand in what people are told.
    text = f"{done.stdout}\n{done.stderr}\nexit {done.returncode}\n"
    out.write_text(text.replace(str(out.parents[1]), "OUT").replace(str(tree), "TREE"))


def _hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
