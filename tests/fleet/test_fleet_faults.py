"""Whatever goes wrong in a fleet, a schedule of faults after the other: what comes of it is what one daemon comes to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.fleet.fetched_rows import FetchedRows
from sentinel.fleet.sealed import RowsPiece

from ..support.fleet_faults import DigestedFleet, FaultyFleet, RecordedFleet

pytestmark = pytest.mark.slow
FENCED = 21
"""Seed in which a join is stopped in the middle of a turn, taken over from, and goes on."""
BROKER_FORGOT = 3128
"""Seed in which the broker forgets the successor of a join, and tells it that it has the lease still."""


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
def test_a_schedule_of_faults_with_digests_changes_nothing(
    tmp_path: Path, merged: RecordedFleet, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_some, take_rows = list[RowsPiece](), FetchedRows.take_rows

    def noted(rows: FetchedRows, piece: RowsPiece, fill: Callable[[int, int, bytes], bool]) -> int:
        of_some.extend([piece] if piece.tensors else [])
        return take_rows(rows, piece, fill)

    monkeypatch.setattr(FetchedRows, "take_rows", noted)
    world = DigestedFleet(tmp_path, merged, seed)
    world.run()
    assert world.counts["digested_steps"] > world.counts["fetched_steps"] > 0
    assert of_some, "the rows of single tensors are asked for as well"


def test_a_join_whose_successor_the_broker_forgot_ends(tmp_path: Path, merged: RecordedFleet) -> None:
    world = DigestedFleet(tmp_path, merged, BROKER_FORGOT)
    world.run()
    assert 0 < world.counts["fenced off"] < 5, "it would be so for good"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 203))
def test_a_file_that_was_deleted_early_is_missed_and_nothing_else(tmp_path: Path, pruned: RecordedFleet, seed: int) -> None:
    FaultyFleet(tmp_path, pruned, seed).run()
