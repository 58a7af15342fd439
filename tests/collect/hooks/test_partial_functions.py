"""Partial functions: which are found in a graph, and which guards keep them from being named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sentinel
from sentinel.collect.hooks.partial_functions import partial_functions

from ...support.spools import Said

Function = Callable[[torch.Tensor], torch.Tensor]


def hidden() -> torch.Tensor:
    return torch.tanh(torch.randn(4, 8, requires_grad=True))


@pytest.mark.parametrize(
    ("words", "function"),
    [
        (("log:up",), lambda x: x.log()),
        (("log:up",), lambda x: x.transpose(0, 1).unsqueeze(0).log()),
        (("log",), lambda x: (x + 2.0).log()),
        (("sqrt",), lambda x: (x - 0.1).sqrt()),
        (("div",), lambda x: x / x.sum(-1, keepdim=True)),
        (("div:up",), lambda x: 1.0 / x),
        (("rsqrt",), lambda x: (x * 2.0).rsqrt()),
        (("pow",), lambda x: (x + 1.0).pow(0.5)),
        (("acos",), lambda x: (2.0 * x).acos()),
        (("exp:up",), lambda x: x.exp()),
        (("softmax",), lambda x: (x * 2).masked_fill(x > 0, -math.inf).softmax(-1)),
        (("mean:up",), lambda x: x * x[x > 0].mean()),
        (("sqrt'",), lambda x: x.pow(2).sqrt()),
    ],
)
def test_partial_function_is_named(words: tuple[str, ...], function: Function) -> None:
    x = hidden()

    found = partial_functions(function(x).grad_fn, {x.grad_fn: "up"})

    assert {one for one in found if not one.startswith("div") or "div" in words[0]} >= set(words), found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.pow(2),
        lambda x: x / 2,
        lambda x: x / math.sqrt(3.0),
        lambda x: (x.pow(2) + 1e-6).log(),
        lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5),
        lambda x: x.clamp(min=1e-3).log(),
        lambda x: x / x.abs().sum(-1, keepdim=True).clamp(min=1.0),
        lambda x: x.clamp(-1.0, 1.0).acos(),
        lambda x: x.softmax(-1),
        lambda x: (x - x.amax(-1, keepdim=True)).exp(),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.gelu(x) + F.silu(x) + F.softplus(x),
        lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 8)] * 3, is_causal=True),
        lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    ],
)
def test_guarded_and_whole_functions_are_not_named(function: Function) -> None:
    x = hidden()

    assert partial_functions(function(x).grad_fn, {x.grad_fn: "up"}) == ()


def test_what_was_measured_before_is_not_read_again() -> None:
    before = hidden().log()
    middle = before * 2.0

    assert partial_functions((middle + 1.0).grad_fn, {middle.grad_fn: "middle"}) == ()


def test_a_graph_of_any_size_is_read_in_bounds() -> None:
    x = hidden()
    for _ in range(2000):
        x = x + x.sin()

    assert partial_functions(x.grad_fn, {}) == ()


def test_each_module_of_a_model_says_its_own_functions(run: Path) -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 3.0).log()

    model = nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ["activation", "activation_in"]})
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    monitor.detach()

    said = Said(run)

    assert [said.tensor("activation", name).functions for name in ("0", "1", "2")] == [(), ("log",), ()]
