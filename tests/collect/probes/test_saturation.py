"""Shares that are zero, dead and saturated, counted element by element."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.probes.saturation import flat_of, largest_of, num_flat

from ...support.nets import outputs
from ...support.spools import Said
from ...support.truth import assert_row_of


class Gated(nn.Module):
    """One layer with a unit that never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)
        self.squash = nn.Tanh()
        with torch.no_grad():
            self.fc.bias[4] = -1e3
            self.out.weight.mul_(20.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.squash(self.out(self.act(self.fc(x))))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(seed))


def test_zero_dead_and_saturated(run: Path) -> None:
    model = Gated()
    monitor = sentinel.attach(model, config={"kinds": ["saturation"], "black_box": False})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def train() -> None:
        for seed in range(2):
            model(batch(seed)).sum().backward()
        optimizer.step()

    seen = outputs(model, ["fc", "act", "squash"], train)
    monitor.detach()
    reported = Said(run)

    for name, made in seen.items():
        each = reported.of(0, "saturation", f"{name}:zero")
        assert len(each) == 1 and each[0]["num_folded"] == 2  # Micro-steps fold in a step.
        x = torch.stack(made).double()
        assert_row_of(each[0], (x == 0).double())
        assert_row_of(reported.row(0, "saturation", f"{name}:dead"), (x == 0).flatten(0, -2).all(0).double())
    assert reported.row(0, "saturation", "act:dead")["mean"] >= 0.1
    assert reported.vectors[0]["act:dead", "is_dead"][0][4] == 1
    x = torch.stack(seen["squash"]).double()
    assert_row_of(reported.row(0, "saturation", "squash:saturated"), (x.abs() >= 0.98).double())
    assert 0.1 < reported.row(0, "saturation", "squash:saturated")["mean"] < 1.0
    assert reported.ends[0].due["saturation"] == 2 * 2 * 4 + 4  # zero and saturated of both micro-steps, dead at the end
    assert not reported.health


@pytest.mark.parametrize(
    ("module", "saturated", "free"),
    [
        (nn.Sigmoid(), [0.0, 0.009, 0.991, 1.0], [0.011, 0.5, 0.989]),
        (nn.Hardsigmoid(), [0.0, 1.0], [0.5]),
        (nn.Tanh(), [-1.0, -0.981, 0.981], [-0.97, 0.0]),
        (nn.Softsign(), [-0.985, 0.999], [0.0]),
        (nn.Hardtanh(-2.0, 3.0), [-2.0, 3.0, 2.96], [0.0, 2.9]),
        (nn.ReLU6(), [6.0, 5.95], [0.0, 5.9]),
        (nn.ELU(2.0), [-2.0, -1.99], [-1.9, 5.0]),
        (nn.SELU(), [-1.758], [-1.7, 9.0]),
        (nn.GELU(), [-0.001, 0.0], [-0.1, 0.1, 7.0]),
        (nn.SiLU(), [-0.002, 0.0], [-0.2, 7.0]),
        (nn.ReLU(), [0.0], [0.001, 7.0]),
        (nn.Softmax(-1), [0.995, 1.0], [0.0, 0.5]),
    ],
)
def test_limits_are_those_of_the_function(module: nn.Module, saturated: list[float], free: list[float]) -> None:
    x = torch.tensor([saturated + free] * 2)
    flat = flat_of(module)

    assert flat is not None
    assert num_flat(x, flat, largest_of(x)) == 2 * len(saturated)
    assert num_flat(x[:, len(saturated) :], flat, largest_of(x[:, len(saturated) :])) == 0


def test_without_a_function_clamped_values_show() -> None:
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    assert flat_of(nn.Linear(2, 2)) is None

    def near_largest(x: torch.Tensor) -> int:
        return int(num_flat(x, None, largest_of(x)))

    assert near_largest(x) <= 3
    assert near_largest(x.clamp(-1.0, 1.0)) == int((x.clamp(-1.0, 1.0).abs() >= 0.99).sum()) > 2000
    assert near_largest(x.clamp(-1.0, 1.0).bfloat16()) == int((x.clamp(-1.0, 1.0).bfloat16().abs().float() >= 0.99).sum())
    assert near_largest(torch.zeros(4, 4)) == 0
    x[0, 0] = torch.inf
    assert 1 <= near_largest(x) <= 4
    x[0, 1] = torch.nan
    assert 1 <= near_largest(x) <= 4
