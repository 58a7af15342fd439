"""Faults of one rank among data-parallel replicas, two gloo ranks of a tiny GPT: a flipped bit, a slow, wrong, frozen rank.

    python benchmarks/fault_ranks.py [--keep DIR] [--write]

The ranks train healthily, watched; then each fault starts from that very state, on rank 1 alone, as in faults.py. The frozen
rank (SIGSTOP) comes last, with a daemon beside the ranks: its time is in seconds, for no step ends any more. What `--keep`
holds is not trained again, only judged: by the rules as they are now.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faults import CONTROL, Found, _key, loss_leaves, summarise, table
from healthy_faults import OfBatch, OfOutput, Once, _BadGradient, flip, middle, weight_of
from healthy_judging import JudgedStretch, Replay
from healthy_models import Batch
from healthy_training import RECIPES, Fault, Training

from sentinel.ingest.merge import ClosedStep
from sentinel.judge.recorded import recorded_views
from sentinel.store.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
STEPS, AFTER = 80, 16
FROZEN = "frozen rank (SIGSTOP)"
PATIENCE_S = 150.0


class Straggler(Fault):
    """Sleeps before the collective."""

    def after_backward(self, training: Training, since: int) -> None:
        """Sleep three of its usual steps."""
        time.sleep(0.4)


class OtherData(Fault):
    """The rank reads the batches of its neighbour: half of the data is seen twice, the other half never."""

    def batch(self, training: Training, batch: Batch, since: int) -> Batch:
        """Return what rank 0 reads."""
        return training.data.batch(training.num_ended, 0, 0, training.recipe.size)


class Stopped(Fault):
    """Freezes the process, writer thread and all."""

    def after_backward(self, training: Training, since: int) -> None:
        """Freeze."""
        if since == 2:
            os.kill(os.getpid(), signal.SIGSTOP)


def _flip(bit: int) -> Callable[[Training], None]:
    return lambda training: flip(weight_of(middle(training.model)[1]), bit)


ONE_RANK: dict[str, Callable[[], Fault]] = {
    CONTROL: Fault,
    "exponent bit of a weight (x4 or /4)": lambda: Once(_flip(24)),
    "top exponent bit of a weight": lambda: Once(_flip(30)),
    "lowest mantissa bit of a weight": lambda: Once(_flip(0)),
    "NaN in a gradient": lambda: OfOutput(lambda x: _BadGradient.apply(x, float("nan"))),
    "activation x1000, one step": lambda: OfOutput(lambda x: x * 1e3),
    "corrupted batch, one step": lambda: OfBatch(lambda t, b, rng: t.data.corrupted(b, rng), 1),
    "matrix product off by 1e-3": lambda: OfOutput(lambda x: x * 1.001, AFTER),
    "matrix product off by 10 %": lambda: OfOutput(lambda x: x * 1.1, AFTER),
    "data of its neighbour": OtherData,
    "straggler: 0.4 s before the collective": Straggler,
    FROZEN: Stopped,
}
"""Name -> what happens on rank 1."""


def train_rank(folder: Path) -> None:
    """One of the ranks: every fault in turn."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(RECIPES["tiny"], 3 * STEPS, rank=rank)
    training.attach(folder, "healthy")
    for step in range(STEPS):
        training.step(step)
    training.detach()
    saved = training.checkpoint()
    losses: dict[str, list[float]] = {}
    for number, (name, make) in enumerate(ONE_RANK.items()):
        training = Training(RECIPES["tiny"], 3 * STEPS, rank=rank)
        training.restore(saved)
        training.num_ended = STEPS
        dist.barrier()
        training.attach(folder, f"fault-{number}", first_step=STEPS)
        strike = make() if rank == 1 else Fault()
        if name == FROZEN and rank == 0:
            (folder / "losses").write_bytes(pickle.dumps(losses))
        losses[name] = [training.step(STEPS + since, strike, since) for since in range(AFTER)]
        strike.remove(training)
        training.detach()


def main() -> int:
    """Start the ranks, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-fault_ranks.md")
    parser.add_argument("--keep", type=Path, help="where recordings lie, and stay; default: a directory that goes again")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.rank_of:
        train_rank(options.rank_of)
        return 0
    with tempfile.TemporaryDirectory(prefix="sentinel-ranks-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        reported = folder / "frozen.txt"
        if not reported.exists():
            reported.write_text(_run_ranks(folder))
        text = _judge(folder) + f"\n\n{reported.read_text()}"
    print(text)
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-fault_ranks.md"
        path.write_text(f"# Faults of one rank\n\n`python {' '.join(sys.argv)}`\n\n{text}\n")
    return 0


def _run_ranks(folder: Path) -> str:
    """Let the ranks train until one is frozen and the daemon says so; return what was said and when."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--rank-of", str(folder)]
    processes = [subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    last = folder / f"fault-{len(ONE_RANK) - 1}"
    try:
        while not (last / "spool").is_dir():
            if any(one.poll() is not None for one in processes):
                raise SystemExit("a rank ended before its time")
            time.sleep(0.1)
        processes.append(
            subprocess.Popen([sys.executable, "-m", "sentinel.cli", "serve", str(last), "--no-http"], env=common,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )  # fmt: skip
        while _state(processes[1].pid) != "T":
            time.sleep(0.05)
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_S:
            for one in _anomalies(last):
                if one["rule"] == "stale-rank":
                    took, named = time.monotonic() - began, one["ranks"] or [one["rank"]]
                    return f"{FROZEN}: said after {took:.1f} s, rank {named}, {one['severity']}: {one['message']}"
            time.sleep(0.2)
        return f"{FROZEN}: **missed** in {PATIENCE_S:g} s"
    finally:
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                one.send_signal(signal.SIGKILL)
            one.wait()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _anomalies(run_dir: Path) -> list[dict[str, Any]]:
    lines = [line for file in sorted((run_dir / "anomalies").glob("*.jsonl")) for line in file.read_bytes().splitlines()]
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def _views(run_dir: Path) -> list[ClosedStep]:
    return [view for view, _ in recorded_views(RunPaths.of(run_dir), None, recompute=True)]


def _judge(folder: Path) -> str:
    losses: dict[str, list[float]] = pickle.loads((folder / "losses").read_bytes())
    healthy = Replay()
    before = healthy.take(_views(folder / "healthy"), JudgedStretch())
    snapshot, usual, found = healthy.judge.snapshot(), set(), list[Found]()
    named: dict[str, set[int]] = {}
    for number, name in enumerate(ONE_RANK):
        if name == FROZEN:
            continue
        replay = Replay()
        replay.judge.restore(snapshot)
        said = replay.take(_views(folder / f"fault-{number}"), JudgedStretch())
        if name == CONTROL:
            usual = {_key(one) for one in said.onsets}
        # Other work on this machine makes true waits, which are no sign of any fault but the one that is a wait.
        new = [one for one in said.onsets if _key(one) not in usual and (one.rule != "slow-rank" or "straggler" in name)]
        named[name] = {one.rank for one in new if one.rank is not None}
        found.append(summarise("2 ranks", name, new, said, STEPS, loss_leaves(losses[name], losses[CONTROL])))
    notes = [f"- {before.num_rows} rows judged before the faults, {len(before.onsets)} onsets, {len(before.paged)} pages"]
    notes += [f"- {name}: names rank {sorted(ranks)} alone" for name, ranks in named.items() if len(ranks) == 1]
    return "\n".join([*notes, "", "`loss`: that of rank 0, as a trainer that prints there would see it.", "", table(found)])


if __name__ == "__main__":
    sys.exit(main())
