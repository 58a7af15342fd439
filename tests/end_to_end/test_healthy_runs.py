"""Real healthy trainings with every probe on raise no page, and the fault that ends each is found by the same judge."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sentinel.anomaly import Severity
from tests.end_to_end.ranks import ROOT
from tests.support.warm import interpreter

sys.path.insert(0, str(ROOT / "benchmarks"))

from healthy import SHORT, SHORT_STEPS, WITHIN_STEPS, found_after, judged


# The recurrent one trains as the other does; what is judged of it has its place among the 8 runs of benchmarks/healthy.py.
@pytest.mark.parametrize("recipe", ["tiny", pytest.param("lstm", marks=pytest.mark.long)])
def test_healthy_runs_page_nobody_and_their_last_fault_is_found(recipe, tmp_path):
    assert recipe in SHORT
    # In a process of its own: it sets torch's threads, and takes the global generator.
    command = [interpreter(), str(ROOT / "benchmarks" / "healthy.py"), "--only-record", "--keep", str(tmp_path)]
    command += ["--steps", str(SHORT_STEPS), "--recipes", recipe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

    (file,) = tmp_path.glob("*.json")
    truth, healthy, faulty = judged(file)
    # The crash repeats a tenth of the steps.
    assert healthy.num_steps == SHORT_STEPS + SHORT_STEPS // 10
    assert healthy.num_rows == healthy.num_expected > 100 * healthy.num_steps
    assert truth["last_healthy_loss"] < 0.8 * truth["first_loss"], "it did not learn: no healthy run"
    assert not healthy.paged
    assert healthy.num_of(Severity.CRITICAL) == 0
    after, by = found_after(truth, faulty)
    assert 0 <= after <= WITHIN_STEPS, f"{truth['run']}: {truth['fault']} found after {after} by {by}"
