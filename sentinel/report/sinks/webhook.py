"""A generic webhook: one JSON object, an idempotency key, and a signature when a secret is given."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sentinel.errors import ConfigError
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message import worst_first
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.delivery import Delivery, Poster, SinkParts, check_url
from sentinel.report.sinks.secret import read_secret


class WebhookConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="webhook"):
    """Any server that takes JSON by POST."""

    name: str = "webhook"
    """Name in metrics and in the outbox; unique."""

    url: str = ""
    """Where to post; give url_file or url_env instead when the address is a secret."""

    url_file: str = ""
    """File that holds the address."""

    url_env: str = ""
    """Environment variable that holds the address."""

    secret_file: str = ""
    """File that holds the key of the signature; without a key nothing is signed."""

    secret_env: str = ""
    """Environment variable that holds the key of the signature."""

    bearer_file: str = ""
    """File that holds a bearer token."""

    bearer_env: str = ""
    """Environment variable that holds a bearer token."""

    route: RouteConfig = RouteConfig()
    """Incidents that are sent; by default every one from warning on."""

    rate_per_s: float = 10.0
    """Most requests a second, on average."""

    digest_after: int = 20
    """More alerts than this waiting at once go out in one request; 0: never."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def build(self, parts: SinkParts) -> WebhookSink:
        """Return the sink; `SinkSettings.build`."""
        return WebhookSink(self, parts.poster(self.timeout_s), parts.environ, parts.writer())


class WebhookSink:
    """Posts `{"version": "1", "digest": false, "alerts": [...]}`.

    Headers: `Idempotency-Key` (the same for the same message, however often it is tried) and, with a key,
    `Sentinel-Timestamp` and `Sentinel-Signature: v1=<hex of HMAC-SHA256 over timestamp, a dot, and the body>`.
    """

    max_batch = 200

    def __init__(
        self, config: WebhookConfig, poster: Poster, environ: Mapping[str, str], writer: MessageWriter | None = None
    ) -> None:
        path = f"notify.sinks.{config.name}"
        self.name = config.name
        self.digest_after = config.digest_after
        if not (config.url or config.url_file or config.url_env):
            raise ConfigError(f"{path}.url: expected url, url_file or url_env, which says where to post; got none of them")
        url = config.url or read_secret(f"{path}.url", config.url_file, config.url_env, environ)
        self._url = check_url(url, f"{path}.url")
        self._secret = read_secret(f"{path}.secret", config.secret_file, config.secret_env, environ)
        self._bearer = read_secret(f"{path}.bearer", config.bearer_file, config.bearer_env, environ)
        self._writer = writer or MessageWriter()
        self._poster = poster

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Post one request."""
        body = msgspec.json.encode(self.document(alerts))
        headers = {"Idempotency-Key": idempotency_key(alerts)}
        if self._bearer:
            headers["Authorization"] = f"Bearer {self._bearer}"
        if self._secret:
            timestamp = str(int(now))
            headers["Sentinel-Timestamp"] = timestamp
            headers["Sentinel-Signature"] = signature(self._secret, timestamp, body)
        return self._poster.post(self._url, body, headers, now)

    def document(self, alerts: Sequence[Alert]) -> dict[str, Any]:
        """Return what is posted, as plain data."""
        return {
            "version": "1",
            "digest": len(alerts) > 1,
            "alerts": [self._entry(alert) for alert in worst_first(alerts)],
        }

    def _entry(self, alert: Alert) -> dict[str, Any]:
        message = self._writer.write(alert)
        return {
            "key": alert.key,
            "change": alert.change,
            "page": alert.is_page,
            "repeated": alert.repeated,
            "text": message.headline(),
            "facts": dict(message.fields),
            "url": message.link or None,
            "links": {link.name: link.url for link in message.links},
            "context": alert.context,
            "incident": alert.incident,
        }


def idempotency_key(alerts: Sequence[Alert]) -> str:
    """Return the key of one alert, or a hash that names exactly this set of alerts."""
    if len(alerts) == 1:
        return alerts[0].key
    text = "\n".join(sorted(alert.key for alert in alerts))
    return "digest:" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return `v1=` and the hex of HMAC-SHA256 over `timestamp`, a dot and the body."""
    return "v1=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
