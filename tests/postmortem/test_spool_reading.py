"""What is read of spools for a report: the files that can hold the wanted steps, within a bound, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.postmortem import spool_reading
from sentinel.postmortem.spool_reading import CHECKPOINT, SpoolReading
from sentinel.testing import SyntheticRun

from ..support.serving import small_run
from .conftest import BAD
from .conftest import CHECKPOINT as CHECKPOINT_STEP


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> SyntheticRun:
    """100 steps of four ranks, each in about a dozen files."""
    run = small_run(tmp_path_factory.mktemp("spools") / "long", file_bytes=32 * 1024)
    run.write(100)
    run.end()
    return run


def test_only_files_that_can_hold_the_wanted_steps_are_read(long_run: SyntheticRun) -> None:
    files = len(list(long_run.folder(0).glob("*.spool")))
    some = SpoolReading(long_run.directory, [(50, 52)])
    every = SpoolReading(long_run.directory, [], takes_all=True)

    assert files > 5
    assert {(one.rank, one.end.step) for one in some.steps} == {(rank, step) for rank in range(4) for step in (50, 51, 52)}
    assert some._num_frames < every._num_frames / 3
    assert {(one.rank, one.end.step) for one in every.steps} == {(rank, step) for rank in range(4) for step in range(100)}
    assert len(every.steps) == 400, "each once"


def test_each_process_is_described_by_any_of_its_files(long_run: SyntheticRun) -> None:
    reading = SpoolReading(long_run.directory, [(97, 99)])

    assert [one.rank for one in reading.incarnations] == [0, 1, 2, 3]
    assert all(one.descriptor == long_run.descriptor(one.rank) for one in reading.incarnations)
    assert reading.attempts.keys() == {0}


def test_past_the_bound_wanted_ranks_are_read_first_and_that_there_is_more_is_known(
    long_run: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_frames = SpoolReading(long_run.directory, [(0, 99)])._num_frames
    monkeypatch.setattr(spool_reading, "MOST_FRAMES", num_frames // 2)
    reading = SpoolReading(long_run.directory, [(0, 99)], ranks_first=[2])

    ranks = {one.rank for one in reading.steps if one.end.step == 99}

    assert 2 in ranks and 3 not in ranks and reading.is_cut
    assert not SpoolReading(long_run.directory, [(99, 99)], ranks_first=[2]).is_cut


def test_of_a_long_run_each_step_of_a_span_is_read_and_of_the_others_some(
    long_run: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_reading, "MOST_DECODED", 200)
    reading = SpoolReading(long_run.directory, [(50, 52)], takes_all=True)
    steps = {one.end.step for one in reading.steps if one.rank == 0}

    assert reading.stride > 2 and {50, 51, 52} <= steps
    assert steps - {50, 51, 52} == {step for step in range(100) if step % reading.stride == 0} - {50, 51, 52}


def test_samples_and_checkpoints_are_those_that_ranks_logged(judged: Path) -> None:
    reading = SpoolReading(judged, [(0, 59)])

    assert {(one.rank, one.end.samples[0]) for one in reading.of_step(BAD, 0)} == {
        (at, f"doc-{at}-{BAD}-0") for at in range(4)
    }
    assert {one.step for one in reading.checkpoints} == {CHECKPOINT_STEP}
    assert reading.of_step(BAD, 7) == [], "no such attempt"
    assert CHECKPOINT == "checkpoint"


def test_what_is_no_spool_hurts_nothing(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(10)
    run.kill(1)
    run.flip_bit(2)
    path = run.folder(3) / "000000.spool"
    data = path.read_bytes()
    middle = data.index(b"SNTL", len(data) // 2)
    path.write_bytes(data[:middle] + b"rubbish SNTL" * 50 + data[middle:])
    (run.directory / "spool" / "r00009-deadbeef").mkdir()
    (run.directory / "spool" / "r00009-deadbeef" / "000000.spool").write_bytes(b"SNTL" * 1000)
    (run.directory / "spool" / "not-a-rank").write_text("x")
    reading = SpoolReading(run.directory, [(0, 9)])

    assert {one.end.step for one in reading.steps if one.rank == 1} == set(range(10)), "all before the torn tail"
    for rank in (0, 3):
        assert {one.end.step for one in reading.steps if one.rank == rank} == set(range(10))
    assert [one.rank for one in reading.incarnations] == [0, 1, 2, 3]
    assert SpoolReading(tmp_path / "nothing", [(0, 9)]).steps == []
