"""Which changes of an incident make a revision: what a reader would act on at once, what merely goes on ever more seldom.

A fault that lasts for a million steps changes its numbers in each of them. Revised at each, its file would hold a million
lines that say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from sentinel.incident import Incident
from sentinel.incidents.open_incident import OpenIncident

GROWTH = 8
"""A revision is made when what changed since the last one is an eighth of all that changed so far (chosen): the first eight
changes at once, of a million about a hundred."""

MAX_WAITING = 1000
"""Most members that wait for a revision, a bound on memory and on the length of a line."""

_GOES_ON = frozenset({"revision", "members", "num_members", "last_step", "active_step", "time", "ranks"})
"""Fields that change while a fault merely goes on."""
_LISTS = frozenset({"skip_steps", "skip_samples"})
"""Lists of the newest, whose length says whether there is anything to act on: a full one moves on with each step."""
_NUMBERS = re.compile(r"\d[\d.,:e+-]*(?:,? \d[\d.,:e+-]*)*")


def published(one: OpenIncident, joined: Sequence[str], before: Incident | None, time: float) -> Incident | None:
    """Return the revision to write of an incident behind a step; None: what changed waits for a later one.

    joined: ids of the anomalies that joined in this step. before: the incident before this step; None: it is new.
    """
    if joined or before != one.incident:
        one.unpublished = [*one.unpublished, *joined]
        one.num_changes += 1
        one.num_withheld += 1
    if not one.num_withheld or not _is_due(one, before):
        return None
    one.incident = msgspec.structs.replace(
        one.incident, revision=one.incident.revision + 1, members=tuple(one.unpublished), time=max(time, one.incident.time)
    )
    revision = one.incident
    # The next revision says what joined with it alone: to compare with, the members of this one are laid off.
    one.incident = msgspec.structs.replace(one.incident, members=())
    one.unpublished, one.num_withheld = [], 0
    return revision


def _is_due(one: OpenIncident, before: Incident | None) -> bool:
    if before is None or _is_news(before, one.incident):
        return True
    num_waiting = len(one.unpublished)
    if num_waiting and num_waiting * GROWTH >= min(one.incident.num_members, MAX_WAITING * GROWTH):
        return True
    return one.num_withheld * GROWTH >= one.num_changes


def _is_news(before: Incident, now: Incident) -> bool:
    """Return whether a reader would act on what changed: anything but numbers and members."""
    for name in Incident.__struct_fields__:
        former, value = getattr(before, name), getattr(now, name)
        if former == value or name in _GOES_ON:
            continue
        if name == "evidence" and _wording(former) == _wording(value):
            continue
        if name in _LISTS and len(former) == len(value):
            continue
        return True
    return False


def _wording(lines: Iterable[str]) -> list[str]:
    return [_NUMBERS.sub("#", line) for line in lines]
