"""Commands and real ranks: what is ordered while they train is obeyed by all of them from one and the same step."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import sentinel

from ..support import forked
from ..support.ports import free_port
from ..support.spools import SaidSoFar
from ..support.waiting import wait_for
from ..support.warm import cli
from .ranks import ROOT

NUM_RANKS = 2
STEP_S = 0.02


def rank_main(rank: int, port: int, folder: str, num_steps: int) -> None:
    os.environ.update(SENTINEL_DIR=folder, SENTINEL_RUN="run", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = sentinel.attach(model, optimizer)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if rank == 0:
            (Path(folder) / "at").write_text(str(step))
        time.sleep(STEP_S)
        if (Path(folder) / "stop").exists() and step % 10 == 9:
            break
    monitor.detach()
    os._exit(0)  # Ranks that stop at different steps would wait for each other in the group's end.


def order(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [*cli(), *arguments, "-d", str(folder / "run"), "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = msgspec.json.decode(done.stdout)
    return answer


def measured(spoken: SaidSoFar) -> list[int]:
    """Steps in which a module inside the model was measured."""
    assert spoken.descriptor is not None
    inner = {t.id for t in spoken.descriptor.tensors if t.kind == "activation" and t.name == "1"}
    return sorted(step for step, parts in spoken.rows.items() if any(int(r["tensor"]) in inner for p in parts for r in p))


def test_command_obeyed_at_one_step_by_real_ranks(tmp_path: Path) -> None:
    port = free_port()
    ranks = forked.start_ranks(rank_main, (port, str(tmp_path), 3000), NUM_RANKS, join=False)
    try:
        wait_for(lambda: (tmp_path / "at").exists() and int((tmp_path / "at").read_text() or 0) >= 5, timeout_s=240.0)
        at_step = str(int((tmp_path / "at").read_text() or 0) + 200)  # Late enough, however busy the machine is.
        enabled = order(tmp_path, "enable", "--kinds", "activation,dgrad", "--for-steps", "7", "--at-step", at_step)
        late = order(tmp_path, "enable", "--kinds", "activation", "--at-step", "1")
        done = enabled["at_step"] + 10
        wait_for(lambda: int((tmp_path / "at").read_text() or 0) >= done, timeout_s=240.0)
    finally:
        (tmp_path / "stop").touch()
        while not ranks.join(timeout=240):
            pass

    spoken = [SaidSoFar(tmp_path / "run", rank) for rank in range(NUM_RANKS)]
    expected = list(range(enabled["at_step"], enabled["at_step"] + 7))

    assert [measured(one) for one in spoken] == [expected] * NUM_RANKS
    for one in spoken:
        assert [ack.state for ack in one.acks if ack.command == enabled["id"]] == ["armed", "applied", "ended"]
        assert [ack.state for ack in one.acks if ack.command == late["id"]] == ["missed"]
