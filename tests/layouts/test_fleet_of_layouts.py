"""Trainings on each layout, as two machines of a fleet record them: digests and faults change nothing of what is found."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sentinel.wire.frame import Frame, FrameType, scan

from ..support.fleet_faults import DigestedFleet, RecordedFleet, spool_sizes
from ..support.results import anomalies
from .builds import LAYOUTS
from .layout import EVERYTHING, Build, Trainer, train_ranks

pytestmark = pytest.mark.slow
NUM_STEPS = 5
BROKEN_AT = 3
LONG = set(LAYOUTS) - {"ep"}


def on_two_machines(build: Build) -> Trainer:
    """Build a rank that says it is on the first or the second of two machines, and whose weights break in a late step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["NODE_NAME"] = f"node{2 * rank // world}"
    trainer = build()

    def train_step(step: int) -> tuple[torch.Tensor, object]:
        if step == BROKEN_AT and rank == world - 1:
            with torch.no_grad():
                # Of a weight that is cut this rank may have nothing.
                parts = [getattr(one, "_local_tensor", one) for one in trainer.models[-1].parameters()]
                max(parts, key=torch.numel).view(-1)[0] = float("nan")
        return trained(step)

    trained: Callable[[int], tuple[torch.Tensor, object]] = trainer.train_step
    trainer.train_step = train_step
    return trainer


def sizes_by_step(run_dir: Path) -> list[dict[str, int]]:
    """Return what spools have behind each step's end, and in all: file below the spool -> bytes of it."""
    whole = spool_sizes(run_dir)
    found = [dict[str, int]() for _ in range(NUM_STEPS)]
    for name in whole:
        data, at = (run_dir / "spool" / name).read_bytes(), 0
        while isinstance(frame := scan(data, at), Frame):
            at = frame.offset_after
            if frame.header.type == FrameType.END_STEP:
                found[frame.header.step][name] = at
    return [*found, whole]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in LAYOUTS])
def test_a_fleet_of_two_machines_finds_what_one_daemon_does(name: str, tmp_path: Path) -> None:
    build, world = LAYOUTS[name]
    train_ranks(
        tmp_path / "trained", functools.partial(on_two_machines, build), world, config=EVERYTHING, num_steps=NUM_STEPS
    )
    run_dir = tmp_path / "trained" / "run"
    recorded = RecordedFleet(run_dir, sizes_by_step(run_dir))
    assert "non-finite" in {one.rule for one in anomalies(recorded.whole)}
    counts = Counter[str]()
    for seed in range(3):
        where = tmp_path / str(seed)
        where.mkdir()
        fleet = DigestedFleet(where, recorded, seed)
        fleet.run()
        counts += fleet.counts
    # Digests have the rows that are not finite: what else is asked for differs from layout to layout.
    assert counts["digested_steps"]
