"""The share of the gradient that points where the momentum does, before it enters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.probes import alignment

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said
from .test_wgrad_unreduced import WithDropout

CONFIG = {"kinds": ["grad_momentum_alignment"]}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adam_l2": lambda params: torch.optim.Adam(params, 0.01, weight_decay=0.1),
}


def truth_of(model: nn.Module, optimizer: Any) -> dict[str, tuple[float, float]]:
    """Share and cosine now, just before the step; nothing before there is a momentum."""
    found = {}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p, {})
        m = state.get("exp_avg", state.get("momentum_buffer"))
        if m is not None and p.grad is not None:
            g, m = p.grad.double().flatten(), m.double().flatten()
            share = float((torch.sign(g) == torch.sign(m)).double().mean())
            found[name] = share, float(torch.nn.functional.cosine_similarity(g, m, dim=0, eps=1e-300))
    return found


def train_aligned(model: nn.Module, optimizer: Any, num_steps: int = 3, with_closure: bool = False) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    truth: list[dict[str, Any]] = []
    for step in range(num_steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((loss_of(model, 10 * step + micro_step) for micro_step in range(2)), torch.zeros(()))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            truth.append(truth_of(model, optimizer))
            return loss

        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return truth


def assert_said(said: Said, step: int, truth: dict[str, tuple[float, float]], numel: dict[str, int]) -> None:
    assert set(said.names(step, "grad_momentum_alignment")) == {n for name in truth for n in (name, name + ":cosine")}
    for name, (share, cosine) in truth.items():
        (row,) = said.of(step, "grad_momentum_alignment", name)
        (other,) = said.of(step, "grad_momentum_alignment", name + ":cosine")
        assert int(row["count"]) == numel[name]
        assert float(row["mean"]) == pytest.approx(share)
        assert float(row["m2"]) == pytest.approx(numel[name] * share * (1 - share), abs=1e-9)
        if other["count"]:
            assert float(other["mean"]) == pytest.approx(cosine, abs=1e-4)


@pytest.mark.parametrize("most", [10**7, 40])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_share_and_cosine_are_those_of_the_momentum_before_the_step(
    name: str, most: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment, "ROOM", most)
    model = TinyModel()
    optimizer = OPTIMIZERS[name](model.parameters())
    monitor = sentinel.attach(model, optimizer, CONFIG)
    truth = train_aligned(model, optimizer)
    monitor.detach()

    said, numel = Said(run), {n: p.numel() for n, p in model.named_parameters()}

    assert truth[0] == {}
    for step, expected in enumerate(truth):
        assert_said(said, step, expected, numel)
    assert said.ends[2].due["grad_momentum_alignment"] == 2 * len(numel)
    assert not said.health


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam_l2"])
def test_behind_a_closure_the_momentum_of_before_is_worked_out(name: str, run: Path) -> None:
    model = TinyModel()
    optimizer = OPTIMIZERS[name](model.parameters())
    monitor = sentinel.attach(model, optimizer, CONFIG)
    truth = train_aligned(model, optimizer, 4, with_closure=True)
    monitor.detach()

    said, numel = Said(run), {n: p.numel() for n, p in model.named_parameters()}

    for step in (1, 2, 3):
        for parameter, (share, cosine) in truth[step].items():
            (row,) = said.of(step, "grad_momentum_alignment", parameter)
            (other,) = said.of(step, "grad_momentum_alignment", parameter + ":cosine")
            # Elements whose momentum is nothing but rounding may change sides.
            assert float(row["mean"]) == pytest.approx(share, abs=0.02)
            assert int(row["count"]) == numel[parameter]
            assert float(other["mean"]) == pytest.approx(cosine, abs=1e-3)
    assert not said.health
    assert not said.of(0, "grad_momentum_alignment")


def test_nan_is_counted_and_never_summed() -> None:
    gradient = torch.tensor([1.0, -1.0, torch.nan, 0.0, torch.inf])
    momentum = torch.tensor([2.0, 1.0, 1.0, 0.0, 1.0])

    alike, nan, *_ = alignment.agreement(gradient, momentum).tolist()

    assert (alike, nan) == (3.0, 1.0)


@pytest.mark.parametrize("build", [TinyModel, WithDropout])
def test_defect_18_training_is_bit_identical(build: Callable[[], nn.Module], run: Path) -> None:
    torch.manual_seed(0)
    bare = build()
    watched = copy.deepcopy(bare)

    train_aligned(bare, OPTIMIZERS["adamw"](bare.parameters()))
    optimizer = OPTIMIZERS["adamw"](watched.parameters())
    monitor = sentinel.attach(watched, optimizer, CONFIG)
    train_aligned(watched, optimizer)
    monitor.detach()

    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), watched.parameters(), strict=True))
    assert Said(run).of(2, "grad_momentum_alignment")


def test_schedule_and_targets_are_kept(run: Path) -> None:
    model = TinyModel()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    schedule = {"step_interval": 2, "start_step": 1, "targets": ["blocks.1"]}
    monitor = sentinel.attach(model, optimizer, {"kinds": [], "probes": {"grad_momentum_alignment": schedule}})
    train_aligned(model, optimizer, 5)
    monitor.detach()

    said = Said(run)

    assert [bool(said.of(step, "grad_momentum_alignment")) for step in range(5)] == [False, True, False, True, False]
    assert all(name.startswith("blocks.1.") for name in said.names(1, "grad_momentum_alignment"))
