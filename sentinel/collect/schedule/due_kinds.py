"""Which kinds a step measures, summed up over all wishes: most tensors need not be asked one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sentinel.collect.schedule.wishes import Request, Wish
from sentinel.record import Kind

MAX_SUMS = 64
"""Sums that are kept; a bound on memory, past which all are formed anew."""


class Due(NamedTuple):
    """What one step measures."""

    kinds: frozenset[int] = frozenset()
    """Kinds of which it measures some tensors, or all."""
    whole: frozenset[int] = frozenset()
    """Kinds of which it measures all tensors."""
    left_out: frozenset[Kind] = frozenset()
    """Kinds that it does not measure for what they cost."""
    copying: tuple[Request, ...] = ()
    """Requests that take copies of tensors."""


class DueKinds:
    """Sums wishes up, and keeps the sums: there are few sets of wishes that are due together."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], Due] = {}
        """Which wishes are due, and what is left out -> their sum."""

    def forget(self) -> None:
        """There are other wishes from now on."""
        self._sums = {}

    def of(self, wishes: Sequence[Wish], gone: Collection[Kind], rare: Sequence[Kind]) -> Due:
        """Return what the wishes that are due now measure.

        gone: kinds of the config that are switched off; rare: adjustable kinds that this step leaves out.
        """
        key = (*(wish.is_due for wish in wishes), *rare)
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) >= MAX_SUMS:
                self._sums = {}
            found = self._sums[key] = _sum_of(wishes, gone, rare)
        return found


def _sum_of(wishes: Sequence[Wish], gone: Collection[Kind], rare: Sequence[Kind]) -> Due:
    due: set[Kind] = set()
    whole: set[Kind] = set()
    left_out: set[Kind] = set()
    for wish in wishes:
        if wish.is_due:
            kinds = wish.kinds_without(gone)
            if wish.is_adjustable and rare:
                left_out |= kinds.intersection(rare)
                kinds = kinds.difference(rare)
            due |= kinds
            whole |= kinds if wish.stagger == 1 and not wish.targets else frozenset()
    asked = [wish.request for wish in wishes if wish.is_due and wish.request is not None]
    copying = tuple(request for request in asked if request.copy is not None)
    return Due(frozenset(map(int, due)), frozenset(map(int, whole)), frozenset(left_out - due), copying)
