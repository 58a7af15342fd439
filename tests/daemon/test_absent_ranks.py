"""What is kept of absent ranks has a bound, and counts a decision once."""

from __future__ import annotations

from sentinel.daemon.absent_ranks import MissingRanks, PartialSteps
from sentinel.decision import Decision


def test_of_any_number_of_ranks_a_few_are_named() -> None:
    partial = PartialSteps()
    decision = Decision(seq=7, run="run", attempt=0, step=3, ranks=(), missing=dict.fromkeys(range(1000), "late"))
    partial.take(decision)
    partial.take(decision)
    partial.take_late(dict.fromkeys(range(1000), 2))

    named = ", ".join(f"{rank} (late)" for rank in range(8))
    counted = ", ".join(f"{rank} (2)" for rank in range(8))
    assert partial.lines == [
        f"judged in part: 1 step (3) without ranks {named} and others",
        f"left out: 2,000 rows that came after their step was judged: of ranks {counted} and others (1,984)",
    ]
    missing = MissingRanks.of(1000, {999}, ())
    silent = ", ".join(f"{rank} (never heard)" for rank in range(8))
    assert missing.words == f"999 of 1,000 ranks are not heard: ranks {silent} and 991 more"
    assert not MissingRanks.of(1000, (), ()).words, "a run that nobody writes in is silent, or over"


def test_a_rank_that_says_its_world_is_endless_holds_up_nobody() -> None:
    missing = MissingRanks.of(2**62, {0, 2, 2**63}, ())
    assert missing.num_missing == 2**62 - 2 and [one.rank for one in missing.ranks] == [1, *range(3, 10)]
    assert MissingRanks.of(4, {0, 7}, ()).num_missing == 3
