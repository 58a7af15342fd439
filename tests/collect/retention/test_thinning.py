"""Past its cap a spool keeps what is worth most, and tells of each step what it lost: nothing vanishes uncounted."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest

from sentinel.collect.retention.spool_cap import SpoolCap
from sentinel.collect.retention.worth import is_nonfinite
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.steps import snapshot_positions
from sentinel.testing import Nan, SyntheticRun
from sentinel.wire.spool import write_ack
from sentinel.wire.spool_files import KeptFile, covering, list_files, list_kept, next_place

from ...support.closed_steps import FollowedRun

pytestmark = pytest.mark.slow

BAD = "layers.1"


def small(directory: Path, *, max_kib: int, file_kib: int = 64, **more: int) -> SyntheticRun:
    return SyntheticRun(
        directory / "run",
        layers=2,
        d_model=16,
        elements=4,
        cap=functools.partial(SpoolCap, max_bytes=max_kib * 1024),
        file_bytes=file_kib * 1024,
        **more,
    )


def read(run: SyntheticRun) -> tuple[FollowedRun, list[ClosedStep]]:
    followed = FollowedRun(run.directory)
    return followed, followed.finish()


def num_judged(views: list[ClosedStep]) -> int:
    return sum(view.num_rows for view in views)


def bad_steps(views: list[ClosedStep]) -> list[int]:
    return [view.step for view in views if is_nonfinite(view.rows).any()]


def spool_bytes(run: SyntheticRun) -> int:
    return sum(path.stat().st_size for path in run.folder(0).iterdir())


def test_rows_judged_and_rows_told_lost_are_the_rows_sent_and_every_step_is_there(tmp_path: Path) -> None:
    run = small(tmp_path, max_kib=1024).plant(Nan(step=20, module=BAD))
    run.write(400)
    run.end()
    sent = 400 * run.rows_per_step
    assert spool_bytes(run) <= 1024 * 1024

    followed, views = read(run)

    assert [view.step for view in views] == list(range(400))
    assert all("loss" in view.scalars for view in views)
    assert bad_steps(views) == [20]
    losses = followed.assembler.losses
    assert num_judged(views) + losses.num_rows == sent
    assert 0 < losses.num_rows < sent and losses.num_steps_gone == 0
    whole = {view.step: view.num_rows for view in views}
    assert whole[399] == run.rows_per_step, "what is newest is whole"
    assert all(one.lost_to in ("", "cap") and one.num_lost == one.num_finite_lost for v in views for one in v.decision.ranks)
    borders = [view for view in views if 0 < view.num_rows < run.rows_per_step]
    assert len(borders) > 100, "the black box of most steps is kept"
    assert followed.problems == [] and followed.follower.num_corrupt == followed.follower.num_torn == 0


@pytest.mark.parametrize("max_kib", [128, *(pytest.param(size, marks=pytest.mark.long) for size in (256, 512))])
def test_a_nan_survives_any_cap(tmp_path: Path, max_kib: int) -> None:
    run = small(tmp_path, max_kib=max_kib).plant(Nan(step=30, module=BAD))
    whole = SyntheticRun(tmp_path / "whole", layers=2, d_model=16, elements=4).plant(Nan(step=30, module=BAD))
    run.write(1500)
    run.end()
    whole.write(60)
    whole.end()
    sent = 1500 * run.rows_per_step

    followed, views = read(run)
    _, expected = read(whole)

    assert spool_bytes(run) <= max_kib * 1024 * 1.1
    assert 30 in bad_steps(views)
    losses = followed.assembler.losses
    assert num_judged(views) + losses.num_rows == sent
    assert len(views) + losses.num_steps_gone == 1500
    assert losses.num_rows > sent / 4, "most was thinned"
    bad, first = (next(view for view in some if view.step == 30) for some in (views, expected))
    kept, all_rows = (view.rows[is_nonfinite(view.rows)] for view in (bad, first))
    assert np.array_equal(np.sort(kept["call_id"]), np.sort(all_rows["call_id"])), "all rows that are non-finite"


def test_a_run_that_is_nan_for_ever_keeps_where_it_began(tmp_path: Path) -> None:
    run = small(tmp_path, max_kib=192).plant(Nan(step=40, module=BAD, is_skipped=False))
    run.write(1000)
    run.end()

    followed, views = read(run)

    assert bad_steps(views)[0] == 40
    assert num_judged(views) + followed.assembler.losses.num_rows == 1000 * run.rows_per_step


def test_with_room_nothing_is_thinned_and_what_is_committed_goes_first(tmp_path: Path) -> None:
    run = small(tmp_path, max_kib=512)
    follower = FollowedRun(run.directory)
    for _ in range(40):
        run.write(10)
        follower.listen()
        for folder, position in follower.assembler.positions().items():
            write_ack(run.directory / "spool" / folder, position.file_index, position.offset)
    run.end()
    follower.finish()

    assert num_judged(follower.views) == 400 * run.rows_per_step
    assert follower.assembler.losses.is_complete
    assert list_kept(run.folder(0)) == []
    assert list_files(run.folder(0))[0] > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3, 4, 5))])
def test_a_daemon_that_reads_while_files_are_thinned_counts_each_row_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    run = small(tmp_path, max_kib=rng.choice([128, 256, 512])).plant(Nan(step=100, module=BAD))
    followed = FollowedRun(run.directory)
    views: list[ClosedStep] = []
    num_steps = 0
    while num_steps < 900:
        number = rng.choice([1, 5, 60, 250])
        run.write(number)
        num_steps += number
        if rng.random() < 0.3:
            followed = restarted(followed, run)
        records = followed.follower.poll()
        followed.assembler.take(records, 0.0)
        views += followed.assembler.close(0.0, followed.follower.behind)
    run.end()
    views += followed.finish()

    losses = followed.assembler.losses
    assert num_judged(views) + losses.num_rows == num_steps * run.rows_per_step
    assert len(views) + losses.num_steps_gone == num_steps
    assert [view.step for view in views] == sorted({view.step for view in views})
    assert 100 in bad_steps(views)
    assert followed.follower.num_corrupt == 0


def restarted(followed: FollowedRun, run: SyntheticRun) -> FollowedRun:
    """Return another daemon that goes on from the snapshot of the first."""
    snapshot = followed.assembler.snapshot()
    later = FollowedRun(run.directory)
    later.follower.restore(snapshot_positions(snapshot))
    later.assembler.restore(snapshot, later.follower.incarnations)
    return later


@pytest.mark.parametrize("num_unlinked", [0, 1, 2])
def test_a_writer_killed_while_it_thins_loses_nothing_that_was_kept(
    tmp_path: Path, num_unlinked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small(tmp_path, max_kib=512).plant(Nan(step=10, module=BAD))
    calls = []

    def dies(self: SpoolCap, one: object) -> None:
        calls.append(one)
        if len(calls) <= num_unlinked:
            delete(self, one)
        else:
            raise KeyboardInterrupt

    delete = SpoolCap._delete
    monkeypatch.setattr(SpoolCap, "_delete", dies)
    with pytest.raises(KeyboardInterrupt):
        run.write(2000)

    _, views = read(run)

    assert bad_steps(views) == [10]
    assert [view.step for view in views] == list(range(len(views))), "every step, each once"
    assert len(views) > 20


def test_a_reader_goes_from_whole_files_to_what_is_kept_and_back(tmp_path: Path) -> None:
    for name in ("000001.spool", "000004.000002-1.spool", "000005.000002-2.spool", "000006.spool", "000009.new"):
        (tmp_path / name).write_bytes(b"")

    assert list_files(tmp_path) == [1, 6]
    assert covering(tmp_path, 3) == KeptFile(2, 5, 2)
    assert covering(tmp_path, 6) is None
    assert [next_place(tmp_path, after) for after in (-1, 0, 1, 3, 5, 6)] == [1, 1, 2, 4, 6, None]


def test_a_fresh_reader_knows_the_layouts_of_what_was_kept(tmp_path: Path) -> None:
    run = small(tmp_path, max_kib=256).plant(Nan(step=5, module=BAD))
    run.write(500)
    follower = RunFollower(run.directory)
    records = []
    while found := follower.poll(final=True):
        records += found

    kept = [one for one in records if one.frame.header.row_count and one.frame.header.step == 5]

    assert kept and all(one.descriptor is not None for one in kept)
