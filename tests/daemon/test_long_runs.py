"""A long run: memory and disk stay as they were, and a start reads no more the longer it was."""

from __future__ import annotations

import gc
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sentinel.daemon.incident_alerts import IncidentAlerts
from sentinel.store.journal import Journal
from sentinel.store.retention import RetentionConfig
from sentinel.store.run_paths import RunPaths

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from retention import NAN_STEP, LongRun

pytestmark = pytest.mark.slow

LIMITS = RetentionConfig(journal_bytes=2**20, incidents_bytes=2**16, age_days=0)
OPERATIONS = 100


@pytest.fixture(autouse=True)
def soon_as_it_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer closed incidents are remembered, so that the state is soon as large as it gets; snapshots cost what they may."""
    for module in ("tracker", "tracker_state", "reconciling"):
        monkeypatch.setattr(f"sentinel.incidents.{module}.MAX_CLOSED", 4)
    monkeypatch.setattr("sentinel.daemon.snapshots.SNAPSHOT_SHARE", float("inf"))


def operations_of_a_start(run_dir: Path) -> int:
    """Return how many hundreds of operations SQLite needs for what a daemon reads of a journal before it judges."""
    counted = []
    with closing(Journal(RunPaths.of(run_dir).journal, read_only=True)) as journal:
        journal._file.db.set_progress_handler(lambda: counted.append(1), OPERATIONS)
        IncidentAlerts(journal, ())
        _ = journal.judged, journal.found.num_onsets(), journal.num_steps, next(iter(journal.snapshots()))
        list(journal.newest_decisions("tick", 100))
    return len(counted)


@pytest.mark.parametrize("num_steps", [3000, pytest.param(20_000, marks=pytest.mark.long)])
def test_a_long_run_needs_no_more_memory_disk_or_time_to_start(tmp_path: Path, num_steps: int) -> None:
    run = LongRun(tmp_path / "run", LIMITS, snapshot_interval_s=0.25)
    objects, state, disk, starts = [], [], [], []
    for _ in range(4):
        run.steps(num_steps // 4)
        gc.collect()
        objects.append(len(gc.get_objects()))
        state.append(run.snapshot_bytes)
        disk.append(run.disk_bytes)
        starts.append(operations_of_a_start(run.paths.run_dir))
    to_judge_again = run.journal.last_seq - run.snapshots.seq
    lasting = run.stages.judge.open_incidents[0]
    run.close()

    assert objects[-1] < 1.05 * objects[1]
    assert state[-1] < 1.05 * state[1]
    # Twice the limit, for what is being cut and the log beside it, and four snapshots.
    assert disk[-1]["journal"] < 2 * LIMITS.journal_bytes + 4 * state[-1] + 8 * 2**20
    assert starts[-1] < 2 * starts[1] + 10
    assert to_judge_again < num_steps // 4
    assert (lasting.opened_step, lasting.state) == (NAN_STEP, "open")


def test_a_restart_goes_on_with_what_lasts(tmp_path: Path) -> None:
    run = LongRun(tmp_path / "run", LIMITS, snapshot_interval_s=0.0)
    run.steps(NAN_STEP + 100)
    run.close()

    assert run.restarted_s() > 0
    with closing(Journal(run.paths.journal, read_only=True)) as journal:
        assert journal.judged == journal.last_seq == NAN_STEP + 100
        assert [b'"state":"open"' in body for body in journal.found.newest_incidents(10)].count(True) == 1
