"""AlertContext: what a message says of an incident that judging it does not need: when it began, and on which machines."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from sentinel.incident import Incident
from sentinel.rank_identity import RankIdentity

MAX_RANKS = 4
"""Ranks of an incident whose machines are named; a bound on the length of a message, which counts the others."""


class AlertContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Committed with the alert, so that a message says what was known when it was due. Never part of the judgement."""

    opened: float = 0.0
    """Seconds since the epoch of the revision with which the incident opened; 0: not known."""
    ranks: tuple[RankIdentity, ...] = ()
    """Where it began, and the first of the incident's other ranks; of an incident that names none, of its attempt."""
    origin: int = -1
    """The rank that it began on, which is the first of `ranks`; -1: not known."""
    num_ranks: int = 0
    """How many ranks the incident, or else its attempt, has."""
    job: str = ""
    """Id of the job, where all ranks of the attempt are of one."""
    file_system: str = ""
    """Which file system the run writes to, as the daemon sees it; equal for runs that share one. Empty: not known."""
    labels: dict[str, str] = {}
    """Labels that all ranks of the attempt have."""


def context_of(incident: Incident, identities: Mapping[int, RankIdentity], opened: float) -> AlertContext:
    """Return the context of an incident. identities: rank -> where it runs, of the incident's attempt."""
    known = list(identities.values())
    jobs = {one.job for one in known}
    origin = origin_of(incident)
    ranks = sorted(incident.ranks or identities, key=lambda rank: (rank != origin, rank))
    named = [identities[rank] for rank in ranks if rank in identities]
    common = dict(known[0].labels) if known else {}
    for one in known[1:]:
        common = {name: value for name, value in common.items() if one.labels.get(name) == value}
    return AlertContext(
        opened=opened,
        # Labels are said once, for all of them.
        ranks=tuple(msgspec.structs.replace(one, labels={}) for one in named[:MAX_RANKS]),
        origin=origin if named and named[0].rank == origin else -1,
        num_ranks=len(incident.ranks) or len(identities),
        job=jobs.pop() if len(jobs) == 1 else "",
        labels=common,
    )


def origin_of(incident: Incident) -> int:
    """Return the rank that an incident began on, as its root's words have it; -1: they name none of its ranks."""
    found = re.search(r"\brank (\d{1,9})\b", incident.root_name[:1000])
    rank = int(found[1]) if found else -1
    return rank if not incident.ranks or rank in incident.ranks else -1
