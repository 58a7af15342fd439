"""Models that are no pipeline have names, layers and an order of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.errors import ConfigError
from sentinel.ingest.model_layout import ModelLayout
from sentinel.place import Place

from ...support.spools import ALL_KINDS, Said


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Critic(Generator):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(super().forward(x))


def canonical(said: Said) -> dict[str, tuple[int, int]]:
    """Canonical name -> (depth, vpp_stage) of each tensor."""
    assert said.descriptor is not None
    return {one.name: (one.depth, one.vpp_stage) for one in ModelLayout({0: said.descriptor}).tensors}


def train_gan(models: Any, optimizers: Any, num_critic: int = 1, num_steps: int = 3, **config: Any) -> None:
    first = list(models.values()) if isinstance(models, dict) else models
    both = list(optimizers.values()) if isinstance(optimizers, dict) else optimizers
    (maker, critic), (of_maker, of_critic) = first, both
    monitor = sentinel.attach(models, optimizers, {"kinds": ALL_KINDS, **config})
    for step in range(num_steps):
        for _ in range(num_critic):
            of_critic.zero_grad()
            made = maker(torch.randn(3, 4)).detach()
            (critic(made) - critic(torch.randn(3, 4))).mean().backward()
            of_critic.step()
        of_maker.zero_grad()
        (-critic(maker(torch.randn(3, 4))).mean()).backward()
        of_maker.step()
        monitor.log(loss=float(step))
    monitor.detach()


def adams(models: Iterable[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters()) for model in models]


def test_models_given_by_name_have_that_name_and_each_an_order_of_its_own(run: Path) -> None:
    models = {"G": Generator(), "D": Critic()}

    train_gan(models, dict(zip("GD", adams(models.values()), strict=True)))

    found = canonical(Said(run))
    assert {"G.layers.1.weight", "D.layers.0.bias", "D.out.weight", "G", "D", "G.layers.0", "D.out"} <= found.keys()
    assert all(name.partition(".")[0] in models for name in found)
    assert set(found.values()) == {(0, 0), (0, 1)}


def test_a_list_of_modules_that_are_no_pipeline_is_read_as_models_named_by_class_and_that_is_said(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = [Generator(), Critic()]

    with caplog.at_level(logging.INFO, "sentinel"):
        train_gan(models, adams(models))

    said = [one.getMessage() for one in caplog.records if "given to attach" in one.getMessage()]
    assert len(said) == 1
    assert "Generator and Critic" in said[0]
    assert "attach({" in said[0] and "vpp_size=2" in said[0]
    assert {"Generator.layers.0.weight", "Critic.out", "Critic.layers.1"} <= canonical(Said(run)).keys()


def test_two_models_of_one_class_are_numbered(run: Path) -> None:
    models = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 1))]

    train_gan(models, adams(models))

    assert {"Sequential_0.0.weight", "Sequential_1.0.weight"} <= canonical(Said(run)).keys()


def test_chunks_of_a_pipeline_that_is_the_users_own_are_said_by_their_place(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Generator(), Critic()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    with caplog.at_level(logging.INFO, "sentinel"):
        monitor = sentinel.attach([first, second], optimizer, place=Place(vpp_size=2))
        for _ in range(2):
            optimizer.zero_grad()
            second(first(torch.randn(3, 4))).mean().backward()
            optimizer.step()
        monitor.detach()

    found = canonical(Said(run))
    assert {"layers.0.weight", "layers.2.weight", "layers.3.weight", "out.weight"} <= found.keys()
    assert {depth for depth, _ in found.values()} == {0, 1}
    assert not [one for one in caplog.records if "given to attach" in one.getMessage()]


def test_one_model_is_named_as_ever(run: Path) -> None:
    model = Critic()
    (optimizer,) = adams([model])
    monitor = sentinel.attach(model, optimizer)
    model(torch.randn(3, 4)).mean().backward()
    optimizer.step()
    monitor.detach()

    found = canonical(Said(run))

    assert {"layers.0.weight", "out", "model"} <= found.keys() | {"out"}
    assert not any(name.startswith("Critic") for name in found)


def test_targets_may_name_the_model(run: Path) -> None:
    models = {"G": Generator(), "D": Critic()}

    train_gan(models, adams(models.values()), kinds=["activation", "param"], targets=["D.layers.*", "G"], black_box=False)

    rows = {(tensor.chunk, tensor.kind, tensor.name) for tensor, _ in Said(run).rows[0]}
    assert {name for chunk, kind, name in rows if chunk == 1 and kind == "activation"} == {"layers.0", "layers.1"}
    assert not {name for chunk, kind, name in rows if chunk == 1 and kind == "activation"} & {"out", ""}
    assert {name for chunk, kind, name in rows if chunk == 0 and kind == "activation"} >= {"layers.0", "layers.1"}


def test_teacher_student_and_a_copy_of_the_weights_are_each_a_model(run: Path) -> None:
    teacher, student = Generator().requires_grad_(False), Generator()
    ema = torch.optim.swa_utils.AveragedModel(student)
    (optimizer,) = adams([student])
    monitor = sentinel.attach({"teacher": teacher, "student": student, "ema": ema}, optimizer, {"kinds": ALL_KINDS})
    for step in range(3):
        x = torch.randn(3, 4)
        with torch.no_grad():
            aim = teacher(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(student(x), aim).backward()
        optimizer.step()
        ema.update_parameters(student)
        monitor.log(loss=float(step))
    monitor.detach()

    said = Said(run)
    found = canonical(said)

    assert {"teacher.layers.0.weight", "student.layers.0.weight", "ema.layers.0.weight"} <= found.keys()
    assert {"student.layers.0", "student"} <= found.keys()
    assert [(end.step, end.is_skipped, end.num_micro_steps) for end in said.ends] == [(step, False, 1) for step in range(3)]
    assert not said.health


@pytest.mark.parametrize("given", ["optimizers by name", "a list", "nothing"])
def test_actor_and_critic_share_a_step(run: Path, given: str) -> None:
    actor, critic = Generator(), Critic()
    of_actor, of_critic = adams([actor, critic])
    optimizers = {"actor": of_actor, "critic": of_critic}
    monitor = sentinel.attach(
        {"actor": actor, "critic": critic},
        optimizers if given == "optimizers by name" else [of_actor, of_critic] if given == "a list" else None,
    )
    for step in range(4):
        x = torch.randn(3, 4)
        of_critic.zero_grad()
        critic(x).square().mean().backward()
        of_actor.zero_grad()
        actor(x).square().mean().backward()
        of_critic.step()
        of_actor.step()
        monitor.log(at=step)
    monitor.detach()

    ends = Said(run).ends

    # An optimizer that nobody named is known from its first step on.
    assert [end.scalars["at"] for end in ends] == [0, 1, 2, 3]
    assert not any(end.is_skipped for end in ends)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, "a mapping of names"),
        ({"a.b": nn.Linear(1, 1)}, "the name of a model"),
        ({"a": 3}, "model 'a' must be"),
        ([nn.Linear(1, 1), 3], "model must be"),
    ],
)
def test_what_is_no_model_is_refused_with_its_name(model: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        sentinel.attach(model)


def test_one_module_under_two_names_is_refused() -> None:
    model = nn.Linear(1, 1)

    with pytest.raises(ConfigError, match="twice"):
        sentinel.attach({"a": model, "b": model})
