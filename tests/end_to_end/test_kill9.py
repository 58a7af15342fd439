"""The daemon under SIGKILL at random moments: nothing is lost, nothing is judged or told twice."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kill9 import campaign


@pytest.mark.parametrize(
    ("is_live", "num_kills", "num_steps"),
    [
        pytest.param(False, 5, 300, id="recorded", marks=pytest.mark.long),
        pytest.param(True, 3, 300, id="while a writer writes"),
        pytest.param(False, 28, 1500, id="recorded, long", marks=pytest.mark.long),
        pytest.param(True, 22, 300, id="while a writer writes, long", marks=pytest.mark.long),
    ],
)
def test_kill_9_loses_nothing(tmp_path: Path, is_live: bool, num_kills: int, num_steps: int) -> None:
    outcome = campaign(tmp_path, num_kills, random.Random(7), is_live=is_live, num_steps=num_steps)

    assert outcome.differences == []
    assert outcome.num_kills == num_kills
    assert outcome.num_anomalies > 10
    assert outcome.num_hit >= 3
