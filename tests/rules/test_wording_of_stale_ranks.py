"""What is said of ranks that make no progress: a deadlock only where all of them wait."""

from __future__ import annotations

import pytest

from sentinel.ingest.decision import RankFacts
from sentinel.rules.wording import stale


def facts(rank: int, is_waiting: int) -> RankFacts:
    return RankFacts(rank=rank, life=bytes([rank]), heard_at=0.0, moved_at=0.0, is_waiting=is_waiting)


@pytest.mark.parametrize(("waiting", "is_deadlock"), [((1, 1), True), ((1, 2), True), ((1, 0), False), ((-1, -1), False)])
def test_a_deadlock_is_told_only_where_every_rank_waits(waiting: tuple[int, ...], is_deadlock: bool) -> None:
    ranks = [facts(rank, one) for rank, one in enumerate(waiting)]

    told = stale("hung", ranks, 130.0, 120.0, (), is_sure=False)

    assert ("wait for each other" in told) is is_deadlock
    assert ("one of ranks 0, 1 hangs, nothing tells which" in told) is not is_deadlock
