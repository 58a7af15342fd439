"""What the black box measures goes on, bit by bit, under the same names while modules are measured too: on every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

from sentinel.ingest.merge import ClosedStep

from ..support.closed_steps import closed_steps, statistics
from .builds import LAYOUTS, fsdp2, one
from .layout import Build, Training, train_in_turn
from .net import Net

SWITCHED = 1
"""The step, of three, that measures modules too."""


class Recomputed(Net):
    """Whose blocks run again in the backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.blocks.values():
            forward = block.forward
            block.forward = partial(checkpoint, forward, use_reentrant=False)


def compiled(build: Build) -> Any:
    trainer = build()
    for block in trainer.models[0].blocks.values():
        block.compile(backend="aot_eager")
    return trainer


CHOSEN = ("ddp", "fsdp1", "fsdp2", "tp", "tp_x_fsdp2", "1f1b", "interleaved", "zbv", "ep", "tp_x_pp")
BUILDS: dict[str, tuple[Any, int]] = {
    **{name: LAYOUTS[name] for name in CHOSEN},
    "recompute": (partial(one, Recomputed), 1),
    "compiled blocks": (partial(compiled, one), 1),
    "fsdp2, compiled blocks": (partial(compiled, fsdp2), 2),
}
VARIANTS = ("fsdp1", "interleaved", "ep", "tp_x_fsdp2", "tp_x_pp", "compiled blocks", "fsdp2, compiled blocks")
"""Whose parts are there alone too, or whose like is; compiled blocks of one process also in collect/test_border_names.py."""


def borders(view: ClosedStep) -> dict[tuple[str, str], dict[str, float]]:
    """(kind, key) -> statistics of what lies at a border."""
    at_border = {one.key for one in view.tensors if one.border}
    kinds = ("activation", "activation_in", "dgrad", "dgrad_in")
    found = {(kind, key): one for kind in kinds for key, one in statistics(view, kind).items() if key in at_border}
    return {place: {name: value for name, value in one.items() if value == value} for place, one in found.items()}


def twice(view: ClosedStep) -> list[tuple[str, str, int]]:
    """(name, other name, rank) of forward tensors that have two rows in one micro-step, by their numbers.

    Not what one stage of a pipeline hands to the next: that is measured where it leaves and where it arrives.
    """
    seen: dict[tuple[Any, ...], str] = {}
    found = []
    for at, logical, rank in zip(range(len(view.rows)), view.row_logical, view.row_rank, strict=True):
        tensor, row = view.tensors[logical], view.rows[at]
        if tensor.kind in ("activation", "activation_in"):
            numbers = (row[name].item() for name in ("micro_step", "count", "mean", "m2", "m3", "min", "max"))
            what = int(rank), *numbers
            other = seen.setdefault(what, tensor.key)
            if other != tensor.key and not tensor.key.startswith("stage"):
                found.append((other, tensor.key, int(rank)))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in VARIANTS else name for name in BUILDS]
)
def test_series_of_the_black_box_go_on_while_modules_are_measured(name: str, tmp_path: Path) -> None:
    build, world = BUILDS[name]

    trainings = [Training(tmp_path / "alone", {}), Training(tmp_path / "switched", {}, modules_at=SWITCHED)]
    bare, watched = train_in_turn(trainings, build, world)

    assert [one.weights for one in watched] == [one.weights for one in bare]
    assert [one.num_collectives for one in watched] == [one.num_collectives for one in bare]
    views, others = closed_steps(tmp_path / "switched" / "run"), closed_steps(tmp_path / "alone" / "run")
    for view, alone in zip(views, others, strict=True):
        expected = borders(alone)
        assert len(expected) >= (8 if name == "tp_x_fsdp2" else 12)
        assert borders(view) == expected
        assert bool(view.present.sum() > alone.present.sum()) is (view.step == SWITCHED)
        assert not twice(view)
