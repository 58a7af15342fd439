"""Alertmanager, API v2: one alert per open incident, sent again while it stands, resolved when it closes.

Labels name the incident and nothing that changes by itself: no step, no value, no time (those are annotations). When
severity or paging changes, the labels change with it: the alert under the old labels is resolved in the same request.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incident import Incident
from sentinel.report.alert import Alert, RouteConfig, reports_end
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.delivery import Delivery, Poster, SinkParts, check_url
from sentinel.report.sinks.secret import read_secret
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates

LEAST_INTERVALS = 4
"""An alert may be missed for so many intervals before it resolves itself; clients of Alertmanager take 3 to 4."""
END_STANDS_S = 3600.0
"""Seconds after which the alert about how a run ended, which is sent once, resolves itself. Too small: an Alertmanager that
waits for its group notifies nobody; too large: a run that is over stays on the list of alerts."""
MAX_SUMMARY = 1000
"""Characters of the annotation that receivers show first."""
RESERVED_LABELS = frozenset({"alertname", "run", "incident", "severity", "page"})


class AlertmanagerConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="alertmanager"
):
    """One Alertmanager, or all peers of a cluster."""

    name: str = "alertmanager"
    """Name in metrics and in the outbox; unique."""

    urls: tuple[str, ...] = ("http://127.0.0.1:9093",)
    """Addresses, path prefix included; every alert is sent to every peer of a cluster, and one answer is enough."""

    bearer_file: str = ""
    """File that holds a bearer token."""

    bearer_env: str = ""
    """Environment variable that holds a bearer token."""

    labels: dict[str, str] = {}
    """Labels put on every alert: cluster, team. None of alertname, run, incident, severity, page."""

    route: RouteConfig = RouteConfig()
    """Incidents that are sent; by default every one from warning on."""

    templates: MessageTemplates = NO_TEMPLATES
    """Texts of your own."""

    resend_interval_s: float = 60.0
    """Open incidents are sent again this often."""

    resolve_after_s: float = 86400.0
    """An open incident that was not sent again for so long resolves itself at Alertmanager, without our word. Longer than
    any absence of the daemon: a shorter one calls an alarm off while nobody judges, and raises it again later. At least
    four times `resend_interval_s`."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigError(f"notify.sinks.{self.name}.urls must name at least one address, got none")
        if not 1.0 <= self.resend_interval_s <= 3600.0:
            raise ConfigError(
                f"notify.sinks.{self.name}.resend_interval_s must be in [1, 3600], got {self.resend_interval_s}"
            )
        if not self.resolve_after_s >= LEAST_INTERVALS * self.resend_interval_s:
            raise ConfigError(
                f"notify.sinks.{self.name}.resolve_after_s must be at least {LEAST_INTERVALS} times resend_interval_s "
                f"({LEAST_INTERVALS * self.resend_interval_s:g}), got {self.resolve_after_s:g}"
            )
        taken = RESERVED_LABELS.intersection(self.labels)
        if taken:
            raise ConfigError(f"notify.sinks.{self.name}.labels must not set {', '.join(sorted(taken))}")

    def build(self, parts: SinkParts) -> AlertmanagerSink:
        """Return the sink; `SinkSettings.build`."""
        return AlertmanagerSink(self, parts.poster(self.timeout_s), parts.environ, parts.writer(self.name, self.templates))


Identity = tuple[str, str, Severity, bool]
"""(run, incident, severity, pages): what the labels are made of."""


class AlertmanagerSink:
    """Posts alerts to `/api/v2/alerts`; the labels are the idempotency key, so a repeat notifies nobody twice."""

    digest_after = 1
    max_batch = 200

    def __init__(
        self, config: AlertmanagerConfig, poster: Poster, environ: Mapping[str, str], writer: MessageWriter | None = None
    ) -> None:
        path = f"notify.sinks.{config.name}"
        self.name = config.name
        self._urls = [check_url(url, f"{path}.urls").rstrip("/") + "/api/v2/alerts" for url in config.urls]
        bearer = read_secret(f"{path}.bearer", config.bearer_file, config.bearer_env, environ)
        self._headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._labels = dict(config.labels)
        self._resend_interval_s, self._resolve_after_s = config.resend_interval_s, config.resolve_after_s
        self._writer = writer or MessageWriter()
        self._poster = poster
        self._open_alerts: dict[tuple[str, str], Alert] = {}
        self._next_resend = 0.0

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Post changes; what is open stands from now on and is kept alive."""
        delivery = self._post([one for alert in alerts for one in self._changes(alert, now)], now)
        if delivery.outcome == "sent":
            for alert in alerts:
                where = (alert.incident.run, alert.incident.id)
                if alert.is_closed:
                    self._open_alerts.pop(where, None)
                else:
                    if not self._open_alerts:
                        self._next_resend = now + self._resend_interval_s
                    self._open_alerts[where] = alert
        return delivery

    def restore(self, open_alerts: Sequence[Alert]) -> None:
        """Take the incidents of a run that are open as this daemon begins to serve it; they are sent again at once."""
        for alert in open_alerts:
            self._open_alerts.setdefault((alert.incident.run, alert.incident.id), alert)
        self._next_resend = 0.0

    def release(self, run: str) -> None:
        """Send what is open in a run no more, without a word."""
        self._open_alerts = {where: alert for where, alert in self._open_alerts.items() if where[0] != run}

    def keep_alive(self, now: float) -> tuple[Delivery | None, float | None]:
        """Send every open incident again when the interval has passed."""
        if not self._open_alerts:
            return None, None
        # The wall clock may be set back: never wait longer than an interval.
        if self._next_resend - self._resend_interval_s <= now < self._next_resend:
            return None, self._next_resend
        open_alerts = list(self._open_alerts.values())
        delivery = Delivery(outcome="sent")
        for start in range(0, len(open_alerts), self.max_batch):
            batch = [self.alert(one, identity(one.incident), now) for one in open_alerts[start : start + self.max_batch]]
            delivery = self._post(batch, now)
            if delivery.outcome != "sent":
                break
        wait = self._resend_interval_s if delivery.outcome == "sent" else min(self._resend_interval_s, 5.0)
        self._next_resend = now + wait
        return delivery, self._next_resend

    def alert(self, alert: Alert, who: Identity, now: float, *, is_over: bool = False) -> dict[str, Any]:
        """Return one alert of the v2 API under the labels of `who`."""
        run, incident_id, severity, pages = who
        incident = alert.incident
        message = self._writer.write(alert)
        annotations = {name.replace(" ", "_"): text for name, text in message.fields}
        annotations |= {f"{link.name}_url": link.url for link in message.links if link.name != "incident"}
        annotations["summary"] = message.summary(MAX_SUMMARY)
        annotations["change"] = alert.change
        if is_over:
            # Without this annotation an alert that resolves was not sent again for long: the daemon is silent.
            annotations["resolution"] = incident.state if alert.is_closed else "relabelled"
        opened = alert.context.opened or incident.time
        starts = min(opened, now) if opened > 0 else now
        stands_s = END_STANDS_S if alert.is_closed else self._resolve_after_s
        ends = now if is_over else now + stands_s
        return {
            "labels": {
                **self._labels,
                "alertname": "SentinelIncident",
                "run": run,
                "incident": incident_id,
                "severity": severity.value,
                "page": "yes" if pages else "no",
            },
            "annotations": annotations,
            "startsAt": _rfc3339(starts),
            "endsAt": _rfc3339(ends),
            "generatorURL": message.link,
        }

    def _changes(self, alert: Alert, now: float) -> list[dict[str, Any]]:
        incident = alert.incident
        current = identity(incident)
        notified: set[Identity] = set()
        open_alerts = self._open_alerts.get((incident.run, incident.id))
        if open_alerts is not None:
            notified.add(identity(open_alerts.incident))
        if alert.was_severity is not None:
            notified.add((incident.run, incident.id, alert.was_severity, alert.was_paged))
        if alert.is_closed and not reports_end(incident):
            notified.add(current)
            return [self.alert(alert, who, now, is_over=True) for who in sorted(notified, key=repr)]
        old = [self.alert(alert, who, now, is_over=True) for who in sorted(notified - {current}, key=repr)]
        return [*old, self.alert(alert, current, now)]

    def _post(self, alerts: list[dict[str, Any]], now: float) -> Delivery:
        body = msgspec.json.encode(alerts)
        deliveries = [self._poster.post(url, body, self._headers, now) for url in self._urls]
        order = {"sent": 0, "retry": 1, "failed": 2}
        return min(deliveries, key=lambda one: order[one.outcome])


def identity(incident: Incident) -> Identity:
    """Return what the labels of an incident are made of."""
    return incident.run, incident.id, incident.severity, incident.paged


def _rfc3339(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
