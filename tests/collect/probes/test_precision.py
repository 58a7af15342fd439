"""What fp16, bf16 and fp8 would lose, against casting element by element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import sentinel
from sentinel.collect.probes.precision import LARGEST, QUANTITIES, SMALLEST, _look, look_closely
from sentinel.collect.probes.prepared_rows import moments_words
from sentinel.record import STATS_DTYPE

from ...support.nets import TinyModel
from ...support.spools import Said
from ...support.truth import assert_row_of
from .test_channel import train_sgd

DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip


def truth(x: torch.Tensor, quantity: str) -> np.ndarray:
    """1 where the format loses an element, 0 where not, by casting; the range by sorting."""
    x = x.detach().double().flatten()
    x = x[x.isfinite()]
    if quantity == "dynamic_range":
        size = x.abs()[x != 0]
        return np.log2(np.array([float(size.max() / size.min())])) if len(size) else np.empty(0)
    name, _, what = quantity.rpartition("_")
    if what == "overflow":
        lost = x.abs() > torch.finfo(DTYPES[name]).max
    else:
        lost = (x.float().to(DTYPES[name]).double() == 0) & (x != 0)
    return lost.double().numpy()


def spread(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, generator=generator) * torch.exp2(torch.empty(3000).uniform_(-40.0, 20.0, generator=generator))
    edges = [one for value in (*LARGEST.values(), *(s / 2 for s in SMALLEST.values())) for one in (value, -value * 1.01)]
    return torch.cat([x, torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, *edges])]).to(dtype)


def rows_of(x: torch.Tensor) -> np.ndarray:
    """[9] STATS_DTYPE: of all QUANTITIES."""
    shares, span, is_there = look_closely(x)
    return torch.cat((shares, moments_words(span, is_there))).numpy().view(STATS_DTYPE).reshape(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_shares_are_those_of_casting(dtype: torch.dtype) -> None:
    x = spread(dtype)

    rows = rows_of(x)

    for row, quantity in zip(rows, QUANTITIES, strict=True):
        assert_row_of(row, truth(x, quantity))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_for_accelerators_counts_alike(dtype: torch.dtype) -> None:
    x = spread(dtype)
    lost, num = torch.zeros(8, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    low, high = torch.full((), torch.inf, dtype=torch.float64), torch.zeros((), dtype=torch.float64)

    num += _look(x.float().abs(), lost, low, high)

    assert lost.tolist() == [int(truth(x, one).sum()) for one in QUANTITIES[:8]]
    assert num == int(x.isfinite().sum())
    assert float(torch.log2(high) - torch.log2(low)) == pytest.approx(truth(x, "dynamic_range")[0])


def test_zeros_are_not_lost_and_have_no_range() -> None:
    rows = rows_of(torch.zeros(5, 3))

    assert [row["mean"] for row in rows[:8]] == [0.0] * 8
    assert [row["count"] for row in rows] == [15] * 8 + [0]


def test_strided_tensors_are_read_once_and_left_alone() -> None:
    x = torch.randn(64, 48) * 1e-4
    for view in (x.t(), x[::2, 1::3], x.expand(3, 64, 48)):
        before = view.clone()
        rows = rows_of(view)

        assert torch.equal(view, before)
        for row, quantity in zip(rows, QUANTITIES, strict=True):
            assert_row_of(row, truth(view, quantity))


def test_every_measured_tensor_is_looked_at(run: Path) -> None:
    model = TinyModel()
    with torch.no_grad():
        model.blocks[0].fc1.weight.mul_(1e-4)
        model.head.bias.fill_(1e3)
    weight, bias = model.blocks[0].fc1.weight.detach().clone(), model.head.bias.detach().clone()
    monitor = sentinel.attach(model, config={"kinds": ["param", "wgrad", "precision"], "black_box": False})
    train_sgd(model, 1)
    monitor.detach()
    reported = Said(run)

    for quantity in QUANTITIES:
        assert_row_of(reported.row(0, "precision", f"blocks.0.fc1.weight:param.{quantity}"), truth(weight, quantity))
        assert_row_of(reported.row(0, "precision", f"head.bias:param.{quantity}"), truth(bias, quantity))
    assert reported.row(0, "precision", "head.bias:param.fp8_e4m3_overflow")["mean"] == 1.0
    kinds = {name.rpartition(":")[2].partition(".")[0] for name in reported.names(0, "precision")}
    assert kinds == {"param", "wgrad", "activation", "dgrad"}
    assert reported.ends[0].due["precision"] == sum(row["num_folded"] for row in reported.of(0, "precision"))
    assert not reported.health


def test_a_target_picks_one_quantity(run: Path) -> None:
    model = TinyModel()
    targets = ["blocks.0.fc1.weight:param.fp16_underflow", "head.weight"]
    monitor = sentinel.attach(model, config={"probes": {"precision": {"targets": targets, "step_interval": 2}}})
    train_sgd(model, 3)
    monitor.detach()
    reported = Said(run)

    names = set(reported.names(0, "precision"))
    assert {name for name in names if name.startswith("blocks")} == {"blocks.0.fc1.weight:param.fp16_underflow"}
    assert {name for name in names if name.startswith("head")} == {
        f"head.weight:{kind}.{one}" for kind in ("param", "wgrad") for one in QUANTITIES
    }
    assert reported.steps_of("precision") == [0, 2]
