"""Histograms of whatever kind asks for them: the same bins everywhere, so that they add up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.probes import histogram, piecewise_rows, update
from sentinel.collect.probes.histogram import EDGES, NUM_BINS, counted
from sentinel.messages import Vector

from ...support.nets import TinyModel, loss_of, weights_of
from ...support.spools import Said, values_of
from ...support.training import train_steps
from .test_wgrad_unreduced import WithDropout


class Received:
    """(step, kind, name, micro_step) -> vectors of a run."""

    def __init__(self, run: Path) -> None:
        self.vectors: dict[tuple[int, str, str], list[Vector]] = {}
        for step, tensor, vector in Said(run).items:
            self.vectors.setdefault((step, tensor.kind, tensor.name), []).append(vector)

    def of(self, step: int, kind: str, name: str) -> list[np.ndarray]:
        return [values_of(one) for one in self.vectors.get((step, kind, name), []) if one.statistic == "histogram"]


def truth_of(tensor: torch.Tensor) -> np.ndarray:
    """One element after the other, by the words of the documentation."""
    found = np.zeros(NUM_BINS, np.int64)
    for x in tensor.double().flatten().tolist():
        if np.isfinite(x):
            at = np.searchsorted(EDGES, abs(x), side="right") - 1
            at = max(at, NUM_BINS // 2)  # Nothing is nearer to zero than the middle bin.
            found[at if x > 0 or at == NUM_BINS // 2 else NUM_BINS - 1 - at] += 1
    return found


def awkward() -> torch.Tensor:
    powers = 2.0 ** torch.arange(-70.0, 20.0)
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, 3e38, -3e38, 1e-45, 1.9999999])
    return torch.cat([powers, -powers, powers * 0.999999, torch.randn(100), special])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_counts_are_those_of_each_element(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = awkward().nan_to_num(0, 7, -7).clamp(-9, 9).to(dtype) if dtype is torch.int32 else awkward().to(dtype)

    found = counted(tensor)

    assert found.tolist() == truth_of(tensor).tolist()
    assert int(found.sum()) == int(tensor.isfinite().sum())


def test_edges_are_as_documented() -> None:
    assert len(EDGES) == NUM_BINS + 1 == 164
    assert list(EDGES) == sorted(set(EDGES))
    assert EDGES[0] == -(2.0**128)
    assert EDGES[NUM_BINS // 2 : NUM_BINS // 2 + 2] == (-(2.0**-64), 2.0**-64)
    assert EDGES[-2:] == (2.0**16, 2.0**128)


@pytest.mark.parametrize("room", [10**7, 40])
def test_pieces_and_strides_do_not_matter(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram, "ROOM", room)
    tensor = torch.randn(10, 3, 8)

    for one in (tensor, tensor.transpose(0, 2), tensor[:, 1:], tensor[:0], tensor[0, 0, 0]):
        assert counted(one).tolist() == truth_of(one).tolist()


def test_counting_in_order_counts_alike() -> None:
    bins = torch.randint(0, NUM_BINS + 1, (1000,), dtype=torch.int32)

    assert histogram.tallied_in_order(bins).tolist() == torch.bincount(bins, minlength=NUM_BINS + 1).tolist()


def train_watched(model: nn.Module, config: dict[str, Any] | None, num_steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Train, watched unless there is no config; return the weights of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    monitor = sentinel.attach(model, optimizer, config) if config is not None else None
    seen: list[dict[str, torch.Tensor]] = []
    train_steps(model, num_steps, optimizer=optimizer, seed=1, before_clip=lambda: seen.append(weights_of(model)))
    if monitor is not None:
        monitor.detach()
    return seen


KINDS = ["param", "wgrad", "activation", "dgrad", "exp_avg", "exp_avg_sq", "update", "wgrad_unreduced"]
CONFIG: dict[str, Any] = {"kinds": [], "black_box": False, "probes": {kind: {"histogram": True} for kind in KINDS}}


def test_every_kind_that_asks_has_one_a_step_and_its_row_counts_as_many(run: Path) -> None:
    model = TinyModel()
    seen = train_watched(model, CONFIG)

    said, received = Said(run), Received(run)

    assert not said.health
    for step in range(3):
        for kind in KINDS:
            rows = {name: said.of(step, kind, name) for name in set(said.names(step, kind))}
            assert rows, kind
            for name, (row,) in rows.items():
                (counts,) = received.of(step, kind, name)
                assert counts.sum() == row["count"], (kind, name)
        for name, weights in seen[step].items():
            assert received.of(step, "param", name)[0].tolist() == truth_of(weights).tolist()
    (vector,) = received.vectors[0, "param", "head.weight"]
    assert (vector.axis, vector.edges, vector.micro_step) == ("bin", EDGES, -1)


def test_micro_steps_stay_apart_on_request(run: Path) -> None:
    train_watched(TinyModel(), {**CONFIG, "per_micro_step": True}, 1)

    received = Received(run)

    assert [one.micro_step for one in received.vectors[0, "activation", "head"]] == [0, 1]
    assert len(received.of(0, "param", "head.weight")) == 1


def test_micro_steps_are_added_up_when_there_are_many(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram, "FOLD_AT", 3)
    model = TinyModel()
    train_watched(model, CONFIG, 1)

    said, received = Said(run), Received(run)

    (counts,) = received.of(0, "activation", "head")
    assert counts.sum() == said.of(0, "activation", "head")[0]["count"] == 2 * 20 * 11


def test_an_update_in_pieces_has_one_histogram(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise_rows.side_by_side, "__defaults__", (20,))
    monkeypatch.setattr(update, "ROOM", 20)
    train_watched(TinyModel(), {**CONFIG, "per_micro_step": True}, 1)

    (counts,) = Received(run).of(0, "update", "head.weight")

    assert counts.sum() == 88


def test_only_kinds_and_steps_that_ask_pay(run: Path) -> None:
    model = TinyModel()
    probes = {"wgrad": {"histogram": True, "step_interval": 2, "targets": ["head"]}}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bare = sentinel.attach(TinyModel(), None, {"kinds": ["param"], "run": "bare"})
    monitor = sentinel.attach(model, optimizer, {"kinds": ["param"], "probes": probes})
    looking = [len(one.recorder.recording.observers) for one in (bare, monitor)]
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.disable("wgrad")
    off = len(monitor.recorder.recording.observers)
    monitor.detach()
    bare.detach()

    assert looking[1] == looking[0] + 1
    assert off == looking[0]
    assert {key[:2] for key in Received(run).vectors} == {(0, "wgrad"), (2, "wgrad")}
    assert {key[2] for key in Received(run).vectors} == {"head.weight", "head.bias"}


@pytest.mark.parametrize("build", [TinyModel, WithDropout])
def test_defect_18_training_is_bit_identical(build: Callable[[], nn.Module], run: Path) -> None:
    torch.manual_seed(0)
    bare = build()
    watched = copy.deepcopy(bare)

    expected, seen = train_watched(bare, None), train_watched(watched, CONFIG)

    assert all(torch.equal(a[name], b[name]) for a, b in zip(expected, seen, strict=True) for name in a)
    assert Received(run).vectors


def test_a_forward_that_is_tried_again_is_counted_once(run: Path) -> None:
    class Failing(TinyModel):
        fails = True

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found = super().forward(tokens)
            if self.fails:
                raise RuntimeError("out of memory")
            return found

    model = Failing()
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), CONFIG)
    with pytest.raises(RuntimeError, match="out of memory"):
        loss_of(model, 0)
    model.fails = False
    loss_of(model, 0).backward()
    monitor.detach()

    (counts,) = Received(run).of(0, "activation", "head")

    assert counts.sum() == 20 * 11


@pytest.mark.parametrize("scale", [2.0**16, 3.0])
@pytest.mark.parametrize("unscales", [True, False])
def test_the_scale_of_the_loss_is_divided_out(unscales: bool, scale: float, run: Path) -> None:
    torch.manual_seed(0)
    model = TinyModel()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    monitor = sentinel.attach(model, optimizer, CONFIG)
    scaler.scale(loss_of(model, 0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    monitor.detach()
    loss_of(alone, 0).backward()

    received = Received(run)

    for name, p in alone.named_parameters():
        assert p.grad is not None
        truth = truth_of(p.grad)
        for kind in ("wgrad_unreduced", "wgrad"):
            (counts,) = received.of(0, kind, name)
            # Elements at an edge may be rounded to its other side.
            assert np.abs(counts.cumsum() - truth.cumsum()).max() <= (0 if scale == 2.0**16 else 2), (kind, name)
    (counts,) = received.of(0, "dgrad", "head")
    assert counts[: NUM_BINS // 2 - 64 - 2].sum() == 0  # None is below -4.
    assert counts.sum() == 20 * 11
