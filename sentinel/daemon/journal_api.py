"""Answers what is asked of the journals of the runs that are served: what was found, and who did what."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.daemon.http.daemon_api import ShownIncident, UnknownIncident
from sentinel.daemon.serving import ServedRun
from sentinel.incident import Incident
from sentinel.report.alert import Alert
from sentinel.report.links import MessageLinks

MOST_MEMBERS = 200
"""Anomalies of an incident that are shown with it."""


class JournalQueries:
    """Over some runs, each asked in turn. For any thread."""

    def anomalies(self, runs: Sequence[ServedRun], *, limit: int, before: int | None, step: int | None) -> list[bytes]:
        """Return the newest anomalies as lines of JSON, newest first; as `Found.newest_anomalies` else."""
        found: list[bytes] = []
        for one in runs:
            newest = one.journal.found.newest_anomalies(limit - len(found), before, step)
            found += [body for _, body in newest]
        return found[:limit]

    def incidents(self, runs: Sequence[ServedRun], *, limit: int, is_open: bool) -> list[bytes]:
        """Return the newest revision of each incident as lines of JSON. is_open: of those that are open alone."""
        found: list[bytes] = []
        for one in runs:
            for body in one.journal.found.newest_incidents(limit):
                if not is_open or _STATE.decode(body).state == "open":
                    found.append(body)
        return found[:limit]

    def incident(self, runs: Sequence[ServedRun], incident: str, where: str, links: MessageLinks) -> ShownIncident:
        """Return an incident, open or over; UnknownIncident for none, or several. where: the runs that are asked."""
        found = [(one, bodies) for one in runs if (bodies := one.journal.found.incident_revisions(incident))]
        if len(found) != 1:
            what = (
                f"{len(found)} runs have one: say which with ?run=NAME"
                if found
                else "there is none, open or over; what is older than the retention is deleted"
            )
            raise UnknownIncident(f'incident "{incident[:80]}" of {where}: {what}')
        [(one, bodies)] = found
        revisions = tuple(msgspec.json.decode(body, type=Incident) for body in bodies)
        alert = Alert(key="", sink="", change="", incident=revisions[-1], context=one.context_of(revisions[-1]))
        return ShownIncident(
            revisions=revisions,
            context=alert.context,
            orders=one.commanding.orders_about(alert.incident),
            links=links.of(alert),
            anomalies=tuple(one.journal.found.anomaly_bodies(_shown_members(revisions))),
        )

    def audit(self, runs: Sequence[ServedRun], *, limit: int) -> list[dict[str, Any]]:
        """Return the newest entries of the audit, newest first."""
        entries: list[dict[str, Any]] = [
            {
                "run": one.name,
                "time": entry.time,
                "actor": entry.actor,
                "action": entry.action,
                "details": entry.details,
            }
            for one in runs
            for entry in one.journal.audit.newest(limit)
        ]
        return sorted(entries, key=lambda entry: -entry["time"])[:limit]


def _shown_members(revisions: Sequence[Incident]) -> list[str]:
    """Return the ids of the first causes and of what joined them, the newest revisions first; bounded."""
    joined = (one for revision in reversed(revisions) for one in revision.members)
    return list(dict.fromkeys(itertools.chain(revisions[-1].first_causes, joined)))[:MOST_MEMBERS]


class _OnlyState(msgspec.Struct):
    state: str


_STATE = msgspec.json.Decoder(_OnlyState)
