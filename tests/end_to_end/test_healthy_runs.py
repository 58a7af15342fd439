"""Real healthy trainings with every probe on raise no page, and the fault that ends each is found by the same judge."""

from __future__ import annotations

import subprocess
import sys

from sentinel.anomaly import Severity
from tests.end_to_end.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from healthy import SHORT, SHORT_STEPS, WITHIN_STEPS, found_after, judged


def test_healthy_runs_page_nobody_and_their_last_fault_is_found(tmp_path):
    # In a process of its own: it sets torch's threads, and takes the global generator.
    command = [sys.executable, str(ROOT / "benchmarks" / "healthy.py"), "--short", "--only-record", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == len(SHORT)
    for file in files:
        truth, healthy, faulty = judged(file)
        # The crash repeats a tenth of the steps.
        assert healthy.num_steps == SHORT_STEPS + SHORT_STEPS // 10
        assert healthy.num_rows == healthy.num_expected > 100 * healthy.num_steps
        assert truth["last_healthy_loss"] < 0.8 * truth["first_loss"], "it did not learn: no healthy run"
        assert not healthy.paged
        assert healthy.num_of(Severity.CRITICAL) == 0
        after, by = found_after(truth, faulty)
        assert 0 <= after <= WITHIN_STEPS, f"{truth['run']}: {truth['fault']} found after {after} by {by}"
