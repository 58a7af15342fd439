"""Names that spreadsheets would run as formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.csv_text import FORMULA, guarded, unguarded


@given(st.text(alphabet="'=+-@\t\ra.1", max_size=6))
def test_every_text_comes_back_and_none_begins_like_a_formula(text: str) -> None:
    cell = guarded(text)

    assert not cell.startswith(FORMULA)
    assert unguarded(cell) == text


@pytest.mark.parametrize("name", ["layers.0.weight", ".input", "'quoted'", "loss", ""])
def test_usual_names_stay_as_they_are(name: str) -> None:
    assert guarded(name) == unguarded(name) == name
