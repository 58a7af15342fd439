"""Whether what another package hands in can be called is said before it is called."""

from __future__ import annotations

import pytest

from sentinel.outside_calls import misfit


class Listener:
    def fits(self, one: int, two: int) -> None: ...
    def has_more(self, one: int, two: int, three: int = 0) -> None: ...
    def takes_any(self, *args: object) -> None: ...
    def takes_one(self, one: int) -> None: ...
    def takes_three(self, one, two, three): ...
    def needs_a_word(self, one, two, *, word): ...

    @staticmethod
    def is_static(one: int, two: int) -> None: ...

    @classmethod
    def is_of_the_class(cls, one: int, two: int) -> None: ...

    is_built_in = dict.fromkeys


@pytest.mark.parametrize("found", [Listener, Listener()])
@pytest.mark.parametrize("name", ["fits", "has_more", "takes_any", "is_static", "is_of_the_class", "is_built_in"])
def test_what_can_be_called_fits(found: object, name: str) -> None:
    assert misfit(found, {name: ("one", "two")}) == ""


@pytest.mark.parametrize("found", [Listener, Listener()])
@pytest.mark.parametrize(
    ("name", "takes"), [("takes_one", "one: 'int'"), ("takes_three", "one, two, three"), ("needs_a_word", "one, two, word")]
)
def test_what_cannot_be_called_is_named_with_what_it_takes(found: object, name: str, takes: str) -> None:
    assert misfit(found, {name: ("one", "two")}) == f"{name}(one, two) is called, and it takes ({takes})"
