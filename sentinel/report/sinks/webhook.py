"""A generic webhook: one JSON object, an idempotency key, and, with a key, a signature as Standard Webhooks has it."""

from __future__ import annotations

import base64
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
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates


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
    """File that holds the key of the signature: `whsec_` and base64, or any text; without a key nothing is signed."""

    secret_env: str = ""
    """Environment variable that holds the key of the signature."""

    bearer_file: str = ""
    """File that holds a bearer token."""

    bearer_env: str = ""
    """Environment variable that holds a bearer token."""

    route: RouteConfig = RouteConfig()
    """Incidents that are sent; by default every one from warning on."""

    templates: MessageTemplates = NO_TEMPLATES
    """Texts of your own."""

    rate_per_s: float = 10.0
    """Most requests a second, on average."""

    digest_after: int = 20
    """Most incidents within a minute (`notify.digest.window_s`) with a request each; of more, one of all. 0: always each."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def build(self, parts: SinkParts) -> WebhookSink:
        """Return the sink; `SinkSettings.build`."""
        return WebhookSink(self, parts.poster(self.timeout_s), parts.environ, parts.writer(self.name, self.templates))


class WebhookSink:
    """Posts `{"version": "1", "digest": false, "alerts": [...]}`.

    Headers: `webhook-id`, the idempotency key (the same for the same message, however often it is tried), and
    `webhook-timestamp`; with a key `webhook-signature: v1,<base64 of HMAC-SHA256 over id, timestamp and body, joined by
    dots>`.

    Source: the Standard Webhooks specification, version 1.0.0.
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
        self._key = signing_key(
            f"{path}.secret", read_secret(f"{path}.secret", config.secret_file, config.secret_env, environ)
        )
        self._bearer = read_secret(f"{path}.bearer", config.bearer_file, config.bearer_env, environ)
        self._writer = writer or MessageWriter()
        self._poster = poster

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Post one request."""
        body = msgspec.json.encode(self.document(alerts))
        name, timestamp = webhook_id(alerts), str(int(now))
        headers = {"webhook-id": name, "webhook-timestamp": timestamp}
        if self._bearer:
            headers["Authorization"] = f"Bearer {self._bearer}"
        if self._key:
            headers["webhook-signature"] = signature(self._key, name, timestamp, body)
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
            "alike": alert.alike,
            "incident": alert.incident,
        }


def webhook_id(alerts: Sequence[Alert]) -> str:
    """Return `msg_` and 32 hex digits that name exactly this set of alerts: a run's name may hold what no header can."""
    text = "\n".join(sorted(alert.key for alert in alerts))
    return "msg_" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def signing_key(path: str, secret: str) -> bytes:
    """Return the bytes of a secret; ConfigError where one that says that it is base64 is not."""
    if not secret.startswith("whsec_"):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError as error:
        raise ConfigError(f"{path}: expected base64 behind whsec_, got something else") from error


def signature(key: bytes, name: str, timestamp: str, body: bytes) -> str:
    """Return `v1,` and the base64 of HMAC-SHA256 over id, timestamp and body, joined by dots."""
    signed = f"{name}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
