"""Modules that are called several times in a step, at different widths, as in every U-Net; and sparse gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.monitor_config import MEASURED_LABELS
from sentinel.record import Flag

from ...support.nets import outputs
from ...support.spools import Said
from ...support.truth import assert_row_of

ALL = {"kinds": list(MEASURED_LABELS)}
UNLIKE = {"attention", "router", "comm", "residual"}
"""Kinds of which these models have no rows."""


class UNet(nn.Module):
    """Down, bottom, up; one activation function and one dropout for all widths."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 4, 2, stride=2), nn.Conv2d(12, 3, 1)
        self.act, self.drop = nn.ReLU(), nn.Dropout2d(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.act(self.down(x))
        b = self.drop(self.act(self.bottom(a)))
        return self.out(torch.cat([self.drop(a), self.act(self.up(b))], 1))


class Funnel(nn.Module):
    """Layers of three widths with one activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.wider, self.narrow, self.act = nn.Linear(3, 8), nn.Linear(8, 16), nn.Linear(16, 4), nn.ReLU()
        with torch.no_grad():
            self.wide.bias[1] = self.wider.bias[3] = -1e3  # Two units that never answer.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.narrow(self.act(self.wider(self.act(self.wide(x))))))  # type: ignore[no-any-return]


def images(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def train_on(model: nn.Module, optimizers: list[Any], batches: list[torch.Tensor], micro_steps: int = 1) -> list[float]:
    torch.manual_seed(0)
    losses = []
    for at, batch in enumerate(batches):
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if (at + 1) % micro_steps == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def test_channels_and_dead_units_of_a_module_called_at_three_widths_are_those_of_all_of_them(run: Path) -> None:
    model = Funnel()
    monitor = sentinel.attach(model, config={"kinds": ["channel", "saturation"], "black_box": False})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    batches = [torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    seen = outputs(model, ["act"], lambda: train_on(model, [optimizer], batches, micro_steps=2))
    monitor.detach()
    reported = Said(run)

    flat = [[one.flatten(0, -2).double() for one in seen["act"][at::3]] for at in range(3)]
    wide = [torch.cat(parts) for parts in flat]
    assert_row_of(reported.row(0, "channel", "act:channel_rms"), torch.cat([x.square().mean(0).sqrt() for x in wide]))
    is_dead = torch.cat([(x == 0).all(0) for x in wide])
    assert is_dead.sum() >= 2
    assert_row_of(reported.row(0, "saturation", "act:dead"), is_dead)
    (vector,) = reported.vectors[0]["act:dead", "is_dead"]
    assert vector.tolist() == is_dead.int().tolist()
    assert not reported.health


def test_every_kind_measures_a_u_net_and_training_is_the_same(run: Path) -> None:
    torch.manual_seed(3)
    bare = UNet()
    model = UNet()
    model.load_state_dict(bare.state_dict())
    batches = [images(seed) for seed in range(4)]
    expected = train_on(bare, [torch.optim.AdamW(bare.parameters())], batches)

    optimizer = torch.optim.AdamW(model.parameters())
    monitor = sentinel.attach(model, optimizer, ALL)
    losses = train_on(model, [optimizer], batches)
    monitor.detach()
    reported = Said(run)

    assert losses == expected
    assert {one.code for one in reported.health} <= {"blind_probe"}
    assert all(reported.of(2, kind) for kind in MEASURED_LABELS if kind not in UNLIKE)


class Sparse(nn.Module):
    def __init__(self, is_bag: bool = False) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(50, 8, sparse=True, mode="sum") if is_bag else nn.Embedding(50, 8, sparse=True)
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.fc(self.emb(x))))  # type: ignore[no-any-return]


def sparse_adam(model: Sparse) -> list[Any]:
    dense = [*model.fc.parameters(), *model.out.parameters()]
    return [torch.optim.SparseAdam(model.emb.parameters(), 0.1), torch.optim.AdamW(dense, 0.1)]


OPTIMIZERS = {
    "SparseAdam": sparse_adam,
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), 0.1)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)],
    "Adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), 0.1)],
}


@pytest.mark.parametrize("is_bag", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_gradients_with_every_kind_fail_nowhere_and_the_update_is_measured(
    name: str, is_bag: bool, run: Path
) -> None:
    torch.manual_seed(5)
    model = Sparse(is_bag)
    optimizers = OPTIMIZERS[name](model)
    weights = [model.emb.weight.detach().clone()]
    monitor = sentinel.attach(model, optimizers, ALL)
    for seed in range(3):
        train_on(model, optimizers, [torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(seed))])
        weights.append(model.emb.weight.detach().clone())
    monitor.detach()
    reported = Said(run)

    assert not [one for one in reported.health if one.code == "hook_failed"]
    assert {one.site.rpartition(" ")[2] for one in reported.health if one.code.startswith("unsupported")} == {"emb.weight"}
    for step in range(3):
        row = reported.row(step, "update", "emb.weight")
        assert_row_of(row, (weights[step + 1] - weights[step]).double())
        assert row["flags"] & Flag.DIFFERENCE
        assert not reported.of(step, "wgrad", "emb.weight")
        assert reported.of(step, "wgrad", "fc.weight") and reported.of(step, "update", "fc.weight")
