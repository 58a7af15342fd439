"""The gradient of each micro-batch: its own, under its own micro-step, and nobody notices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sentinel

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said, norm
from ...support.training import train_steps

CONFIG = {"kinds": ["wgrad_unreduced", "wgrad"], "per_micro_step": True}


def own_gradients(model: nn.Module, micro_steps: list[int]) -> list[dict[str, torch.Tensor]]:
    """The slow and obvious: each micro-batch alone on a copy, in float64."""
    found = []
    for seed in micro_steps:
        alone = copy.deepcopy(model).double()
        loss_of(alone, seed).backward()
        found.append({name: p.grad for name, p in alone.named_parameters() if p.grad is not None})
    return found


def num_hooks(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


def assert_row_is(row: Any, truth: torch.Tensor) -> None:
    truth = truth.double()
    assert int(row["count"]) == truth.numel()
    assert norm(row) == pytest.approx(float(truth.norm()), rel=1e-4, abs=1e-9)
    assert float(row["min"]) == pytest.approx(float(truth.min()), rel=1e-3, abs=1e-7)
    assert float(row["max"]) == pytest.approx(float(truth.max()), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_each_micro_batch_has_its_own_gradient_in_whatever_order_backwards_run(order: tuple[int, ...], run: Path) -> None:
    model = TinyModel()
    truth = own_gradients(model, [0, 1, 2])
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    losses = [loss_of(model, micro_step) for micro_step in range(3)]  # F F F B B B
    for micro_step in order:
        losses[micro_step].backward()
    monitor.detach()

    said = Said(run)

    for name in truth[0]:
        rows = said.of(0, "wgrad_unreduced", name)
        assert [int(row["micro_step"]) for row in rows] == list(order)
        for row in rows:
            assert_row_is(row, truth[int(row["micro_step"])][name])
    assert not said.health


def test_defect_15_micro_batch_gradients_are_no_running_sums(run: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), {**CONFIG, "black_box": False})
    for _ in range(3):
        (3 * model(torch.ones(1, 1))).sum().backward()
    monitor.detach()

    said = Said(run)

    assert [float(row["mean"]) for row in said.of(0, "wgrad_unreduced", "weight")] == [3.0, 3.0, 3.0]


def test_rows_of_micro_steps_fold_by_default(run: Path) -> None:
    model = TinyModel()
    truth = own_gradients(model, [0, 1])
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), {"kinds": ["wgrad_unreduced"]})
    for micro_step in range(2):
        loss_of(model, micro_step).backward()
    monitor.detach()

    said = Said(run)

    for name in truth[0]:
        (row,) = said.of(0, "wgrad_unreduced", name)
        assert_row_is(row, torch.stack([one[name] for one in truth]))
        assert int(row["num_folded"]) == 2
    assert said.ends[0].due["wgrad_unreduced"] == len(truth[0])


def train_watched(model: nn.Module, config: dict[str, Any] | None, num_steps: int = 4) -> tuple[list[float], Any]:
    """Return the losses, and the monitor, which goes on; None where there is no config."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    monitor = sentinel.attach(model, optimizer, config) if config is not None else None
    return train_steps(model, num_steps, optimizer=optimizer, seed=1), monitor


class WithDropout(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Sequential(self.emb, nn.Dropout(0.2))


@pytest.mark.parametrize("build", [TinyModel, WithDropout])
def test_defect_18_training_is_bit_identical(build: Callable[[], nn.Module], run: Path) -> None:
    torch.manual_seed(0)
    bare = build()
    watched = copy.deepcopy(bare)

    expected, _ = train_watched(bare, None)
    losses, monitor = train_watched(watched, CONFIG)
    monitor.detach()

    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), watched.parameters(), strict=True))
    assert Said(run).of(3, "wgrad_unreduced")


def test_the_schedule_is_kept_and_hooks_stay_between(run: Path) -> None:
    model = TinyModel()
    _, monitor = train_watched(model, {"probes": {"wgrad_unreduced": {"step_interval": 2}}, "kinds": []})
    monitor.detach()

    said = Said(run)

    assert [bool(said.of(step, "wgrad_unreduced")) for step in range(4)] == [True, False, True, False]


def test_hooks_are_there_only_while_wanted_and_detach_restores(run: Path) -> None:
    model = TinyModel()
    before = num_hooks(model)
    _, monitor = train_watched(model, {"kinds": ["param"], "black_box": False}, 2)
    off = num_hooks(model)
    monitor.enable("wgrad_unreduced", for_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counts = []
    for step in range(5):
        loss_of(model, step).backward()
        counts.append(num_hooks(model))
        optimizer.step()
        monitor.step()
    monitor.detach()

    assert before == 0
    assert off == 2  # the chunk's own forward
    assert counts[0] > off + len(list(model.parameters())) - 1
    assert counts[-1] == off
    assert num_hooks(model) == 0
    assert not Said(run).health


def test_targets_name_parameters_and_modules(run: Path) -> None:
    model = TinyModel()
    config = {"kinds": [], "probes": {"wgrad_unreduced": {"targets": ["blocks.1", "head.bias"]}}}
    _, monitor = train_watched(model, config, 1)
    hooked = {name for name, p in model.named_parameters() if p._backward_hooks}
    monitor.detach()

    names = set(Said(run).names(0, "wgrad_unreduced"))

    assert names == {name for name, _ in model.named_parameters() if name.startswith("blocks.1.") or name == "head.bias"}
    assert hooked == names


def test_a_weight_used_twice_comes_once_and_one_that_is_not_used_not_at_all(run: Path) -> None:
    class Twice(TinyModel):
        def forward(self, tokens: torch.Tensor, with_norm: bool = True) -> torch.Tensor:
            x = self.blocks[0](self.blocks[0](self.emb(tokens)))
            return nn.functional.linear(self.norm(x) if with_norm else x, self.emb.weight)

    model = Twice(1)
    truth = own_gradients(model, [0])[0]
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    loss_of(model, 0).backward()
    batch = torch.zeros(2, 2, dtype=torch.long)
    model(batch, with_norm=False).sum().backward()
    monitor.detach()

    said = Said(run)

    for name in ("blocks.0.fc1.weight", "emb.weight"):
        first, second = said.of(0, "wgrad_unreduced", name)
        assert_row_is(first, truth[name])
        assert (int(first["micro_step"]), int(second["micro_step"])) == (0, 1)
    assert [int(row["micro_step"]) for row in said.of(0, "wgrad_unreduced", "norm.weight")] == [0]
    assert not said.of(0, "wgrad_unreduced", "head.weight")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpointing_each_gradient_comes_once(use_reentrant: bool, run: Path) -> None:
    class Checkpointed(TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.emb(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.head(self.norm(x))

    model = Checkpointed()
    truth = own_gradients(model, [0, 1])
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    losses = [loss_of(model, micro_step) for micro_step in range(2)]
    for loss in reversed(losses):
        loss.backward()
    monitor.detach()

    said = Said(run)

    for name in truth[0]:
        rows = said.of(0, "wgrad_unreduced", name)
        assert [int(row["micro_step"]) for row in rows] == [1, 0], name
        for row in rows:
            assert_row_is(row, truth[int(row["micro_step"])][name])


@pytest.mark.parametrize("unscales", [True, False])
def test_the_scale_of_the_loss_is_divided_out(unscales: bool, run: Path) -> None:
    model = TinyModel()
    truth = own_gradients(model, [0])[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    scaler.scale(loss_of(model, 0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    monitor.detach()

    said = Said(run)

    for name, expected in truth.items():
        assert_row_is(said.of(0, "wgrad_unreduced", name)[0], expected)


def test_defect_22_the_record_of_the_step_that_overflowed_is_kept(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    for micro_step in range(2):
        loss = loss_of(model, micro_step) * (float("inf") if micro_step else 1.0)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    monitor.detach()

    rows = Said(run).of(0, "wgrad_unreduced", "head.weight")

    bad = [int(row["num_nan"] + row["num_pos_inf"] + row["num_neg_inf"]) for row in rows]
    assert [int(row["micro_step"]) for row in rows] == [0, 1]
    assert bad[0] == 0
    assert bad[1] > 0


def test_gradients_asked_for_by_autograd_grad_are_seen(run: Path) -> None:
    model = TinyModel()
    truth = own_gradients(model, [0])[0]
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    torch.autograd.grad(loss_of(model, 0), list(model.parameters()))
    monitor.detach()

    said = Said(run)

    for name, expected in truth.items():
        assert_row_is(said.of(0, "wgrad_unreduced", name)[0], expected)


def test_copies_and_pickles_of_the_model_are_not_watched(run: Path) -> None:
    model = TinyModel()
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    loss_of(model, 0).backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, 1).backward()
    monitor.detach()

    rows = Said(run).of(0, "wgrad_unreduced")

    assert len(rows) == len(list(model.parameters()))
    assert {int(row["micro_step"]) for row in rows} == {0}


def test_a_sparse_gradient_is_told_once(run: Path) -> None:
    model = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    for _ in range(2):
        model(torch.tensor([[1, 2]])).sum().backward()
    monitor.detach()

    said = Said(run)

    assert [h.code for h in said.health if "wgrad_unreduced" in h.site][:1] == ["unsupported"]
    assert np.isfinite(norm(said.of(0, "wgrad_unreduced", "1.weight")[0]))


@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=pytest.mark.long)])
def test_in_a_compiled_model_each_micro_batch_has_its_own_gradient(in_place: bool, run: Path) -> None:
    torch._dynamo.reset()
    model = TinyModel()
    truth = own_gradients(model, [0, 1, 2])
    compiled: Any = model
    if in_place:
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager")
    monitor = sentinel.attach(compiled, torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    losses = [loss_of(compiled, micro_step) for micro_step in range(3)]
    for loss in reversed(losses):
        loss.backward()
    monitor.detach()

    said = Said(run)

    for name in truth[0]:
        rows = said.of(0, "wgrad_unreduced", name)
        assert [int(row["micro_step"]) for row in rows] == [2, 1, 0]
        for row in rows:
            assert_row_is(row, truth[int(row["micro_step"])][name])
    assert not said.health


def test_a_gradient_that_a_kernel_adds_to_main_grad_is_told_and_not_read(run: Path) -> None:
    model = TinyModel()
    model.head.weight.grad_added_to_main_grad = True  # type: ignore[assignment]
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    loss_of(model, 0).backward()
    monitor.detach()

    said = Said(run)

    assert [(h.code, "main_grad" in h.message) for h in said.health] == [("unsupported", True)]
    assert not said.of(0, "wgrad_unreduced", "head.weight")
    assert said.of(0, "wgrad_unreduced", "head.bias")
