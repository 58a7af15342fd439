"""Correlate: incidents of several runs that are alike, and open within a window, are told together and paged for once."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incident import Incident
from sentinel.report.alert import Alert, AlikeRuns, reports_end
from sentinel.report.stages.ledger import Ledger, Thread, thread_of
from sentinel.report.stages.pending import Pending, Turn

MAX_WINDOW_S = 86400.0
"""Longest window; a bound against a typing error that would take every incident for the same one."""
_PRECEDENCE = ("escalated", "opened", "reopened", "raised", "worse", "refined", "acknowledged")
"""Of several changes that are told together, the first of these names the message."""


class CorrelateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When incidents of several runs are told as one."""

    window_s: float = 120.0
    """What opens in another run within so many seconds after the first was told, and is like it, joins it: the same severity
    and detector, and the same module or segment, the same host, or, of ranks that fall silent and runs that end in the same
    words, the same file system. 0: every run is told of by itself."""

    interval_s: float = 60.0
    """Of what joined, what changed and what ended since, a message is sent at most this often, and it is no page. When all
    of them are over that is told at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.window_s <= MAX_WINDOW_S:
            raise ConfigError(f"notify.correlate.window_s must be in [0, {MAX_WINDOW_S:g}], got {self.window_s:g}")
        if not 0 < self.interval_s <= MAX_WINDOW_S:
            raise ConfigError(f"notify.correlate.interval_s must be in (0, {MAX_WINDOW_S:g}], got {self.interval_s:g}")


class Correlate:
    """Makes one message of what belongs to one thread. A thread that is of one incident passes as it is."""

    def __init__(self, config: CorrelateConfig) -> None:
        self._config = config

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return one a thread; what joins a thread that was told just now waits for its next update."""
        threads: dict[str, list[Pending]] = {}
        opening = _Openings(turn.ledger, turn.now - self._config.window_s) if self._config.window_s > 0 else None
        for one in sorted(pending, key=lambda one: one.since):
            joined = opening.joined(one) if opening is not None and not one.thread else ""
            one.thread = one.thread or joined or thread_of(one.where)
            threads.setdefault(one.thread, []).append(one)
        return [one for name, parts in threads.items() for one in self._due(parts, turn.ledger.thread(name), turn)]

    def _due(self, parts: list[Pending], thread: Thread | None, turn: Turn) -> list[Pending]:
        known = {} if thread is None else {thread_of((t.alert.incident.run, t.alert.incident.id)): t for t in thread.members}
        own = {thread_of(part.where) for part in parts}
        if thread is None or len(known.keys() | own) == 1:
            return [together(parts, thread)] if len(parts) > 1 else parts
        is_page = any(part.alert.is_page for part in parts) and not thread.was_paged
        is_escalation = any(part.alert.change == "escalated" for part in parts) and not thread.was_escalated
        if is_page or is_escalation or _is_whole_end(parts, thread):
            return [together(parts, thread, is_page=is_page or is_escalation)]
        begun = thread.last
        if all(part.is_end for part in parts):
            begun = max(begun, min(part.alert.created for part in parts))
        return [together(parts, thread, is_page=False)] if turn.is_due(begun, self._config.interval_s) else []


class _Openings:
    """What opened just now, by what it may have in common with others."""

    def __init__(self, ledger: Ledger, since: float) -> None:
        self._threads: dict[object, list[tuple[str, str]]] = {}
        """What several have in common -> (run, thread) of each, the first one first; ends that nobody was told of apart."""
        for name, thread in ledger.since(since):
            if thread.stands:
                for told in thread.members:
                    self._add(told.alert, name, is_end=False)

    def joined(self, one: Pending) -> str:
        """Return the thread that what opens belongs to; empty: it begins one."""
        run = one.alert.incident.run
        for trait in traits(one.alert):
            for other, name in self._threads.get((one.is_end, trait), ()):
                if other != run:
                    self._add(one.alert, name, is_end=one.is_end)
                    return name
        self._add(one.alert, thread_of(one.where), is_end=one.is_end)
        return ""

    def _add(self, alert: Alert, name: str, *, is_end: bool) -> None:
        for trait in traits(alert):
            known = self._threads.setdefault((is_end, trait), [])
            # Two runs are enough to find one that is another's.
            if all(run != alert.incident.run for run, _ in known) and len(known) < 2:
                known.append((alert.incident.run, name))


def traits(alert: Alert) -> list[tuple[str, ...]]:
    """Return what makes incidents of two runs alike, where they share one: so much that one cause is likely."""
    incident = alert.incident
    detectors = incident.detectors or ("",)
    common = {("in", place) for place in _places(incident)} | {("on", one.host) for one in alert.context.ranks if one.host}
    if incident.nature == "liveness" and alert.context.file_system:
        common.add(("at", f"{alert.context.file_system} {_without_numbers(incident.title)}"))
    return [(incident.severity.value, detector, *one) for detector in detectors for one in sorted(common)]


def together(parts: Sequence[Pending], thread: Thread | None, *, is_page: bool | None = None) -> Pending:
    """Return one message of several incidents of a thread, about the first of them. thread: what was told of it before.

    is_page: whether somebody should get up; None: where one of the parts is a page.
    """
    first = min(parts, key=lambda part: part.since)
    known = [] if thread is None else thread.members
    lead = first.alert if thread is None else thread.lead.alert
    newest = {part.where: part.alert for part in parts}
    everything = {(t.alert.incident.run, t.alert.incident.id): t.alert for t in known} | newest
    own = newest.get((lead.incident.run, lead.incident.id))
    incident = (own or lead).incident
    num_open = sum(not alert.is_closed for alert in everything.values())
    if num_open and not reports_end(incident):
        incident = msgspec.structs.replace(
            incident, state="open", severity=max((a.incident.severity for a in everything.values()), key=_level),
            paged=any(a.incident.paged for a in everything.values()),
        )  # fmt: skip
    runs = list(dict.fromkeys([incident.run, *(run for run, _ in everything)]))
    said = {part.alert.change for part in parts}
    change = next((change for change in _PRECEDENCE if change in said), first.alert.change)
    if not num_open and own is None and lead.is_closed and not reports_end(incident):
        change = lead.change
    return Pending(
        alert=msgspec.structs.replace(
            first.alert,
            incident=incident,
            context=(own or lead).context,
            change=change,
            is_page=any(part.alert.is_page for part in parts) if is_page is None else is_page,
            was_severity=None if thread is None else lead.incident.severity,
            was_paged=thread is not None and thread.was_paged,
            alike=AlikeRuns(
                runs=tuple(runs[:MAX_RUNS]), num_runs=len(runs), num_incidents=len(everything), num_open=num_open
            ),
        ),
        positions=[position for part in parts for position in part.positions],
        since=first.since,
        told=None if thread is None else thread.lead,
        thread=first.thread,
        parts=list(parts),
        num_failures=max(part.num_failures for part in parts),
        is_maybe_received=any(part.is_maybe_received for part in parts),
    )


MAX_RUNS = 20
"""Runs that a message names; a bound on its length."""


def _is_whole_end(parts: Sequence[Pending], thread: Thread) -> bool:
    ended = {part.where for part in parts if part.is_end}
    still = {(t.alert.incident.run, t.alert.incident.id) for t in thread.members if not t.is_over}
    return len(ended) == len(parts) and still <= ended


def _without_numbers(title: str) -> str:
    return re.sub(r"[0-9]+(?:\.[0-9]+)?", "#", title)


def _level(severity: Severity) -> int:
    return severity.level


def _places(incident: Incident) -> set[str]:
    """Return the modules and segments that an incident began in."""
    name, _, rest = incident.root_name.partition(" ")
    is_place = rest.startswith("(") and not rest.startswith("(scalar)")
    return set(filter(None, (incident.module, incident.segment, name if is_place else "")))
