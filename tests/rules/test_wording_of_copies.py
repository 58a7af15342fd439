"""What is said of copies that differ, whoever holds them."""

from __future__ import annotations

from sentinel.rules.watches.wording import diverged
from sentinel.step_view import Differing


def test_a_rank_that_holds_several_copies_may_hold_both_kinds() -> None:
    """A weight that chunks of one rank share has a copy for each: of three on each rank one is wrong."""
    one = Differing(0, "", ((0,), (0,), (0,), (1,), (1,), (1,)), (9, 7, 7, 9, 7, 7))
    text = diverged("param", "tied.weight", one, [(0,), (1,)], True)
    assert text == (
        "param tied.weight on ranks 0, 1 differs between copies that the same rank holds: 0000000000000009, 0000000000000007"
    )


def test_the_one_that_differs_is_held_against_one_that_agrees() -> None:
    one = Differing(0, "", ((0,), (1,), (2,)), (7, 9, 7))
    text = diverged("param", "w", one, [(1,)], True)
    assert text == (
        "param w on rank 1 differs from its 2 copies that agree, on ranks 0, 2: 0000000000000009 against 0000000000000007"
    )
