"""Ranks as people write them."""

from __future__ import annotations

import pytest

from sentinel.errors import ConfigError
from sentinel.rank_list import ranks_in


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("", ()), ("3", (3,)), ("8-10, 0", (0, 8, 9, 10)), ("1,1-2,2", (1, 2)), ("7-7", (7,)), ("0-15", tuple(range(16)))],
)
def test_numbers_and_ranges_name_each_rank_once(text: str, ranks: tuple[int, ...]) -> None:
    assert ranks_in(text, "rank", 16) == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", 'rank: expected ranks and ranges of them, as in 0,8-15, got "x"'),
        ("-1", 'got "-1"'),
        ("3-1", 'expected a range that rises, got "3-1"'),
        ("0-999999999", 'expected at most 16 ranks, got more with "0-999999999"'),
        ("1,2,10-30", 'got more with "10-30"'),
        ("\u0663", "expected ranks"),
    ],
)
def test_what_names_no_ranks_or_too_many_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ranks_in(text, "rank", 16)
