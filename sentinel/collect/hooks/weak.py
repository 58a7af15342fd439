"""Weak references to methods and objects: what torch, threads and exit handlers hold of a monitor keeps no model alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def weakly(method: Callable[..., T]) -> Callable[..., T | None]:
    """Return a function that calls a bound method while its object exists, and returns None afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> T | None:
        alive = reference()
        return None if alive is None else alive(*args, **kwargs)

    return call


class WeakList(Generic[T]):
    """Objects in the order in which they were added, each once, held weakly and compared by identity."""

    def __init__(self, when_empty: Callable[[], None]) -> None:
        """when_empty: called when the last one is gone or was removed; in any thread."""
        self._references: list[weakref.ref[Any]] = []
        self._when_empty = when_empty

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            one = reference()
            if one is not None:
                yield one

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, one: object) -> bool:
        return any(other is one for other in self)

    def append(self, one: T) -> None:
        """Add an object that is not in yet."""
        if one not in self:
            # A new list each time: whoever goes through the old one is not disturbed.
            self._references = [*self._references, weakref.ref(one, self._forget)]

    def remove(self, one: T) -> None:
        """Remove an object, if it is in."""
        self._keep([reference for reference in self._references if reference() is not one])

    def _forget(self, reference: weakref.ref[Any]) -> None:
        self._keep([other for other in self._references if other is not reference])

    def _keep(self, references: list[weakref.ref[Any]]) -> None:
        had_any, self._references = bool(self._references), references
        if had_any and not references:
            self._when_empty()
