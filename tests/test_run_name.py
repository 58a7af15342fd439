"""A run's name and its folder: injective, plain for every file system, undone for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.run_name import FOLDER, MAX_BYTES, folder_name, given_name, numbered

NAMES = [
    "exp", "exp \u03b1", "exp \u03b2", "exp--", "exp  ", ".hidden", "..", "a/b", "a%2Fb", "x" * 300,
    "x" * 301, "50%", "-r", "a+2",
    "\u00e9" * 60,
]  # fmt: skip


def test_names_that_differ_have_folders_that_differ() -> None:
    folders = [folder_name(name) for name in NAMES]

    assert len(set(folders)) == len(NAMES)
    assert all(FOLDER.fullmatch(one) and len(one) <= MAX_BYTES for one in folders)
    assert folder_name("exp \u03b1") == "exp%20%CE%B1"
    assert folder_name("exp.1_b-2") == "exp.1_b-2"


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_folders_are_injective_and_undone(one: str, other: str) -> None:
    assert (folder_name(one) == folder_name(other)) == (one == other)
    assert FOLDER.fullmatch(folder_name(one))
    if len(folder_name(one)) < MAX_BYTES - 20 and one.isprintable():
        assert given_name(folder_name(one)) == one


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_users_is_that_of_a_further_training(name: str) -> None:
    assert numbered("exp", 2) == "exp+2" != folder_name(name)
    assert numbered(folder_name(name), 1) == folder_name(name)
