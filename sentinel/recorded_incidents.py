"""Recorded incidents: all revisions in a run's file, which incident a word means, and who belongs to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import MALFORMED, ConfigError
from sentinel.incident import Incident


def incident_revisions(directory: Path) -> list[Incident]:
    """Return all revisions in a run's `incidents.jsonl`, as written; a torn last line is left out."""
    path = next((p for p in (directory / "incidents.jsonl", directory.parent / "incidents.jsonl") if p.is_file()), None)
    return [] if path is None else revisions_in(path.read_bytes().split(b"\n"))


def revisions_in(lines: Iterable[bytes]) -> list[Incident]:
    """Return the revisions that lines of JSON hold, in their order; what is none is left out."""
    revisions = []
    for line in lines:
        try:
            revisions.append(msgspec.json.decode(line, type=Incident))
        except MALFORMED:
            continue
    return revisions


def find_incident(revisions: Sequence[Incident], wanted: str) -> str:
    """Return the id of the incident that a prefix, `worst` or `latest` means; ConfigError when it means none, or several.

    worst: the gravest of those that are open, the newest of equals; where none is open, the newest that is more than a note.
    latest: the newest.
    """
    newest = newest_revisions(revisions)
    if not newest:
        raise ConfigError(f'"{wanted}": expected an incident, but none is recorded here')
    if wanted in ("worst", "latest"):
        opened = {i.id: (i.time, i.attempt, i.opened_step, i.id) for i in reversed(revisions)}
        own = [one for one in newest.values() if one.state != "merged"] or list(newest.values())
        if wanted == "worst":
            own = worst_open(own) or [one for one in own if one.severity is not Severity.INFO] or own
        return max((one.id for one in own), key=lambda one: opened[one])
    ids = sorted(newest)
    matching = [one for one in ids if one.startswith(wanted)] if wanted else []
    if len(matching) != 1:
        what = "several" if matching else "no"
        raise ConfigError(f'"{wanted}": {what} incident has an id that begins so; known: {", ".join((matching or ids)[:8])}')
    return matching[0]


def worst_open(incidents: Iterable[Incident]) -> list[Incident]:
    """Return of some incidents the gravest that are open."""
    still_open = [one for one in incidents if one.state == "open"]
    most = max((one.severity.level for one in still_open), default=0)
    return [one for one in still_open if one.severity.level == most]


def gravity(one: Incident) -> tuple[bool, int, int, str]:
    """Return the key that sorts incidents: the open ones first, of them the gravest, of equals the newest."""
    return one.state != "open", -one.severity.level, -one.opened_step, one.id


def newest_revisions(revisions: Iterable[Incident]) -> dict[str, Incident]:
    """Return the newest revision of each incident, by id."""
    newest: dict[str, Incident] = {}
    for incident in revisions:
        if incident.id not in newest or newest[incident.id].revision <= incident.revision:
            newest[incident.id] = incident
    return newest


def incident_members(revisions: Sequence[Incident], incident: str) -> frozenset[str]:
    """Return the ids of all anomalies of an incident, those of incidents merged into it among them."""
    newest = newest_revisions(revisions)
    family = {incident}
    grows = True
    while grows:
        more = {one.id for one in newest.values() if one.merged_into in family} - family
        family |= more
        grows = bool(more)
    return frozenset(member for one in revisions if one.id in family for member in one.members)


def no_causes(revisions: Sequence[Incident]) -> frozenset[str]:
    """Return the ids of anomalies that are causes of nothing grave: of incidents that stayed notes, or are about timing."""
    newest = newest_revisions(revisions)
    mere = {
        one.id
        for one in newest.values()
        if one.state != "merged" and (one.severity is Severity.INFO or one.nature == "liveness")
    }
    mere |= {one.id for one in newest.values() if one.merged_into in mere}
    return frozenset(member for one in revisions if one.id in mere for member in one.members)
