"""Losses through a served run: told, kept over a restart, and the same on a replay."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest

from sentinel.cli.status import run_status
from sentinel.collect.retention.spool_cap import SpoolCap
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.serving import ServedRun
from sentinel.judge.packs import RulePacks
from sentinel.judge.replay import replay
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan, SyntheticRun

pytestmark = pytest.mark.slow


def serve(run: SyntheticRun) -> ServedRun:
    packs = RulePacks([])
    packs.load()
    served = ServedRun(RunPaths.of(run.directory), DaemonConfig(), packs)
    while served.turn(time.time()):
        pass
    return served


@pytest.mark.parametrize("shape", [{}, {"dp": 2}])
@pytest.mark.parametrize("max_kib", [256, 1024])
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
    served = serve(run)
    served.finish(time.time(), is_over=True, deadline=time.monotonic() + 60)
    described, problems = served.status.describe(), served.status.problems()
    served.close()

    assert described["is_complete"] is False and described["num_rows_lost"] > 0
    assert any("lost before they were judged" in one for one in problems)
    again = serve(run)
    assert again.status.describe()["num_rows_lost"] == described["num_rows_lost"]
    assert any("lost before they were judged" in one for one in again.status.problems())
    again.close()
    assert run_status(run.directory)["num_rows_lost"] == described["num_rows_lost"]
    assert replay(RunPaths.of(run.directory), tmp_path / "again").first_difference is None


def test_a_run_that_lost_nothing_is_complete(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", layers=2, elements=4)
    run.write(30)
    run.end()
    served = serve(run)
    served.finish(time.time(), is_over=True, deadline=time.monotonic() + 60)

    assert served.status.describe()["is_complete"] is True
    assert not served.status.problems()
    served.close()
