"""PagerDuty, Events API v2: an incident of ours is one of theirs, triggered, acknowledged and resolved under one key."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incident import Incident
from sentinel.report.alert import Alert, RouteConfig, reports_end
from sentinel.report.message import AlertMessage, end_cut, visible
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.delivery import Delivery, Poster, SinkParts, check_url
from sentinel.report.sinks.secret import read_secret
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates

MAX_SUMMARY = 1024
MAX_KEY = 255
MAX_SOURCE = 255
SEVERITIES = {Severity.CRITICAL: "critical", Severity.WARNING: "warning", Severity.INFO: "info"}


class PagerDutyConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="pagerduty"
):
    """One integration of PagerDuty. Its routing key is a secret."""

    name: str = "pagerduty"
    """Name in metrics and in the outbox; unique."""

    routing_key_file: str = ""
    """File that holds the integration's routing key, 32 characters."""

    routing_key_env: str = ""
    """Environment variable that holds it."""

    url: str = "https://events.pagerduty.com/v2/enqueue"
    """Where events go; in the EU `https://events.eu.pagerduty.com/v2/enqueue`."""

    route: RouteConfig = RouteConfig(min_severity=Severity.CRITICAL)
    """What is sent; by default critical incidents."""

    templates: MessageTemplates = NO_TEMPLATES
    """Texts of your own."""

    rate_per_s: float = 2.0
    """Most events a second, on average; PagerDuty allows 120 a minute."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def build(self, parts: SinkParts) -> PagerDutySink:
        """Return the sink; `SinkSettings.build`."""
        return PagerDutySink(self, parts.poster(self.timeout_s), parts.environ, parts.writer(self.name, self.templates))


class PagerDutySink:
    """Posts one event an alert: the interface takes no more, and groups by itself."""

    digest_after = 0
    max_batch = 1

    def __init__(self, config: PagerDutyConfig, poster: Poster, environ: Mapping[str, str], writer: MessageWriter) -> None:
        path = f"notify.sinks.{config.name}"
        self.name = config.name
        self._url = check_url(config.url, f"{path}.url")
        self._key = read_secret(f"{path}.routing_key", config.routing_key_file, config.routing_key_env, environ)
        if not self._key:
            raise ConfigError(
                f"{path}.routing_key: expected routing_key_file or routing_key_env, which says where the key is; got neither"
            )
        self._poster = poster
        self._writer = writer

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Post one event."""
        return self._poster.post(self._url, msgspec.json.encode(self.event(alerts[0])), {}, now)

    def event(self, alert: Alert) -> dict[str, Any]:
        """Return the event of an alert."""
        action = _action(alert)
        event: dict[str, Any] = {"routing_key": self._key, "event_action": action, "dedup_key": dedup_key(alert.incident)}
        if action == "trigger":
            message = self._writer.write(alert)
            event["payload"] = self._payload(alert, message)
            event["links"] = [{"href": one.url, "text": one.name} for one in message.links]
            event["client"] = "Sentinel"
            if message.link:
                event["client_url"] = message.link
        return event

    def _payload(self, alert: Alert, message: AlertMessage) -> dict[str, Any]:
        incident, context = alert.incident, alert.context
        first = context.ranks[0] if context.ranks else None
        opened = context.opened or incident.time or alert.created
        details = (
            {"run": message.run, "text": message.body} if message.body else {"run": message.run, **dict(message.fields)}
        )
        return {
            "summary": message.summary(MAX_SUMMARY),
            "source": end_cut(((first.node or first.host) if first else "") or message.run, MAX_SOURCE) or "sentinel",
            "severity": SEVERITIES[incident.severity],
            "timestamp": datetime.datetime.fromtimestamp(opened, datetime.UTC).isoformat(timespec="milliseconds"),
            "component": visible(incident.module or incident.segment or incident.root_name, MAX_SOURCE),
            "group": end_cut(message.run, MAX_SOURCE),
            "class": visible(incident.detectors[0] if incident.detectors else incident.suspected, MAX_SOURCE),
            "custom_details": {"run": message.run, **details},
        }


def _action(alert: Alert) -> str:
    # The end of a run is news that nobody's end takes back: a person resolves it.
    if alert.is_closed and not reports_end(alert.incident):
        return "resolve"
    return "acknowledge" if alert.change == "acknowledged" else "trigger"


def dedup_key(incident: Incident) -> str:
    """Return `run:incident`; of a run with a long name a hash of it, within PagerDuty's 255 characters."""
    key = f"{incident.run}:{incident.id}"
    if len(key) <= MAX_KEY and key.isprintable():
        return key
    return "sentinel:" + hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
