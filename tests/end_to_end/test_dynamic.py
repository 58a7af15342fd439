"""The config edited while two real ranks train, with a real daemon and without: what is measured, and from which step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sentinel
from sentinel.command import ChangeConfig
from sentinel.messages import Descriptor

from ..support import forked
from ..support.ports import free_port
from ..support.spools import SaidSoFar, decoded, frames_so_far, spool_folders
from ..support.waiting import wait_for
from ..support.warm import cli
from .ranks import ROOT

NUM_RANKS = 2
STEP_S = 0.02


def num_hooks(module: nn.Module) -> int:
    return sum(len(getattr(module, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


def rank_main(rank: int, port: int, folder: str, config: str, first_step: int) -> None:
    os.environ.update(SENTINEL_DIR=folder, SENTINEL_RUN="run", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = sentinel.attach(model, optimizer, config, first_step=first_step)
    inner = [module for name, module in model.module.named_modules() if name]
    with (Path(folder) / f"hooks-{first_step}-{rank}").open("w") as hooks:
        for step in range(first_step, first_step + 20_000):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            hooks.write(f"{step} {sum(map(num_hooks, inner))}\n")
            optimizer.step()
            if rank == 0:
                (Path(folder) / "at.new").write_text(str(step))
                (Path(folder) / "at.new").rename(Path(folder) / "at")
            time.sleep(STEP_S)
            stop = Path(folder) / "stop"
            if stop.exists() and step >= int(stop.read_text()):
                break
    monitor.detach()
    os._exit(0)  # Ranks that stop at different steps would wait for each other in the group's end.


class Trainer:
    """Two ranks that train, and the file that says what is measured."""

    def __init__(self, folder: Path, config: Path, first_step: int) -> None:
        port = free_port()
        self.folder, self.config, self.first_step = folder, config, first_step
        for name in ("stop", "at"):
            (folder / name).unlink(missing_ok=True)
        arguments = (port, str(folder), str(config), first_step)
        self.ranks = forked.start_ranks(rank_main, arguments, NUM_RANKS, join=False)

    def step(self) -> int:
        return int((self.folder / "at").read_text()) if (self.folder / "at").exists() else -1

    def train(self, num_steps: int) -> None:
        until = max(self.step(), self.first_step) + num_steps
        wait_for(lambda: self.step() >= until, timeout_s=240.0)

    def edit(self, **keys: Any) -> None:
        new = self.config.with_suffix(".new")
        new.write_text(json.dumps(keys))
        new.rename(self.config)

    def changes(self) -> list[ChangeConfig]:
        """What was ordered, for each text that of the last order: one that came too late is given again."""
        found: dict[str, ChangeConfig] = {}
        for path in sorted((self.folder / "run" / "control").glob("*.json")):
            content = json.loads(path.read_bytes())
            if content["type"] == "ChangeConfig":
                change = msgspec.convert(content, ChangeConfig)
                found[change.text_hash] = change
            elif content["type"] == "WithdrawCommand":
                # It came too late and nobody obeyed it; until it is given again nothing is in force.
                found = {text: one for text, one in found.items() if one.id != content["withdraws"]}
        return list(found.values())

    def obeyed(self, num_changes: int, num_steps: int) -> ChangeConfig:
        """Wait until all ranks have had the last of so many changes in force for `num_steps`."""

        def in_force() -> ChangeConfig | None:
            changes = self.changes()
            if len(changes) != num_changes or self.step() < changes[-1].at_step + num_steps:
                return None
            # One that a rank says came too late is withdrawn, however far the ranks are by then.
            acks = [SaidSoFar(self.folder / "run", rank).acks for rank in range(NUM_RANKS)]
            is_applied = all(any((one.command, one.state) == (changes[-1].id, "applied") for one in of) for of in acks)
            return changes[-1] if is_applied else None

        found: ChangeConfig = wait_for(in_force, f"change {num_changes} in force", timeout_s=240.0)
        return found

    def end(self) -> None:
        (self.folder / "stop").write_text(str(self.step() + 10))
        while not self.ranks.join(timeout=240):
            pass

    def hooks(self, rank: int) -> dict[int, int]:
        lines = (self.folder / f"hooks-{self.first_step}-{rank}").read_text().splitlines()
        return {int(step): int(count) for step, count in (line.split() for line in lines)}


@contextmanager
def trainer(folder: Path, config: Path, first_step: int = 0) -> Iterator[Trainer]:
    one = Trainer(folder, config, first_step)
    try:
        wait_for(lambda: one.step() >= first_step + 5, timeout_s=240.0)
        yield one
    finally:
        one.end()


@contextmanager
def daemon(folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Serve the runs of a folder; yields what `sentinel status` says of the run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*cli(), "serve", str(folder), "--listen", "127.0.0.1:0"], env=environment)

    def status() -> dict[str, Any]:
        done = subprocess.run(
            [*cli(), "status", str(folder), "--json"], env=environment, capture_output=True, text=True, timeout=240
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    try:
        yield status
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0


class Measured:
    """Which tensors a rank measured in which step, over all of its lives."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._found: set[tuple[str, str, int]] = set()
        self._ends = SaidSoFar(run_dir, rank).ends
        for folder in spool_folders(run_dir, rank):
            names: dict[int, tuple[str, str]] = {}
            for header, message in decoded(frames_so_far(folder)):
                if isinstance(message, Descriptor):
                    names.update((tensor.id, (tensor.kind, tensor.name)) for tensor in message.tensors)
                elif isinstance(message, np.ndarray):
                    self._found.update((*names[int(row["tensor"])], header.step) for row in message)

    def steps(self, kind: str, name: str, first: int = 0, until: int = 10_000) -> list[int]:
        """Steps in [first, until) in which a tensor was measured."""
        return sorted(at for one_kind, one, at in self._found if (one_kind, one) == (kind, name) and first <= at < until)

    def kept(self, steps: list[int]) -> list[int]:
        """Return these steps without those whose rows a busy machine had no time to write; each says so itself."""
        return [step for step in steps if self._ends[step].num_rows or not self._ends[step].num_calls]


def steps(change: ChangeConfig, count: int) -> list[int]:
    return list(range(change.at_step, change.at_step + count))


def test_the_six_scenarios_of_a_config_edited_while_two_ranks_train(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    config = tmp_path / "monitor.yaml"
    off = {"enabled": False, "black_box": False}
    config.write_text(json.dumps(off))
    with daemon(tmp_path) as status:
        with trainer(tmp_path, config) as first:  # dynamic and off
            first.train(20)
            first.edit(kinds=["activation", "dgrad"], collect_times=8, black_box=False)  # switched on while training
            on = first.obeyed(1, 20)
            first.edit(kinds=["activation"], collect_times=1000, step_interval=2, black_box=False)
            longer = first.obeyed(2, 10)
            first.edit(kinds=["wgrad"], collect_times=5, black_box=False)  # changed before the end
            changed = first.obeyed(3, 20)
            first.edit(kinds=["wgrad", "dgrad"], collect_times=5, blak_box=False)  # broken: nothing changes
            broken = wait_for(lambda: (status().get("config") or {}).get("problem"), timeout_s=240.0, interval_s=0.5)
            first.edit(kinds=["wgrad"], collect_times=5, black_box=True)  # restarted after collect_times
            again = first.obeyed(4, 20)
            first.edit(kinds=["param"], run="another")  # forbidden: nothing changes
            forbidden = wait_for(
                lambda: "run cannot change" in status()["config"]["problem"], timeout_s=240.0, interval_s=0.5
            )
            first.edit(**off)
            last = first.obeyed(5, 20)
        # A new attempt has withdrawn what still stands, and a busy daemon may not have seen that it is over.
        ordered = first.changes()
        recorded = {path: path.stat().st_size for path in (tmp_path / "run" / "spool").rglob("*.spool")}
        first.edit(kinds=["param", "activation"], collect_times=30, black_box=False)
        with trainer(tmp_path, config, first_step=100_000) as second:  # dynamic and on from the start, then static
            second.train(150)
        final = status()

    for rank in range(NUM_RANKS):
        one = Measured(tmp_path / "run", rank)
        assert one.steps("activation", "1", until=longer.at_step) == one.kept(steps(on, 8))
        assert one.steps("dgrad", "1") == one.kept(steps(on, 8))
        due = [step for step in range(longer.at_step, changed.at_step) if step % 2 == 0]
        assert one.steps("activation", "1", longer.at_step, again.at_step) == one.kept(due)
        assert one.steps("wgrad", "0.weight", until=again.at_step) == one.kept(steps(changed, 5))
        assert one.steps("wgrad", "0.weight", again.at_step) == one.kept(steps(again, 5))
        assert one.steps("param", "0.weight") == []
        static = list(range(100_000, 100_030))
        assert one.steps("param", "0.weight", 100_000, 200_000) == one.kept(static)
        assert one.steps("activation", "1", 100_000, 200_000) == one.kept(static)
        assert one.kept(static + steps(on, 8) + steps(changed, 5) + steps(again, 5))
        states = [ack.state for ack in SaidSoFar(tmp_path / "run", rank).acks if ack.command == on.id]
        assert states == ["armed", "applied"]

    assert 'unknown key "blak_box"; did you mean "black_box"?' in broken
    assert forbidden
    assert ordered == [on, longer, changed, again, last]
    assert final["config"]["problem"] == ""
    assert all(path.stat().st_size >= size for path, size in recorded.items()) and recorded
    for rank in range(NUM_RANKS):
        hooks = first.hooks(rank)
        assert {hooks[step] for step in range(on.at_step)} == {0}
        assert all(hooks[step] > 0 for step in steps(on, 8))
        assert {hooks[step] for step in range(on.at_step + 8, longer.at_step)} == {0}
        assert {hooks[step] for step in range(changed.at_step, again.at_step)} == {0}
        assert all(hooks[step] > 0 for step in range(again.at_step, last.at_step))  # the black box
        assert {count for step, count in hooks.items() if step >= last.at_step} == {0}
        restarted = second.hooks(rank)
        assert {count > 0 for step, count in restarted.items() if step < 100_030} == {True}
        assert {count for step, count in restarted.items() if step >= 100_030} == {0}


@pytest.mark.long
def test_without_a_daemon_the_file_names_the_step(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    config = tmp_path / "monitor.yaml"
    config.write_text("kinds: []\n")
    with trainer(tmp_path, config) as one:
        one.train(20)
        at_step = one.step() + int(3.0 / STEP_S)
        one.edit(kinds=["activation"], at_step=at_step, collect_times=7)
        wait_for(lambda: one.step() >= at_step + 20, timeout_s=240.0)
        one.edit(kinds=["dgrad"], at_step=3)
        one.train(int(3.0 / STEP_S))

    for rank in range(NUM_RANKS):
        found, spoken = Measured(tmp_path / "run", rank), SaidSoFar(tmp_path / "run", rank)
        assert found.steps("activation", "1") == found.kept(list(range(at_step, at_step + 7)))
        assert found.steps("dgrad", "1") == []
        assert [ack.state for ack in spoken.acks] == ["armed", "applied", "missed"]
        assert [health.code for health in spoken.health if health.code.startswith("config")] == ["config_missed"]
    assert one.changes() == []
