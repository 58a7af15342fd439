"""What is said of ranks that make no progress: a deadlock only where all of them wait."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decision import RankFacts
from sentinel.rules.watches.wording import stale


def facts(rank: int, is_waiting: int, site: str = "", call_id: int = 0) -> RankFacts:
    return RankFacts(
        rank=rank,
        incarnation=bytes([rank]),
        received_at=0.0,
        moved_at=0.0,
        is_waiting=is_waiting,
        site=site,
        call_id=call_id,
    )


@pytest.mark.parametrize(("waiting", "is_deadlock"), [((1, 1), True), ((1, 2), True), ((1, 0), False), ((-1, -1), False)])
def test_a_deadlock_is_told_only_where_every_rank_waits(waiting: tuple[int, ...], is_deadlock: bool) -> None:
    ranks = [facts(rank, one) for rank, one in enumerate(waiting)]

    reported = stale("hung", ranks, 130.0, 120.0, (), is_sure=False)

    assert ("wait for each other" in reported) is is_deadlock
    assert ("one of ranks 0, 1 hangs, nothing tells which" in reported) is not is_deadlock


def test_ranks_at_one_place_are_told_together_and_the_odd_ones_first() -> None:
    many = [facts(rank, 1, "gpt/train.py:66 (main)", 70) for rank in range(63)]
    odd = facts(63, 1, "gpt/log.py:9 (report)", 12)

    reported = stale("hung", [*many, odd], 130.0, 120.0, (), is_sure=False)

    assert "last seen rank 63 in step 0, call 12, at gpt/log.py:9 (report), ranks 0, 1, 2, " in reported
    assert reported.endswith(" and 47 more in step 0, call 70, at gpt/train.py:66 (main)")


def test_of_many_places_four_are_told() -> None:
    reported = stale("hung", [facts(rank, 1, call_id=rank + 1) for rank in range(6)], 130.0, 120.0, (), is_sure=False)

    assert reported.endswith("rank 3 in step 0, call 4 and 2 more")


def test_of_ranks_whose_node_is_not_heard_either_that_is_said_and_what_to_look_at() -> None:
    ranks = [msgspec.structs.replace(facts(rank, -1), unheard_node="node-3") for rank in (4, 5)]

    assert stale("silent", ranks, 30.0, 30.0, (), is_sure=True).startswith(
        "ranks 4, 5 are silent: nothing was heard for 30 s, nor of node node-3, by which their records come: that process, "
        "its machine or its network is stopped or gone, and the ranks may train on; last seen ranks 4, 5"
    )
