"""What a rank says of where it stands: its place in the step, its activities."""

from __future__ import annotations

from pathlib import Path

import torch

import sentinel

from ..support.nets import TinyModel, loss_of
from ..support.spools import Said


def test_a_heartbeat_says_where_the_rank_stands(run: Path) -> None:
    model = TinyModel()
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    before = monitor.runner.position()
    loss_of(model, 0)
    loss_of(model, 1)
    inside = monitor.runner.position()
    monitor.detach()

    assert (before.step, before.call_id, before.activity, before.micro_step, before.is_waiting) == (0, 0, "init", -1, -1)
    assert (inside.step, inside.activity, inside.phase, inside.micro_step) == (0, "train", "forward", 1)
    assert inside.call_id > 0


def test_gradients_of_this_rank_alone_are_of_the_backward(run: Path) -> None:
    model = TinyModel()
    config = {"kinds": ["wgrad_unreduced"], "black_box": False}
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), config)
    loss_of(model, 0).backward()
    behind = monitor.runner.position()
    monitor.detach()

    assert behind.call_id > 0 and behind.module
    assert (behind.phase, behind.micro_step) == ("backward", -1)


def test_activities_are_told_with_the_step_that_they_fell_in(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            for name in ("eval", "checkpoint", "eval", "train"):
                monitor.activity(name)
        monitor.step()
    monitor.detach()

    assert [end.activities for end in Said(run).ends] == [(), ("eval", "checkpoint"), ()]
