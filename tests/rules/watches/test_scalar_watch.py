"""Scalars over resumes and restarts of the schedule: what begins anew is measured anew."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sentinel.judge.judge import Judge
from sentinel.logs.log_file import read_log
from sentinel.logs.views import log_views
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Pack


def drifts(path, steps, loss, lr=None):
    """Return the steps at which loss-drift begins, and the number of rows judged."""
    rates = np.full(len(loss), 1e-3) if lr is None else lr
    path.write_text("step,loss,lr\n" + "".join(f"{s},{x},{r}\n" for s, x, r in zip(steps, loss, rates, strict=True)))
    rule = msgspec.structs.replace(load_pack().rule("loss-drift"), args={"warmup": 64})
    judge, found, rows = Judge(Pack(rules=(rule,))), [], 0
    for view in log_views(read_log(path), run="own"):
        found += [a.step for a in judge.judge(None, view).anomalies if a.event == "onset"]
        rows += 1
    return found, rows


@pytest.mark.slow
def test_a_resume_and_a_restarted_rate_are_no_drift(tmp_path, rng):
    falls = 2.0 + 3.0 * np.exp(-np.arange(420) / 60.0)
    loss = np.concatenate([falls, falls[60:180]]) * np.exp(0.01 * rng.standard_normal(540))
    on, back = np.arange(540), np.concatenate([np.arange(420), np.arange(60, 180)])
    rate = np.concatenate([np.geomspace(1e-3, 1e-4, 420), np.geomspace(1e-3, 5e-4, 120)])

    control, rows = drifts(tmp_path / "control.csv", on, loss)
    resumed, rows_resumed = drifts(tmp_path / "resumed.csv", back, loss)
    restarted, rows_restarted = drifts(tmp_path / "restarted.csv", on, loss, rate)

    assert rows == rows_resumed == rows_restarted == 540
    assert len(control) == 1 and control[0] >= 420
    assert resumed == [] and restarted == []


@pytest.mark.slow
def test_of_a_slow_climb_the_level_is_told_and_not_a_point_of_it(tmp_path):
    """Where a climb was held back and is told later, the row of that step may lie below the best level."""
    reported = 0
    for seed in range(4):
        noise = np.random.default_rng(seed).standard_normal(2400)
        loss = (1.0 + np.clip(np.arange(2400) - 1400, 0, 600) / 2400) * np.exp(0.15 * noise)
        path = tmp_path / f"{seed}.csv"
        path.write_text("step,loss\n" + "".join(f"{step},{value}\n" for step, value in enumerate(loss)))
        judge = Judge(Pack(rules=(load_pack().rule("loss-drift"),)))
        for view in log_views(read_log(path), run="own"):
            for one in judge.judge(None, view).anomalies:
                if one.event != "onset":
                    continue
                reported += 1
                assert one.baseline < one.value < 1.6
                assert one.value != loss[one.step]
                assert one.message.startswith(f"the level of loss is {one.value:.4g}, ")

    assert reported >= 3
