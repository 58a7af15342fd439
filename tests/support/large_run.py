"""Runs of many ranks, values, tensors and incidents, as cheaply as they can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.anomaly import Severity
from sentinel.daemon.config import DaemonConfig
from sentinel.history.config import HistoryConfig
from sentinel.report.files import anomaly_line, json_line
from sentinel.store.found import FoundAnomaly, FoundIncident
from sentinel.store.journal import Commit, Journal
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan, SyntheticRun
from sentinel.testing.values import SyntheticValues

from .anomalies import a_nan, an_incident
from .serving import judge_run

STAGES = 8
BAD = 4
"""The step in which a NaN is born in a run of many ranks."""


def write_wide_run(run_dir: Path, *, num_ranks: int, num_scalars: int, num_incidents: int, num_steps: int = 8) -> None:
    """Write a run of many ranks, in `STAGES` stages, that logs many values; judged, with a history, and many more incidents.

    A NaN is born in step `BAD`. The other incidents are over, and are of one anomaly each.
    """
    scalars = SyntheticValues.scalars
    logged = {f"expert.{at}.load": 1.0 + at for at in range(num_scalars)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SyntheticValues,
            "scalars",
            lambda self, place, step: {**scalars(self, place, step), **(logged if place.rank == 0 else {})},
        )
        source = SyntheticRun(
            run_dir, pp=STAGES, dp=num_ranks // STAGES, layers=STAGES, d_model=4, elements=2, kinds=(), micro_steps=4,
            per_micro_step=True, schedule="1f1b",
        )  # fmt: skip
        source.plant(Nan(step=BAD, module="layers.1", micro_step=1)).write(num_steps)
    judge_run(run_dir, DaemonConfig(history=HistoryConfig(enabled=True, flush_s=0.2)))
    _add_incidents(run_dir, num_incidents, num_steps)


def write_deep_run(run_dir: Path, *, num_tensors: int, num_steps: int = 10) -> None:
    """Write a run of one rank that measures many tensors."""
    layers = max(1, num_tensors // 14)  # A layer has three weights and four outputs, each with its gradient.
    SyntheticRun(run_dir, layers=layers, d_model=4, elements=2, micro_steps=1).write(num_steps)


def _add_incidents(run_dir: Path, num: int, num_steps: int) -> None:
    journal = Journal(RunPaths.of(run_dir).journal)
    commit = Commit(judged=journal.judged, num_onsets=journal.found.num_onsets() + num)
    for at in range(num):
        step = at % num_steps
        severity = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)[at % 3]
        cause = a_nan(
            name=f"layers.{at % STAGES}.mlp", step=step, run=run_dir.name, rank=at, severity=severity, rule=f"nan-{at}"
        )
        body = anomaly_line(cause)
        found = FoundAnomaly(id=cause.id, attempt=0, step=step, severity=severity.value, body=body)
        commit.anomalies.append((journal.judged, found))
        incident = an_incident(
            at, id=f"i{at:012x}", run=run_dir.name, state="resolved", opened_step=step, last_step=step, severity=severity,
            title=f"NaN in {cause.tag_name} on rank {at}", root=cause.id, first_causes=(cause.id,), members=(cause.id,),
            num_members=1,
        )  # fmt: skip
        commit.incidents.append((journal.judged, FoundIncident(id=incident.id, revision=1, body=json_line(incident))))
    journal.commit(commit)
    journal.close()
