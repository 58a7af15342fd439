"""What a run's gauges count, against the rows themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sentinel.daemon.gauges import RunGauges
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.steps import StepAssembler
from sentinel.testing import Nan, SyntheticRun


def test_norms_and_bad_elements_by_stage_and_kind(tmp_path: Path) -> None:
    source = SyntheticRun(tmp_path / "run", pp=2, dp=2, layers=4, d_model=16, elements=8)
    source.plant(Nan(step=3, module="layers.2")).write(6)
    source.end()
    follower = RunFollower(source.directory)
    assembler = StepAssembler("run")
    gauges = RunGauges("run", ["a rule"])
    num_nan = 0

    assembler.take(follower.poll(final=True), 0.0)
    for view in assembler.close(0.0, follower.behind):
        assert view.decision is not None
        gauges.take_step(view, (), is_new=True)
        num_nan += int(view.rows["num_nan"].sum())

    gauges.take_norms(view)

    metrics = gauges.metrics
    assert metrics.num_steps_judged == 6
    assert metrics.num_records == 6 * source.rows_per_step
    assert num_nan > 0
    assert sum(one.num_nan_total for one in metrics.norms) == num_nan
    assert {one.pp_stage for one in metrics.norms} == {0, 1}
    wgrad = next(one for one in metrics.norms if (one.pp_stage, one.kind) == (1, "wgrad"))
    norms = view.moments.statistic("norm")
    own = [norms[one.index] for one in view.tensors if (one.pp_stage, one.kind) == (1, "wgrad") and view.present[one.index]]
    assert (wgrad.min, wgrad.max) == (min(own), max(own))
    assert wgrad.mean == pytest.approx(np.mean(own))
    assert [point[:2] for point in gauges.recent("loss")[0][1]] == [(0, step) for step in range(6)]
    assert np.isnan(gauges.recent("loss")[0][1][3][2])


def test_a_step_judged_again_shows_and_does_not_count(tmp_path: Path) -> None:
    source = SyntheticRun(tmp_path / "run", layers=1, d_model=16, elements=8)
    source.write(1)
    follower = RunFollower(source.directory)
    assembler = StepAssembler("run")
    assembler.take(follower.poll(), 0.0)
    [view] = assembler.close(0.0)
    gauges = RunGauges("run", [])

    assert view.decision is not None
    gauges.take_step(view, (), is_new=False)

    assert (gauges.metrics.judged_step, gauges.metrics.num_steps_judged) == (0, 0)
    assert "loss" in gauges.metrics.scalars
