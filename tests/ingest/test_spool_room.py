"""How long a spool's cap still lasts, read from the disk alone."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec
import pytest

from sentinel.collect.retention.spool_cap import SpoolCap
from sentinel.ingest.spool_room import SpoolRoom, fullest, room_of
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import FrameType, encode_message
from sentinel.wire.spool import write_ack


def capped(directory: Path, max_bytes: int, num_steps: int, **more: int) -> SyntheticRun:
    """Return a run whose rank tells its cap, as attach does."""
    run = SyntheticRun(
        directory / "run",
        layers=2,
        elements=4,
        cap=functools.partial(SpoolCap, max_bytes=max_bytes),
        file_bytes=2**16,
        **more,
    )
    for rank in range(run.num_ranks):
        descriptor = msgspec.structs.replace(run.descriptor(rank), settings={"spool": {"max_bytes": max_bytes}})
        run._ranks[rank].spool.append(FrameType.DESCRIPTOR, encode_message(descriptor))  # type: ignore[union-attr]
        run._ranks[rank].table.descriptor = descriptor
    run.write(num_steps)
    return run


def test_what_waits_is_held_against_the_cap_at_the_rate_it_comes(tmp_path: Path) -> None:
    run = capped(tmp_path, 2**20, 60)
    newest = max(run.folder(0).glob("*.spool"))
    begun = 1_700_000_000.0
    room = room_of(run.folder(0))
    assert room is not None
    written = sum(path.stat().st_size for path in run.folder(0).glob("*.spool"))

    os.utime(newest, (begun, run.clock.wall_ns() / 1e9 + 4.0))
    later = room_of(run.folder(0))

    assert later is not None and later.waiting_bytes == written and later.max_bytes == 2**20
    assert not later.is_cut
    assert later.bytes_per_s == pytest.approx(written / 10.0, rel=0.1), "six seconds of steps and four more"
    assert later.seconds_left == pytest.approx((2**20 - written) / later.bytes_per_s)
    assert "of 1 MiB of its spool wait to be judged" in later.words and "the rest lasts" in later.words


def test_what_was_judged_does_not_wait(tmp_path: Path) -> None:
    run = capped(tmp_path, 2**20, 60)
    newest = max(int(path.stem) for path in run.folder(0).glob("*.spool"))
    write_ack(run.folder(0), newest, (run.folder(0) / f"{newest:06d}.spool").stat().st_size)

    assert room_of(run.folder(0)) is None
    assert fullest(run.directory) is None


@pytest.mark.slow
def test_past_the_cap_it_is_said_that_rows_go(tmp_path: Path) -> None:
    run = capped(tmp_path, 2**18, 400)

    room = fullest(run.directory)

    assert room is not None and room.is_cut
    assert "spool.max_bytes is used up" in room.words


def test_the_fullest_of_several_is_the_one_that_counts() -> None:
    near, far = (
        SpoolRoom(rank=rank, waiting_bytes=waiting, max_bytes=4 * 2**30, is_cut=False, bytes_per_s=2 * 2**20)
        for rank, waiting in ((0, 2**30), (1, 3 * 2**30))
    )

    assert near.share < far.share
    assert far.words == (
        "rank 1: 3 of 4 GiB of its spool wait to be judged; at 2 MiB/s the rest lasts 9 min, then finite rows go"
    )


def test_a_run_whose_ranks_tell_no_cap_says_nothing(tmp_path: Path) -> None:
    SyntheticRun(tmp_path / "run", layers=2, elements=4).write(5)

    assert fullest(tmp_path / "run") is None
