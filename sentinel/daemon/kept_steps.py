"""Steps that were looked up in spools, without their rows: the newest are kept for as long as they cannot have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.explain.call_waits import CALLS, CallWait, call_waits
from sentinel.explain.pass_order import RankOrder, RankOrders
from sentinel.ingest.step_lookup import FoundPart, SpoolsSeen, StepLookup
from sentinel.messages import Descriptor, EndStep, Vector

MOST_KEPT = 16
"""Steps that are kept, of all runs together; of 2,048 ranks one takes some 4 MB."""


class LookedUpStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a run did in a step; of a rank that trained it twice what the newest attempt did."""

    step: int
    attempt: int
    """The newest of those that its ranks were in; 0 where none says."""
    orders: tuple[RankOrder, ...] = ()
    """Ranks rising. Empty: nothing of the step is in the spool any more."""
    ends: dict[int, EndStep | None] = {}
    """Rank -> its end of the step, without the values that it logged."""
    waits: tuple[CallWait, ...] = ()
    """Who waited for whom, the longest first."""
    num_unread: int = 0
    """Spools that were not looked into, for want of time."""
    num_without_rows: int = 0
    """Ranks of which no row is here, though they recorded some: these lie on their machines."""


class _Told(msgspec.Struct, frozen=True):
    """What is held of a rank while the others are read."""

    age: tuple[int, float]
    order: RankOrder
    end: EndStep | None
    calls: tuple[Vector, ...]
    has_rows: bool
    """Whether any that it recorded is here, or it recorded none."""
    descriptor: Descriptor
    """Its tensors are those of the calls."""


class KeptSteps:
    """Looks steps up, one at a time; what is kept may be asked for by any thread."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Path, int], tuple[SpoolsSeen, LookedUpStep]] = {}

    def known(self, run_dir: Path, step: int) -> LookedUpStep | None:
        """Return a step that is kept, and is as it was; None where it has to be looked up."""
        seen, kept = self._kept.get((run_dir, step), (None, None))
        return kept if seen is not None and seen.is_unchanged(run_dir) else None

    def look_up(self, run_dir: Path, step: int, goes_on: Callable[[], bool]) -> LookedUpStep:
        """Return a step out of the spools of a run, and keep it where all of them were read; goes_on as `StepLookup`'s."""
        lookup, orders = StepLookup(run_dir, step, goes_on), RankOrders()
        newest: dict[int, _Told] = {}
        for found in lookup:
            rank, age = found.part.rank, (found.attempt, found.part.time)
            if rank not in newest or newest[rank].age < age:
                newest[rank] = _told(found, age, orders)
        newest = dict(sorted(newest.items()))
        made = LookedUpStep(
            step=step,
            attempt=max((one.age[0] for one in newest.values()), default=0),
            orders=tuple(one.order for one in newest.values()),
            ends={rank: one.end for rank, one in newest.items()},
            waits=tuple(
                call_waits(
                    {rank: one.calls for rank, one in newest.items() if one.calls},
                    {rank: one.descriptor for rank, one in newest.items()},
                )
            ),
            num_unread=lookup.num_unread,
            num_without_rows=sum(not one.has_rows for one in newest.values()),
        )
        self._kept.pop((run_dir, step), None)
        # Rows that come later change neither the names nor the lengths of files.
        if not made.num_unread and not made.num_without_rows:
            self._kept[run_dir, step] = (lookup.seen, made)
            while len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return made


def _told(found: FoundPart, age: tuple[int, float], orders: RankOrders) -> _Told:
    part = found.part
    calls = tuple(one for one in found.vectors if one.statistic == CALLS)
    wanted = {one.tensor for one in calls}
    tensors = tuple(one for one in part.descriptor.tensors if one.id in wanted) if wanted else ()
    end = part.end_step and msgspec.structs.replace(part.end_step, scalars={}, samples=(), due={})
    has_rows = bool(len(part.rows)) or part.end_step is None or not part.end_step.num_rows
    return _Told(age, orders.of(part), end, calls, has_rows, msgspec.structs.replace(part.descriptor, tensors=tensors))
