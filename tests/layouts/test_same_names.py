"""The same thing has the same name on every layout: every row of every probe, the black box before, during and after."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.ingest.merge import ClosedStep

from ..support.closed_steps import closed_steps, statistics
from .builds import one, pipeline
from .layout import Build, differences, steps_of, train_ranks
from .net import Net

KINDS = [
    "param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in", "exp_avg", "update", "update_ratio",
    "grad_momentum_alignment", "weight_spectrum", "attention", "saturation", "channel", "precision",
]  # fmt: skip


class Positions(nn.Module):
    """Rotary embeddings' kin: a table of positions, which every stage of a pipeline has for itself."""

    def forward(self, num_tokens: int) -> torch.Tensor:
        return torch.linspace(0.5, 1.0, num_tokens).cos().unsqueeze(-1)


class WithTables(Net):
    """A model whose every stage looks up positions, and scales what it was given by them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary = Positions()
        self.out_act = nn.Tanh()  # On every stage, but only the last one calls it.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.rotary(x.shape[1])
        if self.emb is not None:
            x = self.emb(x)
        for block in self.blocks.values():
            x = block(x * table)
        return 2.0 * self.out_act(self.scale * self.head(self.norm(x))) if self.head is not None else x


@functools.cache
def alone(build: Build, kinds: tuple[str, ...]) -> list[ClosedStep]:
    return steps_of(build, config={"kinds": list(kinds)}, num_steps=2)


def rows_of(view: ClosedStep) -> set[tuple[str, str]]:
    """(name, kind) of all rows, but those of what a later stage receives: one process has no such tensor."""
    found = {(one.name, one.kind) for at, one in enumerate(view.tensors) if view.present[at]}
    closed_steps = ("activation_in", "dgrad_in")
    return {
        (name, kind) for name, kind in found
        if not (name.startswith("stage") and (kind in closed_steps or name.partition(":")[2].startswith(closed_steps)))
    }  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        # Each rank of the interleaved one has two stages, and each of them is one of this.
        pytest.param("Schedule1F1B", 1, marks=pytest.mark.long),
        ("ScheduleInterleaved1F1B", 2),
    ],
)
def test_every_row_of_every_probe_has_the_name_of_one_process(schedule: str, chunks: int, tmp_path: Path) -> None:
    whole = alone(partial(one, WithTables), tuple(KINDS))

    train_ranks(
        tmp_path, partial(pipeline, schedule, chunks=chunks, net=WithTables), 2, config={"kinds": KINDS}, num_steps=2
    )
    views = closed_steps(tmp_path / "run")

    for view, truth in zip(views, whole, strict=True):
        assert rows_of(view) == rows_of(truth)
        names = {name.partition(":")[0] for name, _ in rows_of(truth)}
        assert {"rotary", "model", "out_act"} <= names
        ours, expected = statistics(view, "activation"), statistics(truth, "activation")
        for found in (ours, expected):  # The table is looked up for each micro-batch: as many times as many elements.
            found["rotary/activation"] = {**found["rotary/activation"], "count": 0.0, "norm": 0.0}
        wrong = differences(ours, expected)
        assert not wrong, wrong[:10]
        ours, expected = statistics(view, "weight_spectrum"), statistics(truth, "weight_spectrum")
        assert ours.keys() == expected.keys()
        assert {key: one["mean"] for key, one in ours.items()} == pytest.approx(
            {key: one["mean"] for key, one in expected.items()}, rel=1e-3
        )
