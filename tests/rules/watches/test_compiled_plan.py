"""Vectorised detectors of a step in one C call: the engine says the same without it, over gaps, growth and restarts."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from sentinel import native
from sentinel.ingest.merge import ClosedStep
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.rules.watches.series_index import SeriesIndex, hash_of
from sentinel.rules.watches.watch import WatchPlan

KINDS = ("param", "wgrad", "activation", "dgrad")
needs_library = pytest.mark.skipif(native.judge_plan is None, reason="the C library was not built")


def wild_views(paper_run, with_nan, num_steps: int = 130) -> list[ClosedStep]:
    """A run in two layouts by turns, the second with more tensors, whose tensors come, go, jump, vanish and hold NaNs."""
    rng = np.random.default_rng(2)
    small = paper_run([(f"layers.{at}.mlp", KINDS[at % 4]) for at in range(24)])
    large = paper_run([(f"layers.{at}.mlp", KINDS[at % 4]) for at in (30, *range(1, 28))])
    views = []
    for step in range(num_steps):
        run = large if step >= 60 and step % 10 < 5 else small
        num = len(run.tensors)
        norms = np.exp(0.1 * rng.standard_normal(num))
        jumps = rng.random(num) < (0.04 if step > 40 else 0.0)
        norms[jumps] *= 10.0 ** rng.integers(-4, 5, num)[jumps]
        if step > 70:
            norms[5] *= 100.0
        if 80 <= step < 90:
            norms[9] = 0.0
        kurtosis = np.where(rng.random(num) < (0.04 if step > 40 else 0.0), 400.0, 3.0 + 0.1 * rng.random(num))
        keep = np.flatnonzero(rng.random(num) < (0.8 if step % 7 == 3 else 2.0))
        is_bad = step in (50, 51, 99)

        def change(rank: int, rows: np.ndarray, is_bad: bool = is_bad) -> None:
            if is_bad:
                with_nan(rows, 3)

        views.append(run.view(step, norms, kurtosis=kurtosis, keep=keep, change=change, scalars={"loss": 3.0}))
    return views


def judged(engine: Engine, views: list[ClosedStep]) -> list[list[str]]:
    """Return what each step says, scores to five digits."""
    said = []
    for view in views:
        found = engine.judge(view)
        texts = [(one, f"{one.score:.4e}" if one.score else "") for one in found]
        said.append(sorted(f"{a.id} {a.event} {a.severity} {a.count} {score} {a.message}" for a, score in texts))
        said[-1].extend(sorted(engine.settled))
    return said


@pytest.mark.slow
@needs_library
def test_the_engine_says_the_same_with_and_without_the_library(paper_run, with_nan):
    views = wild_views(paper_run, with_nan)
    in_c, in_numpy = Engine(load_pack()), Engine(load_pack())
    mine = judged(in_c, views)
    with patch.object(native, "judge_plan", None):
        expected = judged(in_numpy, views)

    assert mine == expected
    assert sum(map(len, mine)) > 100
    assert in_c.num_points_judged == in_numpy.num_points_judged
    assert in_c.num_rows_judged == sum(view.num_rows for view in views)
    states = [engine.snapshot() for engine in (in_c, in_numpy)]
    assert len(states[0]) == len(states[1])


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("at", [20, 63, 101])
def test_a_restart_or_a_reload_of_the_same_pack_changes_nothing(paper_run, with_nan, at):
    views = wild_views(paper_run, with_nan)
    through, before = Engine(load_pack()), Engine(load_pack())
    expected, first = judged(through, views), judged(before, views[:at])
    after = Engine(load_pack())
    after.restore(before.snapshot())
    before.reload(load_pack())

    assert first + judged(after, views[at:]) == expected
    assert first + judged(before, views[at:]) == expected
    assert after.snapshot() == through.snapshot() == before.snapshot()
    assert sum(map(len, expected[at:])) > 20


@needs_library
def test_a_missing_rank_scales_shards_and_leaves_copies(paper_run):
    run = paper_run([("layers.0.mlp", "wgrad"), ("layers.0.mlp", "activation")], num_ranks=4)
    engine = Engine(load_pack())
    for step in range(60):
        view = run.view(step, [1.0, 1.0])
        if step == 59:
            view = ClosedStep(run="paper", attempt=0, step=step, layout=view.layout, parts=view.parts[:1])
        assert engine.judge(view) == []
    # A quarter of the batch has half the norm of the whole; a copy of the gradient is whole.
    (watch,) = (one for one in engine._watches if one.rule.name == "turbulent-norm")
    assert np.exp(watch.state["location"]) == pytest.approx([1.0, 2.0], rel=1e-6)
    assert watch.num_points == 120


def test_series_are_numbered_in_order_of_first_appearance():
    index = SeriesIndex()
    keys = [np.array([hash_of(name) for name in names], np.uint64) for names in ("badcb", "xaby", "")]

    assert index.numbers(keys[0]).tolist() == [0, 1, 2, 3, 0]
    assert index.numbers(keys[1]).tolist() == [4, 1, 0, 5]
    assert index.numbers(keys[2]).tolist() == []
    other = SeriesIndex()
    other.take_bytes(index.to_bytes())
    assert other.numbers(keys[1]).tolist() == [4, 1, 0, 5] and len(other) == 6


def test_a_plan_knows_the_tensor_of_each_series():
    side_by_side = WatchPlan(np.array([3, 5, 8]), np.array([0, 1, 2]), True)
    assert side_by_side.index_of(np.array([0, 2, 3])).tolist() == [3, 8, -1]
    mixed = WatchPlan(np.array([3, 5, 8]), np.array([4, 0, 7]), False)
    assert mixed.index_of(np.array([0, 1, 4, 7, 9])).tolist() == [5, -1, 3, 8, -1]
    nothing = WatchPlan(np.zeros(0, np.int64), np.zeros(0, np.int64), True)
    assert nothing.index_of(np.array([0, 1])).tolist() == [-1, -1]
