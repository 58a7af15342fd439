"""Scalars over resumes and restarts of the schedule: what begins anew is measured anew."""

from __future__ import annotations

import msgspec
import numpy as np

from sentinel.daemon.judge import Judge
from sentinel.ingest.log_views import log_views
from sentinel.ingest.logs import read_log
from sentinel.rules.loader import load_pack
from sentinel.rules.schema import Pack


def drifts(path, steps, loss, lr=None):
    """Return the steps at which loss-drift begins, and the number of rows judged."""
    rates = np.full(len(loss), 1e-3) if lr is None else lr
    path.write_text("step,loss,lr\n" + "".join(f"{s},{x},{r}\n" for s, x, r in zip(steps, loss, rates, strict=True)))
    rule = msgspec.structs.replace(load_pack().rule("loss-drift"), args={"warmup": 64})
    court, found, rows = Judge(Pack(rules=(rule,))), [], 0
    for view in log_views(read_log(path), run="own"):
        found += [a.step for a in court.judge(None, view).anomalies if a.event == "onset"]
        rows += 1
    return found, rows


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
