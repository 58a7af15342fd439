"""The structure of a model: written down while it trains, by hooks that are gone afterwards."""

from __future__ import annotations

import dataclasses
import stat
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sentinel
from sentinel.control.commands import RunCommands
from sentinel.structure_file import ModuleShown, read_structure, structure_path

from ...layouts.builds import pipeline, tp
from ...layouts.layout import train_ranks
from ...support.nets import TinyModel, loss_of
from ...support.spools import Said


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    cache: dict[str, Any]


class Odd(nn.Module):
    """Nested and keyword inputs, a dataclass out, a module called twice, one never, one under checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.region = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, pair: tuple[torch.Tensor, None], *, flag: bool, secret: str) -> Output:
        x = self.inner(pair[0])
        x = self.twice(self.twice(x))
        x = checkpoint(self.region, x, use_reentrant=False)
        return Output(x, {"k": [x, 3]})


def modules_of(run: Path, rank: int = 0) -> dict[str, ModuleShown]:
    return {one.name: one for chunk in read_structure(structure_path(run, rank)).chunks for one in chunk.modules}


def step(model: nn.Module, optimizer: Any) -> float:
    optimizer.zero_grad()
    out = model((torch.ones(2, 4), None), flag=True, secret="a word of the training data")
    out.logits.sum().backward()
    optimizer.step()
    return float(out.logits.sum())


def num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_inputs_outputs_and_call_stack_are_written_down_once(run: Path) -> None:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": [], "black_box": False, "struct": True})
    monitor.set_step(1000)  # A resumed run: the first step is whatever it is.
    with_hooks = num_hooks(model)

    step(model, optimizer)
    step(model, optimizer)
    without = num_hooks(model)
    monitor.detach()

    assert with_hooks > without == 2  # What is left is the monitor's own pair on the root.
    path = structure_path(run, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    file = read_structure(path)
    assert (file.step, file.rank) == (1000, 0)
    found = modules_of(run)
    assert list(found) == ["", "inner", "twice", "never", "region", "region.0", "region.1"]
    root = found[""]
    assert [one.shape for one in root.inputs[0].items.values()] == [(2, 4), None]
    assert root.inputs[0].kind == "tuple" and root.inputs[0].items["1"].value == "None"
    assert root.keywords["flag"].value == "True"
    assert root.output is not None and root.output.kind == "Output"
    assert root.output.items["logits"].shape == (2, 4)
    assert root.output.items["cache"].items["k"].items["1"].value == "3"
    assert root.parameters["scale"].dtype == "float64"
    assert found["inner"].parameters["weight"].shape == (4, 4)
    assert found["inner"].kind == "torch.nn.modules.linear.Linear"
    assert (found["twice"].num_calls, found["never"].num_calls, found["region.0"].num_calls) == (2, 0, 1)
    assert found["never"].output is None
    assert found["inner"].inputs[0].dtype == "float32"
    assert found["inner"].called_from[0].endswith("Odd.forward")
    assert "test_structure_print.py:" in found["inner"].called_from[0]
    assert any(frame.endswith(" step") for frame in found["inner"].called_from)
    assert "a word of the training data" not in path.read_text()
    assert not Said(run).health


def test_a_command_asks_without_stopping_the_training(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": []})
    hooks = []

    def training_step(at: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, at)
        loss.backward()
        optimizer.step()
        hooks.append(num_hooks(model))
        return float(loss.detach())

    losses = [training_step(0)]
    assert not structure_path(run, 0).exists()
    RunCommands(run).describe(at_step=3, now=1.0)
    time.sleep(0.3)  # The writer looks for commands by itself.
    losses += [training_step(at) for at in range(1, 6)]
    monitor.detach()

    assert read_structure(structure_path(run, 0)).step == 3
    assert modules_of(run)["blocks.1.fc1"].inputs[0].shape == (4, 5, 8)
    assert hooks[0] == hooks[1] == hooks[4] == hooks[5]
    torch.manual_seed(0)
    bare = TinyModel()
    other = torch.optim.SGD(bare.parameters(), 0.1)
    truth = []
    for at in range(6):
        other.zero_grad()
        loss = loss_of(bare, at)
        loss.backward()
        other.step()
        truth.append(float(loss.detach()))
    assert losses == truth


def test_a_trainer_may_refuse(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": [], "allow_commands": []})
    RunCommands(run).describe(at_step=1, now=1.0)
    time.sleep(0.3)
    for at in range(3):
        optimizer.zero_grad()
        loss_of(model, at).backward()
        optimizer.step()
    monitor.detach()

    assert not structure_path(run, 0).exists()


@pytest.mark.parametrize("build", [tp, partial(pipeline, "Schedule1F1B")], ids=["tp", "pipeline"])
def test_every_rank_writes_its_own(build: Any, tmp_path: Path) -> None:
    train_ranks(tmp_path, build, 2, config={"kinds": [], "struct": True}, num_steps=2)

    files = [read_structure(structure_path(tmp_path / "run", rank)) for rank in range(2)]

    assert [one.rank for one in files] == [0, 1]
    for file in files:
        called = [one for chunk in file.chunks for one in chunk.modules if one.num_calls]
        assert called and all(one.output is not None for one in called)
    if build is tp:
        weights = [w for one in files[0].chunks[0].modules for w in one.parameters.values() if w.placements]
        assert weights and all(one.local_shape is not None for one in weights)
    else:
        assert [file.chunks[0].depth for file in files] == [0, 1]
    assert msgspec.json.encode(files[0])
