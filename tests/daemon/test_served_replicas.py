"""Replica divergence as the daemon tells it: an incident that names the rank, the same on a replay; what is unchecked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.cli.status import run_status
from sentinel.incident import Incident
from sentinel.judge.replay import replay
from sentinel.store.run_paths import RunPaths
from sentinel.testing import BitFlip, SyntheticRun

from ..support.results import result_bytes
from ..support.serving import judge_run
from .test_serving import EVERY_STEP


def run_of(directory: Path, **options: int) -> SyntheticRun:
    return SyntheticRun(directory, layers=2, d_model=16, elements=8, **options)


@pytest.mark.slow
def test_a_flipped_bit_is_one_incident_that_names_the_rank(tmp_path: Path) -> None:
    source = run_of(tmp_path / "run", dp=4).plant(BitFlip(step=20, module="layers.1.mlp", rank=2))
    source.write(60)
    source.end()

    judge_run(tmp_path / "run", EVERY_STEP)

    lines, revisions = result_bytes(tmp_path / "run")
    found = [msgspec.json.decode(line, type=Anomaly) for line in lines.splitlines()]
    (onset,) = [one for one in found if one.rule == "replica-divergence"]
    opened, incident = [msgspec.json.decode(line, type=Incident) for line in revisions.splitlines()]
    assert (opened.suspected, incident.suspected) == ("unknown", "hardware"), "it is told when it has held"
    assert (onset.step, onset.rank, onset.ranks, onset.group_mates) == (20, 2, (2,), (0, 1, 2, 3))
    assert onset.tag_name.startswith("layers.1.mlp")
    assert (incident.opened_step, incident.severity, incident.ranks, incident.state) == (20, Severity.CRITICAL, (2,), "open")
    assert incident.title.startswith(f"replica-divergence: param {onset.tag_name} on rank 2 differs from its 3 copies")
    assert replay(RunPaths.of(tmp_path / "run"), tmp_path / "again").first_difference is None
    assert (tmp_path / "again" / "incidents.jsonl").read_bytes() == revisions


def test_healthy_replicas_are_silent_through_late_ranks_and_skipped_steps(tmp_path: Path) -> None:
    source = run_of(tmp_path / "run", dp=3)
    source.write(10)
    source.write(3, skip=(1,))
    source.hold(2)
    source.write(4)
    source.release(2)
    source.write(10)
    source.end()

    judge_run(tmp_path / "run", EVERY_STEP)

    assert result_bytes(tmp_path / "run") == (b"", b"")


@pytest.mark.parametrize(("dp", "says"), [(1, "cannot be checked: of "), (2, " weights are compared with their copies")])
def test_status_says_whether_replicas_can_be_checked(tmp_path: Path, dp: int, says: str) -> None:
    source = run_of(tmp_path / "run", dp=dp)
    source.write(5)
    source.end()

    before = run_status(tmp_path / "run")["replicas"]
    judge_run(tmp_path / "run", EVERY_STEP)

    assert before is None
    assert says in run_status(tmp_path / "run")["replicas"]
