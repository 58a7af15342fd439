"""Gradients are reported without the loss scale, whoever unscales them, and whenever."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import sentinel

from ...support.nets import TinyModel, loss_of
from ...support.spools import ALL_KINDS, Said, norm

Loop = Callable[[nn.Module, torch.optim.Optimizer, "torch.amp.GradScaler", int], None]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, step: int) -> None:
    optimizer.zero_grad()
    for micro_step in range(2):
        scaler.scale(loss_of(model, 10 * step + micro_step)).backward()
    scaler.step(optimizer)
    scaler.update()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, step: int) -> None:
    optimizer.zero_grad()
    for micro_step in range(2):
        scaler.scale(loss_of(model, 10 * step + micro_step)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()


def zeroed_behind(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, step: int) -> None:
    """The scaler changes its scale between step and zero_grad."""
    for micro_step in range(2):
        scaler.scale(loss_of(model, 10 * step + micro_step)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def unscaled_by_nobody(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, step: int) -> None:
    """A loop that throws the step away before the scaler saw it: the gradients still carry the scale."""
    for micro_step in range(2):
        scaler.scale(loss_of(model, 10 * step + micro_step)).backward()
    optimizer.zero_grad()


def truth_of(model: nn.Module) -> dict[str, float]:
    """Norms of the unscaled gradients of step 0, and of the gradient of the head's output."""
    model = copy.deepcopy(model)
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda m, a, output: output.register_hook(seen.append) and None)
    for micro_step in range(2):
        loss_of(model, micro_step).backward()
    found = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    return {**found, "head": float(torch.stack(seen).norm())}


@pytest.mark.parametrize("loop", [plain, clipped, zeroed_behind, unscaled_by_nobody])
@pytest.mark.parametrize("scale", [2.0**16, 3.0])
def test_gradients_are_reported_unscaled(loop: Loop, scale: float, run: Path) -> None:
    model = TinyModel()
    truth = truth_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    for step in range(3):
        loop(model, optimizer, scaler, step)
    monitor.detach()

    said = Said(run)

    for name, expected in truth.items():
        rows = said.of(0, "dgrad" if name == "head" else "wgrad", name)
        assert len(rows) == 1
        assert norm(rows[0]) == pytest.approx(expected, rel=1e-5), name
        assert not rows[0]["flags"] & 2, "unscaling is no clipping"
    assert [end.scalars["loss_scale"] for end in said.ends][:1] == [scale]
    assert [end.step for end in said.ends] == [0, 1, 2]


def test_a_skipped_step_is_a_step_and_keeps_its_bad_gradients(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.detach()

    said = Said(run)

    assert [(end.step, end.is_skipped) for end in said.ends] == [(0, False), (1, False), (2, True), (3, False)]
    assert [end.scalars["loss_scale"] for end in said.ends] == [1024.0, 1024.0, 1024.0, 512.0]
    bad = said.of(2, "wgrad", "head.weight")[0]
    assert bad["num_nan"] + bad["num_pos_inf"] + bad["num_neg_inf"] > 0


def test_a_scaler_that_is_off_scales_nothing(run: Path) -> None:
    model = TinyModel()
    truth = truth_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    plain(model, optimizer, scaler, 0)
    monitor.detach()

    said = Said(run)

    assert norm(said.of(0, "wgrad", "head.weight")[0]) == pytest.approx(truth["head.weight"], rel=1e-5)
    assert "loss_scale" not in said.ends[0].scalars


def test_torch_is_as_before_when_the_last_monitor_is_gone(run: Path) -> None:
    before = torch.amp.GradScaler.scale, torch.amp.GradScaler.unscale_, torch._C._distributed_c10d.Work.wait
    model = TinyModel()
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.01))
    assert torch.amp.GradScaler.scale is not before[0]

    monitor.detach()

    assert (torch.amp.GradScaler.scale, torch.amp.GradScaler.unscale_, torch._C._distributed_c10d.Work.wait) == before
