"""Channels: the RMS over the tokens of a step, whatever the number of micro-steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.probes.channel import MOST_RATIO, channel_sums, mean_over_std
from sentinel.collect.probes.token_blocks import blocks, by_channel

from ...support.nets import TinyModel, loss_of, outputs
from ...support.spools import Said
from ...support.training import train_steps
from ...support.truth import assert_row_of

CHANNEL = {"kinds": ["channel"], "black_box": False}


def train_sgd(model: nn.Module, num_steps: int = 2) -> list[float]:
    return train_steps(model, num_steps, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_rms_and_mean_of_each_channel_over_all_micro_steps(run: Path) -> None:
    model = TinyModel()
    monitor = sentinel.attach(model, config=CHANNEL)
    seen = outputs(model, ["blocks.0.fc1", "norm"], lambda: train_sgd(model))
    monitor.detach()
    reported = Said(run)

    for name, made in seen.items():
        for step in range(2):
            x = torch.cat([one.flatten(0, -2) for one in made[2 * step : 2 * step + 2]]).double()
            rms = x.square().mean(0).sqrt()
            assert_row_of(reported.row(step, "channel", f"{name}:channel_rms"), rms)
            assert_row_of(reported.row(step, "channel", f"{name}:mean_over_std"), x.mean(0).abs() / x.std(0, correction=0))
            (top,) = reported.vectors[step][f"{name}:channel_rms", "top_channels"]
            assert top.tolist() == rms.topk(min(8, len(rms))).indices.tolist()
            (sums,) = reported.vectors[step][f"{name}:channel_rms", "channel_sums"]
            assert np.allclose(sums, torch.stack((torch.full_like(rms, len(x)), x.sum(0), x.square().sum(0))).numpy())
    assert not reported.health
    assert reported.ends[0].due["channel"] == len(reported.names(0, "channel"))


def test_an_outlier_channel_shows_in_the_kurtosis(run: Path) -> None:
    model = TinyModel(width=64)
    with torch.no_grad():
        model.norm.weight[17] = 300.0
    monitor = sentinel.attach(model, config={**CHANNEL, "targets": ["norm"]})
    train_sgd(model, 1)
    monitor.detach()
    reported = Said(run)

    row = reported.row(0, "channel", "norm:channel_rms")
    assert row["count"] * row["m4"] / row["m2"] ** 2 > 50
    assert reported.vectors[0]["norm:channel_rms", "top_channels"][0][0] == 17
    assert set(reported.names(0, "channel")) == {"norm:channel_rms", "norm:mean_over_std"}


def test_a_forward_that_failed_is_not_in_the_sums(run: Path) -> None:
    model = TinyModel()
    monitor = sentinel.attach(model, config={**CHANNEL, "targets": ["blocks.0.fc1"]})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, 0).backward()
    fails = model.head.register_forward_pre_hook(lambda m, a: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError):
        loss_of(model, 1)
    fails.remove()
    seen = outputs(model, ["blocks.0.fc1"], lambda: (loss_of(model, 0), loss_of(model, 1)))["blocks.0.fc1"]
    optimizer.step()
    monitor.detach()

    # Three forwards ended well: one of batch 0 before, and the two that were looked at.
    x = torch.cat([seen[0], seen[0], seen[1]]).flatten(0, -2).double()
    assert_row_of(Said(run).row(0, "channel", "blocks.0.fc1:channel_rms"), x.square().mean(0).sqrt())


def test_values_that_are_not_finite_are_left_out() -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    x[3, 2], x[4, 2], x[5, 1] = torch.nan, torch.inf, -torch.inf
    count, total, square = channel_sums(x)

    assert count.tolist() == [40, 39, 38, 40, 40, 40]
    finite = x.double().nan_to_num(0.0, 0.0, 0.0)
    assert torch.allclose(total, finite.sum(0))
    assert torch.allclose(square, finite.square().sum(0))


def test_a_channel_that_does_not_vary_has_a_finite_ratio() -> None:
    x = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, -1.0]])
    count, total, square = channel_sums(x)

    ratio = mean_over_std(total / count, (square / count).sqrt())

    assert ratio.tolist() == [0.0, MOST_RATIO, 0.0]


@pytest.mark.parametrize("mean_over_spread", [0.0, 1e4])
def test_sums_keep_their_digits(mean_over_spread: float) -> None:
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) + mean_over_spread
    count, total, square = channel_sums(x.bfloat16() if mean_over_spread == 0.0 else x)
    x = x.bfloat16().double() if mean_over_spread == 0.0 else x.double()

    ratio = mean_over_std(total / count, (square / count).sqrt())

    assert torch.allclose(ratio, x.mean(0).abs() / x.std(0, correction=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 9), (70, 2), (2, 3, 4, 5)])
def test_blocks_cover_each_token_once(shape: tuple[int, ...]) -> None:
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for view in (x, x.transpose(0, -2)):
        cut = list(blocks(view, 16))

        assert all(piece.numel() <= 16 or piece.numel() == shape[-1] for piece in cut)
        assert torch.cat([piece.flatten() for piece in cut]).sort().values.tolist() == x.flatten().tolist()


def test_convolutions_have_their_channels_in_front() -> None:
    x = torch.randn(2, 3, 4, 5)

    def channels(module: nn.Module | None) -> Any:
        view = by_channel(x, module)
        return None if view is None else view.shape[-1]

    assert channels(nn.Conv2d(1, 3, 1)) == channels(nn.BatchNorm2d(3)) == channels(nn.GroupNorm(1, 3)) == 3
    assert channels(nn.Linear(1, 5)) == channels(None) == 5
    assert by_channel(torch.randn(4), nn.Linear(1, 4)) is None
    assert by_channel(torch.randn(4, 1), nn.Linear(1, 1)) is None


def test_a_row_of_the_whole_step_stands_where_its_tensor_was_first_made(run: Path) -> None:
    """It is written when the step ends; its call_id says when the first activation in it was there."""
    model = TinyModel()
    monitor = sentinel.attach(model, config={"kinds": ["channel", "activation", "dgrad", "wgrad"], "black_box": False})
    train_sgd(model)
    monitor.detach()
    reported = Said(run)

    made = [int(reported.of(1, "activation", name)[0]["call_id"]) for name in ("blocks.0.fc1", "norm")]
    summed = [int(reported.row(1, "channel", f"{name}:channel_rms")["call_id"]) for name in ("blocks.0.fc1", "norm")]
    assert made[0] < summed[0] <= made[0] + 2 < made[1] < summed[1]
    assert summed[1] < min(int(row["call_id"]) for row in reported.of(1, "dgrad", "norm"))
