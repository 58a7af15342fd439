"""Two figures that stand side by side are told apart, or said to be one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.anomaly_words import against_words, told_apart
from sentinel.incidents.titles import title_words
from sentinel.order.origin import origin
from sentinel.rules.watches.wording import excursion, skewed

from .support.anomalies import an_excursion


@pytest.mark.parametrize(
    ("value", "baseline", "words"),
    [
        (5.2, 2.1, " 5.2 against 2.1"),
        (0.20572, 0.20568, " 0.20572 against 0.20568"),
        (0.2057, math.nextafter(0.2057, 1.0), " 0.20569999999999999 against 0.20570000000000002"),
        (1.0, 1.0, " 1, exactly its baseline"),
        (3.0, None, " 3"),
        (None, 3.0, " against 3"),
        (None, None, ""),
    ],
)
def test_a_value_against_its_baseline_in_words(value: float | None, baseline: float | None, words: str) -> None:
    assert against_words(value, baseline) == words


@pytest.mark.property
@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_two_numbers_are_the_same_words_only_when_they_are_equal(one: float, other: float) -> None:
    first, second = told_apart(one, other)

    assert (first == second) <= (one == other)
    assert len(first.lstrip("-").partition("e")[0].replace(".", "").lstrip("0")) <= 17


def test_a_title_and_a_message_never_hold_a_number_against_itself() -> None:
    root = an_excursion("scalar", "loss", statistic="value", value=0.20572, baseline=0.20568)

    assert "loss 0.20572 against 0.20568 at step 5" in title_words(root, origin(root))
    assert excursion("scalar", "loss", "value", 0.205681, 0.205682, 1.1, 1, "").startswith(
        "loss is 0.205681, its baseline 0.205682 ("
    )
    assert excursion("scalar", "loss", "value", 2.0, 2.0, 1.1, 1, "").startswith("loss is 2, exactly its baseline (")
    assert "is 0.205721, that of ranks 1, 2 0.205722;" in skewed(
        "scalar", "loss", "value", 0, 0.205721, 0.205722, (1, 2), False
    )
