"""MessageLinks: where a message leads: to the incident's page, and to what the user has of runbooks and dashboards."""

from __future__ import annotations

import string
import urllib.parse
from collections.abc import Mapping

import msgspec

from sentinel.errors import ConfigError
from sentinel.known_words import nearest
from sentinel.report.alert import Alert
from sentinel.report.message import Link

PLACEHOLDERS: Mapping[str, str] = {
    "run": "the run's name",
    "incident": "the incident's id",
    "detector": "its first detector",
    "cause": "what is suspected, one word",
    "severity": "critical, warning or info",
    "module": "the module it began in, or its segment",
    "attempt": "number of the attempt",
    "step": "the step in which it opened",
    "rank": "the rank that it began on, or its first",
    "host": "host of that rank",
    "job": "id of the job",
    "from_ms": "half an hour before it opened, milliseconds since the epoch",
    "to_ms": "half an hour after this message was due, milliseconds since the epoch",
}
"""Names that `runbook_url` and `dashboard_url` may hold in braces, and what stands for each, percent-encoded."""
AROUND_S = 1800.0
"""Seconds that a dashboard shows before and after: enough to see what was normal."""


class MessageLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Templates of addresses; an empty one makes no link."""

    external_url: str = ""
    runbook_url: str = ""
    dashboard_url: str = ""

    def of(self, alert: Alert) -> tuple[Link, ...]:
        """Return the links of a message."""
        values = {name: urllib.parse.quote(value[:300], safe="", errors="replace") for name, value in _values(alert).items()}
        page = self.external_url.rstrip("/") + "/incidents/{incident}?run={run}" if self.external_url else ""
        named = [("incident", page), ("runbook", self.runbook_url), ("dashboard", self.dashboard_url)]
        return tuple(Link(name, template.format_map(values)) for name, template in named if template)


NO_LINKS = MessageLinks()


def check_template(url: str, path: str) -> None:
    """Raise ConfigError, with the dotted path, where a template of an address holds what nothing stands for."""
    try:
        parts = list(string.Formatter().parse(url))
    except ValueError as error:
        raise ConfigError(f"{path}: {str(error).lower()}; write {{{{ and }}}} for braces of the address itself") from error
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if spec or conversion:
            raise ConfigError(f"{path}: expected a plain name in braces, got {{{name}{conversion or ''}:{spec or ''}}}")
        if name not in PLACEHOLDERS:
            raise ConfigError(f"{path}: unknown name {{{name}}}{nearest(name, list(PLACEHOLDERS))}")
    parsed = urllib.parse.urlsplit(url)
    if url and (parsed.scheme not in ("http", "https") or not parsed.netloc):
        raise ConfigError(f"{path} must be an http or https address, got {url[:80]!r}")


def _values(alert: Alert) -> dict[str, str]:
    incident, context = alert.incident, alert.context
    first = context.ranks[0] if context.ranks else None
    opened = context.opened or incident.time
    rank = first.rank if first else incident.ranks[0] if incident.ranks else ""
    return {
        "run": incident.run, "incident": incident.id, "detector": incident.detectors[0] if incident.detectors else "",
        "cause": incident.suspected, "severity": incident.severity.value, "module": incident.module or incident.segment,
        "attempt": str(incident.attempt), "step": str(incident.opened_step), "rank": str(rank),
        "host": (first.node or first.host) if first else "", "job": context.job,
        "from_ms": str(int((opened - AROUND_S) * 1000)), "to_ms": str(int((alert.created + AROUND_S) * 1000)),
    }  # fmt: skip
