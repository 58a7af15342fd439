"""Losses through a served run: told, kept over a restart, and the same on a replay."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest

from sentinel.cli.status import run_status
from sentinel.collect.retention.spool_cap import SpoolCap
from sentinel.judge.replay import replay
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan, SyntheticRun

from ..support.serving import NOW, catch_up, served

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "max_kib"),
    [({}, 256), ({"dp": 2}, 256), *(pytest.param(one, 1024, marks=pytest.mark.long) for one in ({}, {"dp": 2}))],
)
def test_what_was_lost_is_said_after_a_restart_too_and_replays_to_the_same(
    tmp_path: Path, shape: dict[str, int], max_kib: int
) -> None:
    run = SyntheticRun(
        tmp_path / "run",
        layers=2,
        d_model=16,
        elements=4,
        cap=functools.partial(SpoolCap, max_bytes=max_kib * 1024),
        file_bytes=2**16,
        **shape,
    ).plant(Nan(step=30, module="layers.1"))
    run.write(500)
    run.end()
    judging = served(run.directory)
    catch_up(judging)
    judging.finish(NOW, is_over=True, deadline=time.monotonic() + 60)
    described, problems = judging.status.describe(), judging.status.problems()
    judging.close()

    assert described["is_complete"] is False and described["num_rows_lost"] > 0
    assert any("lost before they were judged" in one for one in problems)
    again = served(run.directory)
    catch_up(again)
    assert again.status.describe()["num_rows_lost"] == described["num_rows_lost"]
    assert any("lost before they were judged" in one for one in again.status.problems())
    again.close()
    assert run_status(run.directory)["num_rows_lost"] == described["num_rows_lost"]
    assert replay(RunPaths.of(run.directory), tmp_path / "again").first_difference is None


def test_a_run_that_lost_nothing_is_complete(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", layers=2, elements=4)
    run.write(30)
    run.end()
    judging = served(run.directory)
    catch_up(judging)
    judging.finish(NOW, is_over=True, deadline=time.monotonic() + 60)

    assert judging.status.describe()["is_complete"] is True
    assert not judging.status.problems()
    judging.close()
