"""Under tensor parallelism heads are disjoint: attention is that of one process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from sentinel.ingest.merge import ClosedStep

from ..support.closed_steps import closed_steps, statistics
from .builds import LAYOUTS, one
from .layout import differences, steps_of, train_ranks

KINDS = ["attention"]


@functools.cache
def alone() -> list[ClosedStep]:
    return steps_of(one, config={"kinds": KINDS})


@pytest.mark.parametrize("name", ["tp", *(pytest.param(one, marks=pytest.mark.long) for one in ("tp_x_dp", "tp_x_pp"))])
def test_attention_written_out_merges_over_heads_to_that_of_one_process(name: str, tmp_path: Path) -> None:
    build, world = LAYOUTS[name]
    train_ranks(tmp_path, build, world, config={"kinds": KINDS})

    for view, truth in zip(closed_steps(tmp_path / "run"), alone(), strict=True):
        ours, theirs = statistics(view, "attention"), statistics(truth, "attention")
        assert len(theirs) == 8
        wrong = differences(ours, theirs, rel=1e-3)
        assert not wrong, wrong[:10]
