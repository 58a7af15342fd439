"""A step of a run whole, as its spools have it: for tests that look at all of its rows at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.ingest.step_lookup import FoundPart, StepLookup
from sentinel.messages import Vector
from sentinel.step_view import RankStep


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks recorded of one step."""

    step: int
    attempt: int
    """The newest of those that its ranks were in; 0 where none says."""
    parts: tuple[RankStep, ...] = ()
    """Ranks rising; of one that trained the step twice the newest attempt. Empty: nothing of it is in the spool any more."""
    vectors: dict[int, tuple[Vector, ...]] = {}
    """Rank -> its vectors."""
    num_unread: int = 0
    """Spools that were not looked into, for want of time."""


def read_step(run_dir: Path, step: int, goes_on: Callable[[], bool] = lambda: True) -> RecordedStep:
    """Return what the spool of a run has of a step, whole; goes_on as for `StepLookup`."""
    lookup = StepLookup(run_dir, step, goes_on)
    newest: dict[int, FoundPart] = {}
    for found in lookup:
        known = newest.get(found.part.rank)
        if known is None or (known.attempt, known.part.time) < (found.attempt, found.part.time):
            newest[found.part.rank] = found
    ranks = sorted(newest)
    return RecordedStep(
        step=step,
        attempt=max((newest[rank].attempt for rank in ranks), default=0),
        parts=tuple(newest[rank].part for rank in ranks),
        vectors={rank: newest[rank].vectors for rank in ranks if newest[rank].vectors},
        num_unread=lookup.num_unread,
    )
