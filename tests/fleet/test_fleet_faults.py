"""Whatever goes wrong in a fleet, a schedule of faults after the other: what comes of it is what one daemon comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.fleet_faults import DigestedFleet, FaultyFleet, RecordedFleet

pytestmark = pytest.mark.slow
FENCED = 21
"""Seed in which a join is stopped in the middle of a turn, taken over from, and goes on."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedFleet:
    return RecordedFleet.synthetic(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> RecordedFleet:
    return RecordedFleet.synthetic(tmp_path_factory.mktemp("pruned"), is_pruned=True)


@pytest.mark.parametrize("seed", [13, 15, FENCED, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(100, 117))])
def test_a_schedule_of_faults_changes_nothing(tmp_path: Path, recorded: RecordedFleet, seed: int) -> None:
    world = FaultyFleet(tmp_path, recorded, seed)
    world.run()
    assert seed != FENCED or world.counts["fenced off"]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> RecordedFleet:
    """A run of two ranks on each machine, which are merged there."""
    return RecordedFleet.synthetic(tmp_path_factory.mktemp("merged"), ranks_per_host=2)


@pytest.mark.parametrize("seed", [7, 18, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(100, 118))])
def test_a_schedule_of_faults_with_digests_changes_nothing(tmp_path: Path, merged: RecordedFleet, seed: int) -> None:
    world = DigestedFleet(tmp_path, merged, seed)
    world.run()
    assert world.counts["digested_steps"] > world.counts["fetched_steps"] > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 203))
def test_a_file_that_was_deleted_early_is_missed_and_nothing_else(tmp_path: Path, pruned: RecordedFleet, seed: int) -> None:
    FaultyFleet(tmp_path, pruned, seed).run()
