"""From the end of the step that alarmed to the first step that measures more, on real ranks that train at a steady pace.

    python benchmarks/command_latency.py [--ranks 2] [--alarms 20] [--step-ms 100]

Ranks of data parallel training (gloo) take steps of a given length; now and then the gradients are NaN, and it is skipped.
A daemon judges, and its policy switches module monitoring on. Counted: steps from the alarm to the first step that
measures more (asked: at most 2, or 250 ms), whether every rank began at the same one, and commands that came too late.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import sentinel
from sentinel.command import Command, EnableMonitoring, WithdrawCommand

CONFIG = "control: {cooldown_s: 0, max_per_hour: 1000, for_steps: 5, max_overhead: 1}\n"
RULES = """\
builtin: false
rules:
  - {name: nan, detector: AnomalyNan, match: {kind: wgrad}, severity: critical, actions: [escalate], episode_quiet_steps: 1}
"""
GAP = 60
"""Steps between two alarms: more than monitoring lasts, doubled as often as it is."""


def train(rank: int, num_ranks: int, port: int, folder: str, num_steps: int, step_s: float) -> None:
    """Train one rank at a steady pace; every `GAP` steps the gradients are NaN."""
    os.environ.update(SENTINEL_DIR=folder, SENTINEL_RUN="run", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    ends = []
    with sentinel.attach(model, optimizer) as monitor:
        due = time.monotonic()
        for step in range(num_steps):
            due += step_s
            optimizer.zero_grad()
            loss = model(torch.randn(8, 32)).square().mean()
            is_bad = step % GAP == GAP - 1
            (loss * float("nan") if is_bad else loss).backward()
            time.sleep(max(due - time.monotonic(), 0.0))
            if not is_bad:
                optimizer.step()
            monitor.step()
            ends.append(time.time())
    (Path(folder) / f"ends{rank}.json").write_text(json.dumps(ends))
    dist.barrier()
    os._exit(0)


def commands_in(run: Path) -> list[Command]:
    """Return the commands of a run in the order of their numbers."""
    return [msgspec.json.decode(path.read_bytes(), type=Command) for path in sorted((run / "control").glob("*.json"))]


def main() -> int:
    """Print a table; 1 where an alarm took more than 2 steps and 250 ms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--alarms", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=100.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="command-latency-") as where:
        folder = Path(where)
        (folder / "daemon.yaml").write_text(CONFIG)
        (folder / "rules.yaml").write_text(RULES)
        (folder / "run" / "spool").mkdir(parents=True, mode=0o700)
        (folder / "run").chmod(0o700)
        daemon = subprocess.Popen(
            [
                *(sys.executable, "-m", "sentinel.cli", "serve", str(folder / "run"), "--listen", "127.0.0.1:0"),
                *("--config", str(folder / "daemon.yaml"), "--rules", str(folder / "rules.yaml")),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(3.0)
        num_steps = GAP * arguments.alarms + 40
        port = 20000 + os.getpid() % 20000
        mp.spawn(
            train, (arguments.ranks, port, where, num_steps, arguments.step_ms / 1e3), nprocs=arguments.ranks, join=True
        )
        time.sleep(1.0)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)
        ends = json.loads((folder / "ends0.json").read_text())
        commands = commands_in(folder / "run")
    withdrawn = {one.withdraws for one in commands if isinstance(one, WithdrawCommand)}
    alarms = range(GAP - 1, num_steps - 40, GAP)
    obeyed = {
        alarm: next(
            (one.at_step for one in commands if isinstance(one, EnableMonitoring) and one.id not in withdrawn
             and alarm < one.at_step <= alarm + GAP // 2), None,
        )
        for alarm in alarms
    }  # fmt: skip
    steps = {alarm: at - alarm for alarm, at in obeyed.items() if at is not None}
    waits = sorted(1e3 * (ends[alarm + number - 1] - ends[alarm]) for alarm, number in steps.items())
    print(f"{arguments.ranks} ranks, {arguments.step_ms:g} ms a step, {len(alarms)} alarms, {len(steps)} obeyed")
    print("steps from the alarm:", dict(sorted(Counter(steps.values()).items())), "late:", len(withdrawn))
    if waits:
        print(
            f"from the end of the alarm's step to that step: median {waits[len(waits) // 2]:.0f} ms, most {waits[-1]:.0f} ms"
        )
    is_good = len(steps) == len(alarms) and all(
        number <= 2 or ends[alarm + number - 1] - ends[alarm] <= 0.25 for alarm, number in steps.items()
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
