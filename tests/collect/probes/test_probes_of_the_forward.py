"""What all probes of the forward owe: nobody notices them, and what nobody wants costs nothing."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sentinel
from sentinel.record import Flag

from ...support.nets import loss_of
from ...support.spools import Said
from ...support.training import train_steps
from .routers import EXPERTS, TOP, LinearGate

KINDS = ["attention", "router", "saturation", "precision", "channel"]
WIDTH = 12


class RoutedBlock(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.moe, self.act, self.drop = LinearGate(), nn.GELU(), nn.Dropout(0.1)
        self.reentrant = reentrant

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.drop(y.transpose(1, 2).flatten(2))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(x)
        return x + self.act(self.moe(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


class RoutedNet(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList([RoutedBlock(reentrant) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Under checkpoints all kinds at once; each by itself, in the long form.
@pytest.mark.parametrize(("reentrant", "kind"), [
    pytest.param(reentrant, kind, marks=() if kind == "all" or reentrant is None else pytest.mark.long)
    for reentrant in (None, False, True) for kind in [*KINDS, "all"]
])  # fmt: skip
def test_training_is_bit_identical(kind: str, reentrant: bool | None, run: Path) -> None:
    bare = RoutedNet(reentrant)
    model = copy.deepcopy(bare)
    expected, after = train_steps(bare, seed=9), torch.get_rng_state()
    monitor = sentinel.attach(model, config={"kinds": KINDS if kind == "all" else [kind]})
    losses, state = train_steps(model, seed=9), torch.get_rng_state()
    monitor.detach()

    assert losses == expected and torch.equal(state, after)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), bare.parameters(), strict=True))
    reported = Said(run)
    assert all(reported.of(step, one) for step in range(3) for one in (KINDS if kind == "all" else [kind]))
    assert not reported.health, reported.health


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_are_counted_once(reentrant: bool, run: Path) -> None:
    """Defect 27: double counts under activation checkpointing."""
    reported = []
    for number, one in enumerate((None, reentrant)):
        model = RoutedNet(one)
        monitor = sentinel.attach(model, config={"kinds": KINDS, "run": f"run{number}"})
        train_steps(model, 1, seed=9)
        monitor.detach()
        reported.append(Said(run.parent / f"run{number}"))

    for kind in ("attention", "router", "saturation", "channel"):
        counted = [{(t.name, int(row["count"]), int(row["num_folded"])) for t, row in each.rows[0] if t.kind == kind}
                   for each in reported]  # fmt: skip
        assert counted[0] and counted[0] == counted[1], kind
    row = reported[1].row(0, "router", "blocks.0.moe.gate:load")
    assert (row["count"], row["mean"]) == (EXPERTS, pytest.approx(TOP / EXPERTS))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_not_due_have_no_rows(kind: str, run: Path) -> None:
    """Defect 11: steps that are not due still pay."""
    model = RoutedNet()
    monitor = sentinel.attach(model, config={"probes": {kind: {"start_step": 1, "step_interval": 2, "collect_times": 2}}})
    train_steps(model, 7, 1, seed=9)
    monitor.detach()

    reported = Said(run)
    assert reported.steps_of(kind) == [1, 3]
    assert [step for step in sorted(reported.vectors) if reported.vectors[step]] == ([] if kind == "precision" else [1, 3])
    assert [end.due.get(kind, 0) > 0 for end in reported.ends] == [False, True, False, True, False, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_wants_has_no_hook_and_what_was_wanted_leaves_none(kind: str, run: Path) -> None:
    model = RoutedNet()

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules() if name)

    monitor = sentinel.attach(model, config={"black_box": False, "kinds": ["param"]})
    assert hooks() == 0 and not monitor.recorder.recording.observers
    monitor.enable(kind, for_steps=1)
    assert kind == "attention" or hooks() > 0 or monitor.recorder.recording.observers
    train_steps(model, 2, seed=9)
    assert hooks() == 0 and not monitor.recorder.recording.observers
    monitor.detach()

    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert Said(run).steps_of(kind) == [0]


def test_copies_and_pickles_measure_nothing(run: Path) -> None:
    model = RoutedNet()
    monitor = sentinel.attach(model, config={"kinds": KINDS, "black_box": False})
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    loss_of(twin, 0).backward()
    loss_of(loaded, 0).backward()
    monitor.step()
    train_steps(model, 1, seed=9)
    monitor.detach()

    reported = Said(run)
    assert len(reported.rows) == 1
    (step,) = reported.rows
    for kind in KINDS:
        assert {row["num_folded"] for row in reported.of(step, kind)} <= {1, 2}  # The two forwards of the model itself.
    assert reported.of(step, "attention")[0]["num_folded"] == 2


def test_a_probe_that_fails_is_said_and_training_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentinel.collect.probes import attention, channel, precision, router, saturation

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("probe on fire")

    bare = RoutedNet()
    model = copy.deepcopy(bare)
    expected = train_steps(bare, seed=9)
    for module, name in (
        (attention, "measure"), (channel, "channel_sums"), (precision, "look_closely"), (router, "decide"),
        (saturation, "num_flat"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, broken)
    monitor = sentinel.attach(model, config={"kinds": [*KINDS, "activation"]})
    losses = train_steps(model, seed=9)
    monitor.detach()

    reported = Said(run)
    assert losses == expected
    assert {one.code for one in reported.health} == {"hook_failed"}
    assert any("attention" in one.site for one in reported.health) and any("gate" in one.site for one in reported.health)
    assert reported.of(2, "activation", "blocks.0.act")


@pytest.mark.parametrize("kind", ["saturation", "channel", "precision", "attention"])
def test_staggered_tensors_take_turns(kind: str, run: Path) -> None:
    model = RoutedNet()
    monitor = sentinel.attach(model, config={"probes": {kind: {"stagger": 2}}, "black_box": False})
    train_steps(model, 4, 1, seed=9)
    monitor.detach()
    reported = Said(run)

    turns = [set(reported.names(step, kind)) for step in range(4)]
    assert turns[0] == turns[2] and turns[1] == turns[3] and not turns[0] & turns[1]
    assert all(turns)


def test_none_outputs_are_nothing(run: Path) -> None:
    """Defect 6: None outputs recorded as NaN."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.fc(x), None, {"more": None}

    model = Odd()
    monitor = sentinel.attach(model, config={"kinds": ["saturation", "precision", "channel"], "black_box": False})
    model(torch.randn(3, 4))[0].sum().backward()
    monitor.detach()

    reported = Said(run)
    assert reported.names(0, "channel") == ["fc:channel_rms", "fc:mean_over_std"]
    assert all(row["num_nan"] == 0 for _, row in reported.rows[0]) and not reported.health


def test_nothing_draws_from_the_trainings_generator(run: Path) -> None:
    """Defect 16: a spectral norm that draws from the training's random generator; no probe does."""
    model = RoutedNet()
    for p in model.modules():
        if isinstance(p, nn.Dropout):
            p.p = 0.0
    model.eval()
    monitor = sentinel.attach(model, config={"kinds": KINDS})
    state = torch.get_rng_state()
    loss_of(model, 0).backward()
    monitor.step()

    assert torch.equal(state, torch.get_rng_state())
    monitor.detach()
    assert Said(run).of(0, "attention")


def test_rows_of_a_skipped_step_say_so(run: Path) -> None:
    model = RoutedNet()
    monitor = sentinel.attach(model, config={"kinds": KINDS})
    loss_of(model, 0).backward()
    monitor.step(is_skipped=True)
    monitor.detach()

    reported = Said(run)
    for kind in KINDS:
        rows = reported.of(0, kind)
        assert rows and all(row["flags"] & Flag.SKIPPED for row in rows)
