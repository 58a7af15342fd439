"""Aliases of one tensor, and steps that a trainer says are over: what adapters lean on."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

import sentinel
from sentinel.collect.hooks.aliases import Aliases
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said


class HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


ENTRY = TensorEntry(0, "layer", Kind.ACTIVATION, 0)


def test_a_tensor_handed_on_is_found_also_when_the_first_object_is_gone() -> None:
    aliases = Aliases(frozenset({"HandOnBackward"}))
    tensor = torch.ones(3, requires_grad=True) * 2
    aliases.remember(tensor, ENTRY)
    handed = HandOn.apply(tensor)
    del tensor
    gc.collect()

    assert aliases.find(handed) is ENTRY
    assert aliases.find(handed * 1.0) is None
    aliases.forget()
    assert aliases.find(handed) is None


def test_an_alias_with_another_gradient_shape_or_content_is_another_tensor() -> None:
    aliases = Aliases(frozenset({"HandOnBackward"}))
    tensor = torch.ones(4, requires_grad=True) * 2
    aliases.remember(tensor, ENTRY)

    assert aliases.find(tensor.detach()) is None
    assert aliases.find(tensor.view(2, 2)) is None
    assert aliases.find(tensor.view_as(tensor)) is None  # Its gradient may be a part only.
    handed = HandOn.apply(tensor)
    assert aliases.find(handed) is ENTRY
    with torch.no_grad():
        tensor.mul_(2)
    assert aliases.find(HandOn.apply(tensor)) is None


def test_memory_that_was_given_back_is_not_taken_for_the_tensor() -> None:
    aliases = Aliases(frozenset())
    for _ in range(20):
        tensor = torch.ones(1000)
        assert aliases.find(tensor) is None
        aliases.remember(tensor, ENTRY)
        del tensor


def test_a_step_that_the_trainer_finished_takes_what_is_logged_until_the_next(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, first_step=5)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        monitor.port.steps.finish(is_skipped=step == 1)
        optimizer.zero_grad()
        monitor.log(after=step)
        assert monitor.state_dict()["step"] == 6 + step
    monitor.detach()

    ends = Said(run).ends
    assert [(end.step, end.is_skipped) for end in ends] == [(5, False), (6, True), (7, False)]
    assert not any(end.is_partial for end in ends)
    assert [end.scalars["after"] for end in ends] == [0, 1, 2]


def test_a_tensor_handed_on_leads_back_to_where_its_whole_gradient_arrives() -> None:
    aliases = Aliases(frozenset({"HandOnBackward"}))
    leaf = torch.ones(3, requires_grad=True)
    made = leaf * 2
    handed = HandOn.apply(HandOn.apply(made))

    origin = aliases.origin(handed)

    assert isinstance(origin, tuple) and origin == (made.grad_fn, made.output_nr)
    assert aliases.origin(HandOn.apply(leaf)) is leaf
    assert aliases.origin(made) is None and aliases.origin(leaf) is None
