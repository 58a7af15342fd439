"""The same few training steps, compiled in every way that trainers compile, beside the uncompiled ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import sentinel

from ..support.nets import TinyModel, tokens
from ..support.spools import ALL_KINDS, Said

Compile = Callable[[nn.Module], Callable[..., Any]]
Loss = Callable[[Callable[..., Any], int], torch.Tensor]

FULL: dict[str, Any] = {"kinds": ALL_KINDS, "per_micro_step": True}
BLACK_BOX: dict[str, Any] = {"per_micro_step": True}


class Order(Enum):
    """In which order the micro-batches of a step go forward and backward."""

    ALTERNATING = "F B F B F B"
    FORWARDS_FIRST = "F F F B B B"


EACH_AFTER_EACH = (Order.ALTERNATING, Order.FORWARDS_FIRST, Order.FORWARDS_FIRST, Order.ALTERNATING)
"""Four steps, compiled once: each order follows itself and the other."""


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def whole(backend: str, **settings: Any) -> Compile:
    return lambda model: torch.compile(model, backend=backend, **{"fullgraph": True, **settings})


def in_place(backend: str, **settings: Any) -> Compile:
    def compile_it(model: nn.Module) -> nn.Module:
        model.compile(backend=backend, **{"fullgraph": True, **settings})
        return model

    return compile_it


def each_block(backend: str, **settings: Any) -> Compile:
    """As torchtitan does: one graph for all blocks, the rest eager."""

    def compile_them(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.compile(backend=backend, **{"fullgraph": True, **settings})
        return model

    return compile_them


def each_block_wrapped(backend: str, **settings: Any) -> Compile:
    """As torchtune does: an OptimizedModule in the place of each block."""

    def compile_them(model: nn.Module) -> nn.Module:
        for at, block in enumerate(model.blocks):
            model.blocks[at] = torch.compile(block, backend=backend, **{"fullgraph": True, **settings})
        return model

    return compile_them


def function(backend: str, **settings: Any) -> Compile:
    """The forward of the whole chunk is inside the graph, hooks of the chunk itself too."""
    return lambda model: torch.compile(lambda batch: model(batch), backend=backend, **{"fullgraph": True, **settings})


STYLES: dict[str, Callable[..., Compile]] = {
    "whole": whole, "in place": in_place, "blocks": each_block, "blocks wrapped": each_block_wrapped, "function": function,
}  # fmt: skip


def logits_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output["logits"]


def cross_entropy(call: Callable[..., Any], seed: int) -> torch.Tensor:
    batch = tokens(seed)
    return nn.functional.cross_entropy(logits_of(call(batch)).flatten(0, 1), batch.flatten())


class Run(NamedTuple):
    losses: list[float]
    weights: list[torch.Tensor]
    said: Said | None
    graphs: list[int]
    """Graphs compiled so far, after each step."""

    def is_same(self, other: Run) -> bool:
        """Whether losses and weights are the same bit by bit."""
        pairs = zip(self.weights, other.weights, strict=True)
        return self.losses == other.losses and all(torch.equal(one, two) for one, two in pairs)


def train_compiled(
    folder: Path | None,
    compile_it: Compile = as_it_is,
    config: dict[str, Any] = FULL,
    *,
    make: Callable[[], nn.Module] = TinyModel,
    loss: Loss = cross_entropy,
    steps: int = 2,
    orders: Sequence[Order] = (Order.ALTERNATING,),
    before_step: Callable[[Any, int, nn.Module], None] | None = None,
    attach_last: bool = False,
) -> Run:
    """Train on three micro-batches a step.

    orders: of steps 0, 1 and so on; the last one holds for all later steps too. folder: None: not attached.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    settings = {"directory": str(folder), "run": "run", **config}
    call: Any = model
    if attach_last:
        call = compile_it(model)
    attached = call if isinstance(call, nn.Module) else model
    monitor: Any = None if folder is None else sentinel.attach(attached, optimizer, config=settings)
    if not attach_last:
        call = compile_it(model)
    losses, graphs = [], []
    for step in range(steps):
        if before_step is not None:
            before_step(monitor, step, model)
        optimizer.zero_grad()
        waiting = []
        order = orders[min(step, len(orders) - 1)]
        for micro_step in range(3):
            waiting.append(loss(call, 10 * step + micro_step))
            if order is Order.ALTERNATING:
                waiting[-1].backward()
        if order is Order.FORWARDS_FIRST:
            for one in waiting:
                one.backward()
        optimizer.step()
        losses += [float(one.detach()) for one in waiting]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    if monitor is not None:
        monitor.detach()
    said = None if folder is None else Said(folder / "run")
    return Run(losses, [p.detach().clone() for p in model.parameters()], said, graphs)


Line = tuple[Any, ...]


def lines(said: Said) -> dict[int, list[tuple[Line, float, float]]]:
    """What every step measured, in order of calls: everything that identifies a row, its mean, and its norm."""
    found = {}
    for step, rows in said.rows.items():
        found[step] = [
            (
                (
                    tensor.kind, tensor.name, int(row["micro_step"]), int(row["call_id"]), int(row["site_pos"]),
                    int(row["count"]), int(row["flags"]), tensor.border, tensor.consumers, tensor.also, tensor.shape,
                ),
                float(row["mean"]),
                math.sqrt(row["m2"] + row["count"] * row["mean"] ** 2),
            )
            for tensor, row in sorted(rows, key=lambda pair: int(pair[1]["call_id"]))
        ]  # fmt: skip
    return found


def assert_same_rows(one: Said | None, two: Said | None) -> None:
    """Both runs measured the same tensors in the same order, up to rounding."""
    assert one is not None and two is not None
    assert not one.health and not two.health, (one.health, two.health)
    expected, found = lines(one), lines(two)
    assert expected.keys() == found.keys()
    for step in expected:
        assert [line for line, _, _ in found[step]] == [line for line, _, _ in expected[step]], step
        for (line, mean, norm), (_, other_mean, other_norm) in zip(expected[step], found[step], strict=True):
            scale = norm / math.sqrt(max(line[5], 1))
            assert abs(mean - other_mean) <= 1e-4 * scale + 1e-12, (step, line)
            assert abs(norm - other_norm) <= 1e-3 * norm + 1e-12, (step, line)
