"""What is said of ranks that are all gone at once, and nobody was there to see."""

from __future__ import annotations

import pytest

from sentinel.decision import RankFacts
from sentinel.rules.watches.wording import ended
from sentinel.run_end import ALL_TOGETHER, EXCEPTION, FOLLOWS, SIGNAL, RankEnd, RunEnd


def test_ranks_gone_at_once_are_no_proof_that_somebody_ended_all() -> None:
    gone = RankEnd(how=SIGNAL, detail="without a word")
    ranks = [RankFacts(rank=rank, incarnation=bytes([rank]), received_at=0.0, moved_at=0.0, end=gone) for rank in range(2)]
    reported = ended(
        None, RunEnd(how=SIGNAL, step=11, detail=f"{ALL_TOGETHER}, 2 ranks within 0.036 s of one another"), ranks
    )

    assert reported.startswith("ranks 0, 1, in step 11, are gone without a word, all together, 2 ranks within 0.036 s")
    assert "either somebody ended all at once (SIGTERM or SIGKILL" in reported
    assert "or one was killed and its launcher ended the others at once" in reported


def test_of_a_rank_that_was_killed_because_it_ignored_sigterm_that_is_said() -> None:
    ends = [RankEnd(how=SIGNAL, detail="SIGKILL", has_memory=True, ignored_sigterm=is_deaf) for is_deaf in (True, False)]

    deaf, plain = (ended(0, end, []) for end in ends)

    assert "SIGTERM was ignored there, so that a launcher, a scheduler or a person who asked in vain had to kill" in deaf
    assert "the kernel counts no such kill" in deaf and "the kernel counts no such kill" in plain
    assert "SIGTERM" not in plain


def test_of_ranks_that_were_killed_together_those_that_lost_them_are_told_apart() -> None:
    kill, lost = RankEnd(how=SIGNAL, detail="SIGKILL"), RankEnd(how=EXCEPTION, detail="RuntimeError: reset", cause=FOLLOWS)
    ranks = [
        RankFacts(rank=rank, incarnation=bytes([rank]), received_at=0.0, moved_at=0.0, end=one)
        for rank, one in enumerate([kill, kill, lost])
    ]
    reported = ended(None, RunEnd(how=SIGNAL, step=11, detail="SIGKILL"), ranks)

    assert reported.startswith("ranks 0, 1, in step 11, were killed: SIGKILL; nothing tells which of them went first; ")
    assert "; rank 2 went with them; " in reported


def test_where_nothing_tells_who_went_first_each_is_told_with_its_step_and_its_last_sign_of_life() -> None:
    at = {0: (11, 1795389165.887), 1: (10, 1795389165.854), 2: (-1, 0.0)}
    ranks = [
        RankFacts(
            rank=rank, incarnation=bytes([rank]), received_at=0.0, moved_at=0.0,
            end=RankEnd(how=SIGNAL, detail="without a word", step=step, time=time),
        )
        for rank, (step, time) in at.items()
    ]  # fmt: skip
    reported = ended(
        None, RunEnd(how=SIGNAL, step=11, detail=f"{ALL_TOGETHER}, 2 ranks within 0.033 s of one another"), ranks
    )

    assert (
        "; nothing tells which of them went first; last signs of life: rank 2 at an unknown time, rank 1 at 23:12:45.854 in "
        "step 10, rank 0 at 23:12:45.887 in step 11 (UTC); either somebody ended all at once"
    ) in reported


def test_of_many_ranks_the_eight_oldest_signs_of_life_are_told() -> None:
    gone = [RankEnd(how=SIGNAL, detail="without a word", step=3, time=1000.0 + rank) for rank in range(20)]
    ranks = [
        RankFacts(rank=rank, incarnation=bytes([rank]), received_at=0.0, moved_at=0.0, end=one)
        for rank, one in enumerate(gone)
    ]
    reported = ended(None, RunEnd(how=SIGNAL, step=3, detail="without a word, 20 ranks within 19 s of one another"), ranks)

    assert "rank 7 at 00:16:47.000 in step 3 and 12 more (UTC)" in reported


def raised(text: str) -> RankEnd:
    return RankEnd(how=EXCEPTION, detail=f"RuntimeError: {text}")


@pytest.mark.parametrize(
    ("end", "advice"),
    [
        (raised("DataLoader worker (pid 9) is killed by signal: Killed. "), "loader's workers"),
        (raised("DataLoader worker (pid(s) 9, 8) exited unexpectedly"), "loader's workers"),
        (raised("Caught KeyError in DataLoader worker process 0"), "read the traceback"),
        (RankEnd(how=SIGNAL, detail="SIGHUP", is_asked=True), "its terminal was closed"),
        (RankEnd(how=SIGNAL, detail="SIGTERM", is_asked=True), "see who sent it"),
    ],
)
def test_what_to_do_fits_what_ended_it(end: RankEnd, advice: str) -> None:
    assert advice in ended(0, end, [])
