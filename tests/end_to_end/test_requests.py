"""A trainer that takes up what it is asked for: on all ranks at one step, told to the daemon, over when a person says so."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from sentinel.command import RequestAction

from ..support import forked
from ..support.ports import free_port
from ..support.spools import SaidSoFar
from ..support.waiting import wait_for
from ..support.warm import cli
from .ranks import ROOT

NUM_RANKS = 2
HELD, FAR = 20, 120
"""Step at which the ranks wait while all is asked, and a later one that it is asked for."""


def rank_main(rank: int, port: int, folder: str) -> None:
    os.environ.update(SENTINEL_DIR=folder, SENTINEL_RUN="run", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    example = importlib.util.spec_from_file_location("requests_ddp", ROOT / "examples" / "requests_ddp.py")
    assert example is not None and example.loader is not None
    module = importlib.util.module_from_spec(example)
    example.loader.exec_module(module)
    real = module.agreed_requests

    def agreed(monitor: Any) -> list[Any]:
        (Path(folder) / f"at{rank}").write_text(str(monitor.current_step))
        while monitor.current_step == HELD and not (Path(folder) / "asked").exists():
            time.sleep(0.01)
        if (Path(folder) / "stop").exists() and monitor.current_step % 50 == 0:
            monitor.detach()
            os._exit(0)  # The ranks stop at one step; nobody waits for the other in the group's end.
        requests = real(monitor)
        for request in requests:
            with (Path(folder) / f"asked{rank}.jsonl").open("ab") as file:
                file.write(msgspec.json.encode([monitor.current_step, request]) + b"\n")
        return list(requests)

    module.agreed_requests = agreed
    module.train(10**6, Path(folder))


def asked(folder: Path, rank: int) -> list[tuple[int, RequestAction]]:
    path = folder / f"asked{rank}.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=tuple[int, RequestAction]) for line in lines]


def step_of(folder: Path, rank: int = 0) -> int:
    path = folder / f"at{rank}"
    return int(path.read_text() or 0) if path.exists() else 0


def ask(folder: Path, *arguments: str) -> None:
    subprocess.run(
        [*cli(), "request", *arguments, "-d", str(folder / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip


@pytest.mark.slow
def test_requests_are_taken_up_by_all_ranks_at_one_step(tmp_path: Path) -> None:
    ranks = forked.start_ranks(rank_main, (free_port(), str(tmp_path)), NUM_RANKS, join=False)
    try:
        wait_for(lambda: step_of(tmp_path) == HELD, timeout_s=240.0)
        ask(tmp_path, "checkpoint", "--at-step", str(FAR), "--why", "before it dies")
        ask(tmp_path, "skip", "3", "--at-step", str(FAR))
        ask(tmp_path, "pause", "--for", "2h", "--at-step", str(FAR + 5))
        (tmp_path / "asked").touch()
        wait_for(lambda: len(asked(tmp_path, 0)) == 3 and len(asked(tmp_path, 1)) == 3, timeout_s=240.0)
        ask(tmp_path, "resume")
        wait_for(lambda: step_of(tmp_path) > FAR + 10, timeout_s=240.0)
    finally:
        (tmp_path / "stop").touch()
        while not ranks.join(timeout=240):
            pass

    first, second = asked(tmp_path, 0), asked(tmp_path, 1)
    assert first == second
    assert [request.action for _, request in first] == ["checkpoint", "skip_batches", "pause"]
    assert (first[0][1].reason, first[1][1].num_batches) == ("before it dies", 3)
    assert [step for step, _ in first] == [FAR, FAR, FAR + 5]
    # Without `monitor.step()` a step has begun with its forward: what is ready from then on is asked for behind it.
    assert [path.name for path in tmp_path.glob("step*.pt")] == [f"step{FAR + 1}.pt"]
    for rank in range(NUM_RANKS):
        acks = SaidSoFar(tmp_path / "run", rank).acks
        for _, request in first:
            assert [ack.state for ack in acks if ack.command == request.id and ack.state != "withdrawn"] == [
                "armed", "applied", "ended",
            ]  # fmt: skip
