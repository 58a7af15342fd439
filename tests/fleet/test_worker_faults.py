"""Whatever goes wrong in a fleet with workers, a schedule of faults after the other: it is what one daemon comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.fleet_faults import RecordedFleet
from ..support.relayed_faults import RelayedFleet

pytestmark = pytest.mark.slow
TORN = 72
"""Seed in which a frame is sent before it is whole, and again without its rows by another worker."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedFleet:
    return RecordedFleet.synthetic(tmp_path_factory.mktemp("recorded"), ranks_per_host=2)


@pytest.mark.parametrize("seed", [TORN, 133, 154, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(100, 117))])
def test_a_schedule_of_faults_with_workers_changes_nothing(tmp_path: Path, recorded: RecordedFleet, seed: int) -> None:
    world = RelayedFleet(tmp_path, recorded, seed)
    world.run()
    assert not [problem for worker in world.workers for problem in worker.problems]
