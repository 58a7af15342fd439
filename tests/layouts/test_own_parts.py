"""What depends on which samples a rank has is kept apart on each rank, and what does not merges to one process's."""

from __future__ import annotations

from pathlib import Path

from ..support.closed_steps import closed_steps, statistics
from .builds import ddp, one
from .layout import differences, train_ranks


def test_only_shares_of_a_fixed_measure_are_merged_over_ranks(tmp_path: Path) -> None:
    config = {"kinds": ["saturation"]}
    train_ranks(tmp_path / "one", one, 1, config=config, num_steps=1)
    train_ranks(tmp_path / "two", ddp, 2, config=config, num_steps=1)
    (whole,), (view,) = closed_steps(tmp_path / "one" / "run"), closed_steps(tmp_path / "two" / "run")

    ours, truth = statistics(view, "saturation"), statistics(whole, "saturation")

    is_fixed = {key for key in truth if ":zero/" in key}
    assert len(is_fixed) > 10
    assert not differences({key: one for key, one in ours.items() if ":zero/" in key}, {key: truth[key] for key in is_fixed})
    for key in truth.keys() - is_fixed:
        assert key not in ours and {f"{key}@dp0", f"{key}@dp1"} <= ours.keys(), key
