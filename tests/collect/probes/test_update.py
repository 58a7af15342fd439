"""What a step really added to the weights, as rows say it."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.parallel.parameter_storage import Master, TorchStorage
from sentinel.collect.probes import piecewise_rows, update
from sentinel.record import Flag

from ...support.nets import TinyModel, loss_of, weights_of
from ...support.spools import Said, norm
from ...support.training import train_steps
from .test_wgrad_unreduced import WithDropout, assert_row_is

CONFIG: dict[str, Any] = {"kinds": ["update", "update_ratio"]}
Optimizers = Callable[[Any], torch.optim.Optimizer]

KNOWN: dict[str, Optimizers] = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_alone": lambda params: torch.optim.SGD(params, 0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, 0.1),
}
OTHERS: dict[str, Optimizers] = {
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01),
    "nadam": lambda params: torch.optim.NAdam(params, 0.01),
}


def weights_of_steps(model: nn.Module, optimizer: Any, num_steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Train, and return the weights before each step and behind the last."""
    seen: list[dict[str, torch.Tensor]] = []
    train_steps(model, num_steps, optimizer=optimizer, seed=1, before_clip=lambda: seen.append(weights_of(model)))
    return [*seen, weights_of(model)]


def assert_said_is_true(said: Said, seen: list[dict[str, torch.Tensor]], flag: int = 0, rel: float = 1e-3) -> None:
    for step, (before, after) in enumerate(itertools.pairwise(seen)):
        assert set(said.names(step, "update")) == set(before)
        for name in before:
            truth = (after[name].double() - before[name].double()).flatten()
            (row,) = said.of(step, "update", name)
            assert int(row["count"]) == truth.numel()
            assert norm(row) == pytest.approx(float(truth.norm()), rel=rel)
            assert float(row["max"]) == pytest.approx(float(truth.max()), rel=rel, abs=1e-6)
            assert float(row["mean"]) == pytest.approx(float(truth.mean()), rel=10 * rel, abs=1e-6)
            assert int(row["flags"]) & Flag.DIFFERENCE == flag
            (ratio,) = said.of(step, "update_ratio", name)
            size = float(before[name].double().norm())
            assert int(ratio["count"]) == (size > 0)
            if size:
                assert float(ratio["mean"]) == pytest.approx(float(truth.norm()) / size, rel=rel)


@pytest.mark.parametrize("name", [*KNOWN, *OTHERS])
def test_the_update_is_what_the_weights_show(name: str, run: Path) -> None:
    model = TinyModel()
    optimizer = {**KNOWN, **OTHERS}[name](model.parameters())
    monitor = sentinel.attach(model, optimizer, CONFIG)
    seen = weights_of_steps(model, optimizer)
    monitor.detach()

    said = Said(run)

    assert_said_is_true(said, seen, Flag.DIFFERENCE if name in OTHERS else 0)
    assert not said.health
    num = len(seen[0])
    assert said.ends[0].due == {"update": num, "update_ratio": 2 * num if "adamw" in name else num, "wgrad": 0}


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "rmsprop"])
def test_a_large_parameter_is_measured_in_pieces(name: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise_rows, "ROOM", 20)
    monkeypatch.setattr(update, "ROOM", 20)
    monkeypatch.setattr(piecewise_rows.side_by_side, "__defaults__", (20,))
    model = TinyModel()
    model.blocks[0].fc1.weight.data = model.blocks[0].fc1.weight.data.t().contiguous().t()
    optimizer = {**KNOWN, **OTHERS}[name](model.parameters())
    monitor = sentinel.attach(model, optimizer, CONFIG)
    seen = weights_of_steps(model, optimizer)
    monitor.detach()

    assert_said_is_true(Said(run), seen, Flag.DIFFERENCE if name in OTHERS else 0)


def test_adams_step_before_its_rate_is_a_row(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1, eps=1e-3)
    monitor = sentinel.attach(model, optimizer, {"kinds": ["update_ratio"]})
    weights_of_steps(model, optimizer, 2)
    state = optimizer.state[model.head.weight]
    truth = state["exp_avg"].double() / (1 - 0.9**2) / ((state["exp_avg_sq"].double() / (1 - 0.999**2)).sqrt() + 1e-3)
    monitor.detach()

    (row,) = Said(run).of(1, "update_ratio", "head.weight:adam")

    assert_row_is(row, truth)
    assert not Said(run).of(1, "update")


def test_defect_of_bf16_the_update_does_not_round_to_zero(run: Path) -> None:
    torch.manual_seed(0)
    model = TinyModel().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    seen = weights_of_steps(model, optimizer, 2)
    monitor.detach()

    (row,) = Said(run).of(1, "update", "head.weight")

    shown = seen[2]["head.weight"].float() - seen[1]["head.weight"].float()
    assert float((shown == 0).float().mean()) > 0.5  # The positive control: the weights show less than half of it.
    assert int(row["num_zero"]) == 0
    assert norm(row) == pytest.approx(1e-4 * shown.numel() ** 0.5, rel=0.3)


def lost_slowly(intended: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> float:
    """Element by element: something was to be added, and nothing was."""
    flat = zip(intended.flatten().tolist(), before.flatten().tolist(), after.flatten().tolist(), strict=True)
    found = [u != 0.0 and a == b for u, b, a in flat]
    return sum(found) / len(found)


@pytest.mark.parametrize("room", [1 << 22, 64])
@pytest.mark.parametrize("name", ["adamw", "sgd_alone", "rmsprop"])
def test_what_rounding_lost_of_an_update_is_a_row_beside_it(
    name: str, room: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "ROOM", room)
    monkeypatch.setattr(piecewise_rows, "ROOM", room)
    monkeypatch.setattr(piecewise_rows.side_by_side, "__defaults__", (room,))
    model = TinyModel().to(torch.bfloat16)
    build = {**KNOWN, **OTHERS, "adamw": lambda params: torch.optim.AdamW(params, 1e-3, weight_decay=0.1)}[name]
    optimizer = build(model.parameters())
    monitor = sentinel.attach(model, optimizer, {**CONFIG, "black_box": False})
    intended: list[dict[str, torch.Tensor]] = []
    if name == "sgd_alone":
        optimizer.register_step_pre_hook(
            lambda *_: intended.append(
                {key: -0.1 * p.grad.float() for key, p in model.named_parameters() if p.grad is not None}
            )
        )
    seen = weights_of_steps(model, optimizer)
    monitor.detach()

    said = Said(run)

    for step, (before, after) in enumerate(itertools.pairwise(seen)):
        losses = {one.removesuffix(update.LOST) for one in said.names(step, "update") if one.endswith(update.LOST)}
        assert losses == (set(before) if name in KNOWN else set()), "where no formula says what was intended there is none"
        for key in losses:
            (row,) = said.of(step, "update", key + update.LOST)
            assert int(row["count"]) == before[key].numel() and 0.0 <= float(row["mean"]) <= 1.0
            still = float((before[key] == after[key]).double().mean())
            if name == "sgd_alone":
                assert float(row["mean"]) == pytest.approx(lost_slowly(intended[step][key], before[key], after[key]))
            else:  # Decay and momentum leave no element without something to add, but where all of it is zero.
                assert float(row["mean"]) <= still
    if name == "adamw":
        rows = [said.of(step, "update", f"blocks.0.fc1.weight{update.LOST}")[0] for step in range(3)]
        stills = [float((b["blocks.0.fc1.weight"] == a["blocks.0.fc1.weight"]).double().mean()) for b, a in
                  itertools.pairwise(seen)]  # fmt: skip
        assert [float(row["mean"]) for row in rows] == pytest.approx(stills) and min(stills) > 0.02


def test_weights_in_fp32_and_steps_that_add_nothing_lose_nothing(run: Path) -> None:
    model = TinyModel()
    monitor = sentinel.attach(model, optimizer := torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    weights_of_steps(model, optimizer)
    monitor.detach()
    half = TinyModel().to(torch.bfloat16)
    still = torch.optim.SGD(half.parameters(), 0.0)
    again = sentinel.attach(half, still, {**CONFIG, "run": "again", "directory": str(run.parent)})
    weights_of_steps(half, still)
    again.detach()

    assert not any(name.endswith(update.LOST) for name in Said(run).names(1, "update"))
    found = Said(run.parent / "again")
    names = [name for name in found.names(1, "update") if name.endswith(update.LOST)]
    assert names and all(float(found.of(1, "update", name)[0]["mean"]) == 0.0 for name in names)


class MasterHolding(TorchStorage):
    """Of a trainer whose optimizer steps fp32 copies of weights in bf16."""

    def __init__(self, masters: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._masters = masters

    def master(self, param: torch.Tensor) -> Master | None:
        return Master(self._masters[id(param)])


def test_where_the_optimizer_steps_fp32_masters_the_update_is_theirs_and_nothing_counts_as_lost(run: Path) -> None:
    model = TinyModel().to(torch.bfloat16)
    masters = {id(p): torch.nn.Parameter(p.detach().float()) for p in model.parameters()}
    optimizer = torch.optim.AdamW(masters.values(), 1e-5)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    monitor.port.tensors.storage = MasterHolding(masters)

    def hand_over(*_: object) -> None:
        for p in model.parameters():
            masters[id(p)].grad = None if p.grad is None else p.grad.float()

    optimizer.register_step_pre_hook(hand_over)
    copies, kept = [], []
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        kept.append(masters[id(model.head.weight)].detach().clone())
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(masters[id(p)])
        copies.append(model.head.weight.detach().clone())
        model.zero_grad()
    monitor.detach()
    said = Said(run)
    (row,) = said.of(1, "update", "head.weight")

    assert float((copies[1] == copies[0]).float().mean()) > 0.5, "most of the copy shows nothing of the step"
    assert norm(row) == pytest.approx(float((kept[1] - kept[0]).norm()), rel=1e-3)
    assert int(row["num_zero"]) == 0
    assert not any(name.endswith(update.LOST) for step in range(2) for name in said.names(step, "update"))


def test_defect_9_what_receives_no_gradient_has_no_update(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    weights_of_steps(model, optimizer, 1)
    model.head.bias.requires_grad_(False)
    weights_of_steps(model, optimizer, 1)
    monitor.detach()

    said = Said(run)

    assert said.of(0, "update", "head.bias")
    assert not said.of(1, "update", "head.bias")
    assert said.of(1, "update", "head.weight")


def test_defect_8_a_step_that_is_skipped_has_no_update(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.detach()

    said = Said(run)

    assert [bool(said.of(step, "update")) for step in range(3)] == [True, False, True]
    assert [end.is_skipped for end in said.ends] == [False, True, False]


@pytest.mark.parametrize("build", ["adamw_fused", "sgd_fused"])
def test_an_optimizer_that_skips_by_itself_adds_nothing(build: str, run: Path) -> None:
    model = TinyModel()
    made: dict[str, Any] = {
        "adamw_fused": lambda: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
        "sgd_fused": lambda: torch.optim.SGD(model.parameters(), 0.1, fused=True),
    }
    optimizer = made[build]()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    seen = [weights_of(model)]
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(weights_of(model))
    monitor.detach()

    said = Said(run)

    assert all(torch.equal(seen[1][name], seen[2][name]) for name in seen[1])
    assert_said_is_true(said, seen)
    assert all(norm(row) == 0 and row["num_nan"] == 0 for row in said.of(1, "update"))


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "adafactor"])
def test_optimizers_that_step_with_a_closure(name: str, run: Path) -> None:
    model = TinyModel()
    optimizer = {**KNOWN, **OTHERS}[name](model.parameters())
    monitor = sentinel.attach(model, optimizer, CONFIG)
    seen = [weights_of(model)]
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)
        seen.append(weights_of(model))
    monitor.detach()

    said = Said(run)

    # Without a formula the weights are kept behind the first evaluation.
    assert not said.health
    for step in (0, 1, 2):
        for parameter in seen[0]:
            truth = seen[step + 1][parameter].double() - seen[step][parameter].double()
            assert norm(said.of(step, "update", parameter)[0]) == pytest.approx(float(truth.norm()), rel=1e-3)


def test_two_optimizers_and_one_that_steps_twice(run: Path) -> None:
    model = TinyModel()
    first = torch.optim.AdamW(model.blocks.parameters(), 0.01)
    second = torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("blocks")], 0.1)
    monitor = sentinel.attach(model, [first, second], CONFIG)
    for step in range(2):
        loss_of(model, step).backward()
        first.step()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        monitor.step()
    monitor.detach()

    said = Said(run)

    assert len(said.of(1, "update")) == len(list(model.parameters()))
    assert not said.health


@pytest.mark.parametrize("build", [TinyModel, WithDropout, lambda: TinyModel().to(torch.bfloat16)])
@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_defect_18_training_is_bit_identical(build: Callable[[], nn.Module], name: str, run: Path) -> None:
    torch.manual_seed(0)
    bare = build()
    watched = copy.deepcopy(bare)
    optimizers = {**KNOWN, **OTHERS}

    expected = weights_of_steps(bare, optimizers[name](bare.parameters()))
    optimizer = optimizers[name](watched.parameters())
    monitor = sentinel.attach(watched, optimizer, CONFIG)
    seen = weights_of_steps(watched, optimizer)
    monitor.detach()

    assert all(torch.equal(a[n], b[n]) for a, b in zip(expected, seen, strict=True) for n in a)
    assert Said(run).of(2, "update")


def test_the_schedule_and_targets_are_kept_and_nothing_is_held_when_off(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01)
    config = {"kinds": [], "probes": {"update": {"step_interval": 2, "targets": ["blocks.0", "head.bias"]}}}
    monitor = sentinel.attach(model, optimizer, config)
    weights_of_steps(model, optimizer, 4)
    probe = next(one for one in monitor.session.installation.probes if isinstance(one, update.Update))
    held = len(probe._scratch)
    monitor.disable("update")
    monitor.detach()

    said = Said(run)

    assert [bool(said.of(step, "update")) for step in range(4)] == [True, False, True, False]
    names = {n for n, _ in model.named_parameters() if n.startswith("blocks.0.") or n == "head.bias"}
    assert set(said.names(0, "update")) == names
    assert not said.of(0, "update_ratio")
    assert held == 1
    assert not probe._scratch
    assert not probe._before


def test_an_update_of_several_evaluations_is_the_difference_of_the_weights_from_the_first_step_on(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
            monitor.step()
    monitor.detach()

    said = Said(run)

    assert not said.health
    for end in said.ends:
        (row,) = said.of(end.step, "update", "head.weight")
        assert row["flags"] & Flag.DIFFERENCE


def test_an_optimizer_of_foreign_tensors_is_told_once(run: Path) -> None:
    model = TinyModel()
    foreign = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([foreign], 0.1)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    for step in range(2):
        loss_of(model, step).backward()
        foreign.grad = torch.ones(10)
        optimizer.step()
    monitor.detach()

    said = Said(run)

    assert {(h.code, h.site) for h in said.health} == {("unsupported", "update of SGD")}
    assert not said.of(0, "update")
