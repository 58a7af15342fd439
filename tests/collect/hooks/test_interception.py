"""Attributes of torch that several interceptions replace are torch's own again, whoever ends first."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from sentinel.collect.hooks.interception import Interception


class Owner:
    def method(self) -> list[str]:
        return []


class Heir(Owner):
    """Inherits the method, which is put on it and taken off again."""


class User:
    pass


def naming(name: str, owner: type) -> Interception[User]:
    """An interception whose method adds its name to what the one below it returns."""

    def replace(interception: Interception[User]) -> None:
        original: Callable[..., Any] = owner.method  # type: ignore[attr-defined]
        interception.replace(owner, "method", lambda self: [*original(self), name])

    return Interception(replace)


@pytest.mark.parametrize("owner", [Owner, Heir])
@pytest.mark.parametrize("ends", list(itertools.permutations("abc")))
def test_whoever_leaves_first_the_attribute_is_as_before(owner: type, ends: tuple[str, ...]) -> None:
    stored = dict(vars(owner))
    interceptions, users = {name: naming(name, owner) for name in "abc"}, {name: User() for name in "abc"}
    for name in "abc":
        interceptions[name].join(users[name])
    assert owner().method() == ["a", "b", "c"]

    for name in ends:
        interceptions[name].leave(users[name])
        assert interceptions[name].names == frozenset()

    assert owner().method() == [] and dict(vars(owner)) == stored


def test_one_that_comes_again_below_another_is_on_top_of_it() -> None:
    below, above, user, other = naming("below", Owner), naming("above", Owner), User(), User()
    original = Owner.method
    below.join(user)
    above.join(other)
    below.leave(user)
    below.join(user)

    assert Owner().method()[-2:] == ["above", "below"]
    above.leave(other)
    below.leave(user)
    assert Owner.method is original


def test_what_somebody_else_put_on_top_stays() -> None:
    ours, user = naming("ours", Owner), User()
    original = Owner.method
    ours.join(user)
    theirs = Owner.method = lambda self: ["theirs"]  # type: ignore[method-assign]
    try:
        ours.leave(user)

        assert Owner.method is theirs
    finally:
        Owner.method = original  # type: ignore[method-assign]


def test_who_imported_a_function_has_ours_under_whatever_name_and_the_function_again_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function() -> str:
        return "torch"

    def ours() -> str:
        return "ours"

    modules = {path: ModuleType(path) for path in ("outsider", "torchlike", "torch.inside")}
    for path, module in modules.items():
        vars(module).update(function=function, another=function, other=len)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setitem(sys.modules, "no.module", 7)  # type: ignore[arg-type]  # anything may stand there
    interception: Interception[User] = Interception(lambda calls: calls.replace_imported({function: ours}))
    user = User()
    interception.join(user)

    for path in ("outsider", "torchlike"):
        assert (modules[path].function, modules[path].another, modules[path].other) == (ours, ours, len)
    assert modules["torch.inside"].function is function
    interception.leave(user)
    assert all(module.function is module.another is function for module in modules.values())
