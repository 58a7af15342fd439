"""What processes that are gone leave in the spool: bounded by age and size, and never what is not judged."""

from __future__ import annotations

import os
from pathlib import Path

from sentinel.daemon.spool_pruning import LOOK_S, SpoolPruning
from sentinel.store.retention import DAY_S, RetentionConfig
from sentinel.wire.spool import write_ack

NOW = 1_800_000_000.0
MIB = 2**20


def a_spool(spool: Path, folder: str, *, num_files: int, acked: int, days_ago: float = 0.0) -> None:
    """Make the spool of a process: files of a mebibyte, a day apart, of which those before `acked` were judged."""
    (spool / folder).mkdir(parents=True)
    for index in range(1, num_files + 1):
        path = spool / folder / f"{index:06d}.spool"
        path.write_bytes(bytes(MIB))
        written = NOW - (days_ago + num_files - index) * DAY_S
        os.utime(path, (written, written))
    write_ack(spool / folder, acked, 0)


def left(spool: Path) -> list[str]:
    return sorted(f"{path.parent.name[:6]}/{path.stem}" for path in spool.glob("*/*.spool"))


def test_the_oldest_judged_files_go_until_there_is_room(tmp_path):
    a_spool(tmp_path, "r00000-aaaaaaaa", num_files=3, acked=3, days_ago=5)
    a_spool(tmp_path, "r00001-bbbbbbbb", num_files=3, acked=3)

    SpoolPruning("run", tmp_path, RetentionConfig(age_days=0, spool_bytes=3 * MIB)).turn(
        ["r00000-aaaaaaaa", "r00001-bbbbbbbb"], NOW
    )

    assert left(tmp_path) == ["r00000/000003", "r00001/000002", "r00001/000003"]


def test_what_is_old_goes_and_what_is_not_judged_stays(tmp_path):
    a_spool(tmp_path, "r00000-aaaaaaaa", num_files=4, acked=2, days_ago=100)

    SpoolPruning("run", tmp_path, RetentionConfig(age_days=90)).turn(["r00000-aaaaaaaa"], NOW)

    assert left(tmp_path) == ["r00000/000002", "r00000/000003", "r00000/000004"]


def test_the_spool_of_a_process_that_writes_is_its_own(tmp_path):
    a_spool(tmp_path, "r00000-aaaaaaaa", num_files=4, acked=4, days_ago=100)

    SpoolPruning("run", tmp_path, RetentionConfig(age_days=90, spool_bytes=MIB)).turn([], NOW)

    assert len(left(tmp_path)) == 4


def test_it_looks_now_and_then_and_after_a_clock_that_was_set_back(tmp_path):
    pruning = SpoolPruning("run", tmp_path, RetentionConfig(age_days=90))
    pruning.turn(["r00000-aaaaaaaa"], NOW)
    a_spool(tmp_path, "r00000-aaaaaaaa", num_files=2, acked=2, days_ago=100)
    pruning.turn(["r00000-aaaaaaaa"], NOW + LOOK_S / 2)
    assert len(left(tmp_path)) == 2

    pruning.turn(["r00000-aaaaaaaa"], NOW - DAY_S)

    assert left(tmp_path) == ["r00000/000002"]
