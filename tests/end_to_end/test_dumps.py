"""Raw tensors and structure, ordered from real ranks while they train: by a person, and by a rule that fires."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import sentinel
from sentinel.cli.main import run_cli

from ..support import forked
from ..support.ports import free_port
from ..support.spools import SaidSoFar
from ..support.waiting import wait_for
from ..support.warm import cli
from .ranks import ROOT, train_example
from .test_commands import NUM_RANKS, order

STEP_S = 0.03


def rank_main(rank: int, port: int, folder: str) -> None:
    os.environ.update(SENTINEL_DIR=folder, SENTINEL_RUN="run", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    allowed = ["EnableMonitoring", "DescribeStructure", "DumpTensors"]
    monitor = sentinel.attach(model, optimizer, {"kinds": [], "allow_commands": allowed})
    step = 0
    while step < 3000 and not ((Path(folder) / "stop").exists() and step % 10 == 0):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        (Path(folder) / f"new-{rank}").write_text(str(step))
        (Path(folder) / f"new-{rank}").replace(Path(folder) / f"at-{rank}")
        time.sleep(STEP_S)
        step += 1
    monitor.detach()
    os._exit(0)  # Ranks that stop at different steps would wait for each other in the group's end.


def at(folder: Path) -> int:
    return min(int((folder / f"at-{rank}").read_text()) for rank in range(NUM_RANKS))


@pytest.mark.long
def test_a_person_dumps_and_looks_while_the_ranks_train(tmp_path: Path) -> None:
    port = free_port()
    ranks = forked.start_ranks(rank_main, (port, str(tmp_path)), NUM_RANKS, join=False)
    try:
        wait_for(lambda: all((tmp_path / f"at-{rank}").exists() for rank in range(NUM_RANKS)) and at(tmp_path) >= 3)
        asked_from = at(tmp_path)
        at_step = str(asked_from + 150)  # Late enough, however busy the machine is.
        wanted = ("--kinds", "wgrad,param", "--for-steps", "3", "--step-interval", "2", "--at-step", at_step)
        ordered = order(tmp_path, "dump", *wanted)
        shown = run_struct(tmp_path)
        asked_until = at(tmp_path)
        wait_for(lambda: at(tmp_path) >= ordered["at_step"] + 5)
    finally:
        (tmp_path / "stop").touch()
        while not ranks.join(timeout=240):
            pass

    # Nobody stopped: the ranks went on while they were asked, and their hooks are gone.
    assert len(shown) == NUM_RANKS
    assert all([m["name"] for m in one["chunks"][0]["modules"]] == ["", "0", "1", "2"] for one in shown)
    assert shown[1]["chunks"][0]["modules"][1]["inputs"][0]["shape"] == [4, 8]
    assert asked_until > asked_from
    first = ordered["at_step"]
    for rank in range(NUM_RANKS):
        spoken = SaidSoFar(tmp_path / "run", rank)
        assert [ack.state for ack in spoken.acks if ack.command == ordered["id"]] == ["armed", "applied", "ended"]
        assert not spoken.health
    assert sorted(p.name for p in (tmp_path / "run" / "dumps" / "attempt0").iterdir()) == sorted(
        [f"step{first}", f"step{first + 2}"]
    )
    assert run_cli(["export", str(tmp_path / "run"), "--format", "tensors", "-o", str(tmp_path / "out")]) == 0
    whole = load_file(tmp_path / "out" / f"step{first}.safetensors")
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert set(whole) == {f"{kind}/{name}" for kind in ("param", "wgrad") for name in names}


def run_struct(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*cli(), "struct", str(folder / "run"), "--ask", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return [msgspec.json.decode(line) for line in done.stdout.splitlines()]


PACK = """
rules:
  - name: non-finite
    actions: [notify, dump]
"""


def test_an_alarm_dumps_the_tensors_of_the_suspected_stage(tmp_path: Path) -> None:
    fault = {"module": "blocks.3.mlp.fc1", "dp_rank": 1, "micro_step": 1, "steps": [6]}
    config = {"kinds": [], "allow_commands": ["DumpTensors"], "dump": {"first_n": 4}}

    ended = train_example(tmp_path, "--steps", "28", "--step-time", "0.25", config=config, faults=[fault], pack=PACK)

    dumps = sorted((ended.run_dir / "dumps").glob("attempt0/step*/rank*.safetensors"))
    assert dumps, ended.stderr[-3000:]
    steps = {path.parent.name for path in dumps}
    assert len(steps) == 1  # One alarm, one step, obeyed at the same one by all that are meant.
    assert {path.name for path in dumps} == {"rank2.safetensors", "rank3.safetensors"}  # The stage of blocks.3.
    assert any(name.startswith("param/") for name in load_file(dumps[0]))
