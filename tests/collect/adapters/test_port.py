"""What an adapter may say to a monitor, said by one that has no trainer."""

from __future__ import annotations

from pathlib import Path

import torch

import sentinel
from sentinel.collect.monitor import Monitor

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said


def attached(model: TinyModel, *optimizers: torch.optim.Optimizer) -> Monitor:
    monitor = sentinel.attach(model, list(optimizers) or None, {"kinds": ["wgrad", "dgrad"], "black_box": False})
    assert isinstance(monitor, Monitor)
    return monitor


def test_forwards_of_a_pause_are_nobodys_steps(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = attached(model, optimizer)
    for is_trial in (True, False, True, False):
        if is_trial:
            monitor.port.pause()
        loss_of(model, 0).backward()
        if not is_trial:
            optimizer.step()
        optimizer.zero_grad()
        monitor.port.resume()
    monitor.detach()

    assert [(end.step, end.num_micro_steps) for end in Said(run).ends] == [(0, 1), (1, 1)]


def test_a_step_ends_where_the_adapter_says_so_and_is_logged_about_until_the_next_begins(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = attached(model, optimizer)
    monitor.port.steps.is_explicit = True
    for round_ in range(4):
        loss_of(model, round_).backward()
        optimizer.step()
        optimizer.zero_grad()
        if round_ % 2:
            monitor.port.steps.finish(is_skipped=round_ == 3)
            monitor.log(loss=float(round_))
    monitor.detach()
    said = Said(run)

    assert [(end.step, end.num_micro_steps, end.is_skipped) for end in said.ends] == [(0, 2, False), (1, 2, True)]
    assert monitor.port.ended_steps == 2


def test_a_multiplied_loss_leaves_no_trace_in_the_rows(run: Path) -> None:
    model = TinyModel()
    monitor = attached(model, torch.optim.SGD(model.parameters(), 0.1))
    for factor in (1.0, 1024.0):
        monitor.port.tensors.losses_multiplied(factor)
        (loss_of(model, 0) * factor).backward()
        monitor.gradients_ready()
        model.zero_grad()
        monitor.step()
    monitor.detach()
    said = Said(run)

    first, second = (said.of(step, "wgrad", "head.weight")[0] for step in range(2))
    assert (first["min"], first["max"]) == (second["min"], second["max"])
    assert first["max"] > 0


def test_what_is_undone_at_the_end_is_undone_once_and_a_failure_there_stops_nothing(run: Path) -> None:
    monitor, undone = attached(TinyModel()), []
    monitor.port.at_end(lambda: 1 / 0)
    monitor.port.at_end(lambda: undone.append(monitor.is_alive))

    monitor.detach()
    monitor.detach()

    assert undone == [False]
    assert [one.code for one in Said(run).health] == ["hook_failed"]
