"""One step out of the spools: what its ranks recorded of it, whichever file it lies in, and nothing of another step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sentinel.messages import Vector, Vectors
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import FrameType, encode_message

from ..support.recorded_step import read_step
from ..support.serving import small_run


def of(source: SyntheticRun, rank: int, step: int) -> np.ndarray:
    return source.observe(rank, step)[0]


def test_a_step_is_read_whole_from_whichever_file_of_each_rank_it_lies_in(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run", file_bytes=30_000)
    source.write(30)
    assert len(list(source.folder(0).glob("*.spool"))) > 3

    for step in (0, 7, 15, 29):
        found = read_step(tmp_path / "run", step)

        assert [part.rank for part in found.parts] == [0, 1, 2, 3] and (found.attempt, found.num_unread) == (0, 0)
        for part in found.parts:
            assert part.end_step is not None and part.end_step.step == step
            np.testing.assert_array_equal(part.rows, of(source, part.rank, step))
            assert part.descriptor == source.descriptor(part.rank)


def test_of_a_step_that_is_not_there_nothing_is_said(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(3)

    assert read_step(tmp_path / "run", 3).parts == ()
    assert read_step(tmp_path / "nowhere", 0).parts == ()
    for path in source.folder(0).glob("*.spool"):
        path.unlink()
    assert [part.rank for part in read_step(tmp_path / "run", 1).parts] == [1, 2, 3]


def test_of_a_step_that_was_trained_twice_the_newer_attempt_counts(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(5)
    source.restart(3, attempt=1)
    source.write(1)

    again, once = read_step(tmp_path / "run", 3), read_step(tmp_path / "run", 4)

    assert again.attempt == 1 and {part.incarnation for part in again.parts} == {source.incarnation(at) for at in range(4)}
    assert once.attempt == 0 and len(once.parts) == 4


def test_torn_and_flipped_bytes_cost_the_frames_that_they_hit(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(4)
    source.flip_bit(1)
    source.kill(2)

    parts = {part.rank: part for part in read_step(tmp_path / "run", 3).parts}

    assert parts[1].end_step is None or not len(parts[1].rows)
    assert len(parts[0].rows) == len(of(source, 0, 3)) and len(parts[2].rows) == len(of(source, 2, 3))


def test_vectors_of_the_step_come_with_it(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(2)
    load = Vector(
        tensor=0, statistic="load", axis="expert", dtype="<f4", shape=(2,), values=np.array([3, 5], "<f4").tobytes()
    )
    one = source._ranks[1]
    source._write_message(one, FrameType.VECTOR, encode_message(Vectors(items=(load,))), 2, 0)
    source.write(1)

    assert read_step(tmp_path / "run", 2).vectors == {1: (load,)}
    assert read_step(tmp_path / "run", 1).vectors == {}


@pytest.mark.parametrize("num_looks", [0, 2, 3])
def test_what_there_was_no_time_for_is_counted(tmp_path: Path, num_looks: int) -> None:
    small_run(tmp_path / "run").write(2)
    looks = iter([True] * num_looks + [False] * 100)

    found = read_step(tmp_path / "run", 1, lambda: next(looks))

    assert len(found.parts) + found.num_unread == 4 and found.num_unread >= 1


def test_a_step_far_behind_the_beginning_of_a_file_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # More frames are hopped over than a number may leap.
    monkeypatch.setattr("sentinel.ingest.trust.MAX_GAPS", 10)
    source = small_run(tmp_path / "run", pp=1, dp=1)
    source.write(20)

    [part] = read_step(tmp_path / "run", 19).parts

    assert part.end_step is not None
    np.testing.assert_array_equal(part.rows, of(source, 0, 19))
