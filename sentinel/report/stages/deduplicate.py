"""Deduplicate: of all that waits about one incident only the newest word; TellEnds: of ends only those of what was told."""

from __future__ import annotations

import msgspec

from sentinel.anomaly import Severity
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.stages.ledger import Where
from sentinel.report.stages.pending import Pending, Turn

OPENINGS = ("opened", "reopened", "escalated")
"""Changes that are told to whoever was told nothing before."""


class Deduplicate:
    """The newest word on an incident inherits what was due: a page stays a page, and an opening an opening."""

    def __init__(self, route: RouteConfig) -> None:
        self._wants_openings = "opened" in route.changes

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return one an incident, against what the sink was told of it."""
        newest: dict[Where, Pending] = {}
        for one in pending:
            older = newest.pop(one.where, None)
            newest[one.where] = one if older is None else superseding(one, older)
        kept = []
        for one in newest.values():
            told = turn.ledger.get(one.where)
            if told is not None and told.is_over and one.is_end:
                turn.settle(one, "superseded")
                continue
            if told is None and one.alert.follows and one.alert.change not in OPENINGS:
                turn.settle(one, "superseded")
                continue
            one.told = None if told is None or told.is_over else told
            one.thread = "" if told is None else told.thread
            one.alert = self._against(one)
            if one.alert.change == "escalated" and one.alert.incident.acknowledged(turn.now):
                turn.settle(one, "superseded")
                continue
            kept.append(one)
        return kept

    def _against(self, one: Pending) -> Alert:
        """Return the alert as news to somebody who was told what the ledger says."""
        alert, told = one.alert, one.told
        if told is not None:
            former = told.alert.incident
            is_page = alert.is_page and (alert.change == "escalated" or not former.paged)
            return msgspec.structs.replace(
                alert, was_severity=former.severity, was_paged=former.paged, is_page=is_page,
                change="raised" if alert.change == "opened" else alert.change,
            )  # fmt: skip
        if one.is_end or not self._wants_openings or alert.change in OPENINGS:
            return alert
        return msgspec.structs.replace(alert, change="opened", is_page=alert.incident.paged)


class TellEnds:
    """Whoever was told of an incident is told its end. Whoever was not is told of a critical one, opening and end in one."""

    def __init__(self, route: RouteConfig) -> None:
        self._wants_openings = "opened" in route.changes

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return all but the ends that nobody waits for."""
        kept = []
        for one in pending:
            is_unheard = one.is_end and one.told is None and self._wants_openings
            if is_unheard and one.alert.change == "merged":
                turn.settle(one, "superseded")
            elif is_unheard and one.alert.incident.severity is not Severity.CRITICAL and not one.alert.incident.paged:
                turn.settle(one, "brief")
            else:
                kept.append(one)
        return kept


def superseding(one: Pending, older: Pending) -> Pending:
    """Return the newer of two words on an incident with what was due of the older."""
    alert, former = one.alert, older.alert
    change = former.change if former.change in OPENINGS and not one.is_end else alert.change
    return Pending(
        alert=msgspec.structs.replace(
            alert,
            change="escalated" if alert.change == "escalated" else change,
            is_page=(alert.is_page or former.is_page) and not one.is_end,
            was_severity=former.was_severity,
            was_paged=former.was_paged,
        ),
        positions=one.positions + older.positions,
        since=min(one.since, older.since),
        num_failures=max(one.num_failures, older.num_failures),
        is_maybe_received=one.is_maybe_received,
    )
