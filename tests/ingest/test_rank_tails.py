"""The ends of the spools of all ranks: the newest process of each, and of a crowd the first and the last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.ingest.rank_tails import RankTails
from sentinel.messages import Heartbeat

from ..support.serving import small_run


def test_each_rank_is_told_by_its_newest_process_alone(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(4)
    tails = RankTails(run.directory)
    first = {tail.rank: tail.newest_step for tail, _ in tails.look()}
    former = run.folder(1)
    run.kill(1)
    os.utime(former / "000000.spool", (1, 1))
    run.start(1)
    run.write(1)

    found = {tail.rank: ([step.step for step in ended], len(tail.steps)) for tail, ended in tails.look()}

    assert first == {0: 3, 1: 3, 2: 3, 3: 3}
    assert found == {0: ([4], 5), 1: ([4], 1), 2: ([4], 5), 3: ([4], 5)}


def test_a_goodbye_counts_until_more_is_said(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(2)
    run.report(0, Heartbeat(step=2, call_id=1, activity="train"))
    tails = RankTails(run.directory)

    running = {tail.rank: (tail.bye, tail.newest_step) for tail, _ in tails.look()}
    run.end(0)
    ended = {tail.rank: tail.bye for tail, _ in tails.look()}

    assert running == {0: (None, 2), 1: (None, 1), 2: (None, 1), 3: (None, 1)}
    assert ended[0] is not None and ended[0].reason == "exit" and ended[1] is None


@pytest.mark.parametrize(("most", "read", "num_unread"), [(4, [0, 1, 6, 7], 4), (3, [0, 6, 7], 5), (8, list(range(8)), 0)])
def test_of_a_crowd_the_first_and_the_last_are_read_and_the_others_counted(
    tmp_path: Path, most: int, read: list[int], num_unread: int
) -> None:
    run = small_run(tmp_path / "run", pp=2, dp=4)
    run.write(1)

    tails = RankTails(run.directory, most)

    assert [tail.rank for tail, _ in tails.look()] == read
    assert tails.num_unread == num_unread
    assert {tail.world_size for tail, _ in tails.look()} == {8}


def test_what_is_no_spool_is_passed_over(tmp_path: Path) -> None:
    assert RankTails(tmp_path / "nowhere").look() == []
    (tmp_path / "spool" / "r0-nothing").mkdir(parents=True)
    (tmp_path / "spool" / "r00001-0123abcd").write_text("no folder")

    found = RankTails(tmp_path).look()

    assert [(tail.rank, tail.written_at, ended) for tail, ended in found] == [(1, 0.0, [])]
