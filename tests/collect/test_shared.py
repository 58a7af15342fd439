"""Modules and models that are not called once with one shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sentinel

from ..support.spools import ALL_KINDS, Said, norm


class Twice(nn.Module):
    """One linear that is called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.shared(x))
        return self.head(x)


def test_shared_module_has_a_row_a_call_and_one_gradient(run: Path) -> None:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[torch.Tensor] = []
    model.shared.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS, "per_micro_step": True})
    model(torch.randn(5, 4)).square().mean().backward()
    truth = float(model.shared.weight.grad.norm())
    optimizer.step()
    monitor.detach()

    said = Said(run)

    rows = said.of(0, "activation", "shared")
    assert [norm(row) for row in rows] == pytest.approx([float(one.norm()) for one in seen], rel=1e-5)
    assert [int(row["micro_step"]) for row in rows] == [0, 0, 0]
    assert len(said.of(0, "dgrad", "shared")) == 3
    (wgrad,) = said.of(0, "wgrad", "shared.weight")
    assert norm(wgrad) == pytest.approx(truth, rel=1e-5)


def test_calls_of_one_step_fold_into_one_row(run: Path) -> None:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    monitor.detach()

    (row,) = Said(run).of(0, "activation", "shared")

    assert (int(row["num_folded"]), int(row["count"])) == (3, 60)


def test_batches_of_any_shape_are_measured_whole(run: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    for size in (3, 7, 1, 12):
        model(torch.randn(size, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.detach()

    said = Said(run)

    assert [int(said.of(step, "activation", "0")[0]["count"]) for step in range(4)] == [12, 28, 4, 48]
    assert not said.health


def test_parameters_that_come_and_go_are_measured_while_they_are_trained(run: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(4):
        model[0].requires_grad_(step in (1, 2))
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    monitor.detach()

    said = Said(run)

    assert [len(said.of(step, "wgrad", "0.weight")) for step in range(4)] == [0, 1, 1, 0]
    assert [len(said.of(step, "wgrad", "1.weight")) for step in range(4)] == [1, 1, 1, 1]
    assert [end.step for end in said.ends] == [0, 1, 2, 3]
