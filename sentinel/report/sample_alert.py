"""A made-up alert that looks like a real one and says that it is a test: for `sentinel notify test` and for templates."""

from __future__ import annotations

import msgspec

from sentinel.anomaly import Severity
from sentinel.incident import Incident, IncidentAct
from sentinel.rank_identity import RankIdentity
from sentinel.report.alert import Alert
from sentinel.report.alert_context import AlertContext

RUN, INCIDENT = "notify-test", "i7e5700000000"
"""Of every test message, so that its end is that of the one before."""
_AGO_S = 95.0
"""Seconds since it opened: about what a judgement and a sink take, and a minute."""


def sample_alert(sink: str, now: float, *, is_over: bool = False) -> Alert:
    """Return an alert that says it is a test. is_over: the end of the one before. now: seconds since the epoch."""
    incident = Incident(
        id=INCIDENT, revision=1, run=RUN, attempt=0, state="open", opened_step=1200, last_step=1203,
        severity=Severity.CRITICAL, title="TEST, nothing is wrong: NaN in layers.7.mlp.down_proj of rank 3 at step 1200",
        root="a7e57", root_name="layers.7.mlp.down_proj activation rank 3 micro-step 1", num_members=14,
        detectors=("AnomalyNan", "LossSpike"), ranks=(3,), suspected="hardware", segment="layers.7",
        module="layers.7.mlp.down_proj", time=now, nature="nonfinite", active_step=1203,
        evidence=(
            "suspected hardware: this is a test: rank 3 alone has it, and its replicas are finite",
            "suspected hardware: to do: nothing, this is a test of Sentinel's notifications",
            "first bad: layers.7.mlp.down_proj, the loss 2 steps later",
        ),
    )  # fmt: skip
    if is_over:
        act = IncidentAct(incident=INCIDENT, act="resolve", who="sentinel notify test", why="the test is over", time=now)
        incident = msgspec.structs.replace(incident, revision=2, state="closed", acts=(act,))
    return Alert(
        key=f"{sink}:{RUN}:{INCIDENT}:{incident.revision}:{now:.3f}",
        sink=sink,
        change="closed" if is_over else "opened",
        incident=incident,
        was_severity=Severity.CRITICAL if is_over else None,
        created=now,
        context=AlertContext(
            opened=now - _AGO_S,
            ranks=(RankIdentity(rank=3, host="node17", gpu="3", gpu_uuid="GPU-7e570000-0000-0000-0000-000000000000"),),
            num_ranks=1,
            job="8812",
            labels={"team": "example"},
        ),
    )
