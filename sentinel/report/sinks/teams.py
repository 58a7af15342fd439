"""Microsoft Teams, by the webhook of a workflow that posts to a channel: an adaptive card an alert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message import digest_headline, end_cut, worst_first
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.chat_webhook import ChatWebhook
from sentinel.report.sinks.delivery import SinkParts
from sentinel.report.sinks.discord import escape
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates

MAX_BYTES = 28_000
"""Teams takes 28 KB a message."""
MAX_TITLE = 300
MAX_VALUE = 250
"""Characters of a fact before escapes, which double it at most, and of which each may be four bytes: twenty fit a card."""
MAX_BODY = 3000
MAX_DIGEST_LINES = 20
COLOURS = {Severity.CRITICAL: "Attention", Severity.WARNING: "Warning", Severity.INFO: "Default"}


class TeamsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="teams"):
    """The webhook of a workflow of Teams. Its address is a secret."""

    name: str = "teams"
    """Name in metrics and in the outbox; unique."""

    url_file: str = ""
    """File that holds the webhook's address."""

    url_env: str = ""
    """Environment variable that holds the webhook's address."""

    route: RouteConfig = RouteConfig(min_severity=Severity.CRITICAL, detectors=("LossSpike",))
    """What is sent; by default critical incidents, and loss spikes from warning on."""

    templates: MessageTemplates = NO_TEMPLATES
    """Texts of your own."""

    rate_per_s: float = 1.0
    """Most messages a second, on average."""

    digest_after: int = 2
    """Most incidents within a minute (`notify.digest.window_s`) with a message each; of more, one of all. 0: always each."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def build(self, parts: SinkParts) -> ChatWebhook:
        """Return the sink; `SinkSettings.build`."""
        form = TeamsForm(parts.writer(self.name, self.templates, escape))
        return ChatWebhook(
            self.name, form, parts.poster(self.timeout_s), parts.environ,
            digest_after=self.digest_after, url_file=self.url_file, url_env=self.url_env,
        )  # fmt: skip


class TeamsForm:
    """How a workflow of Teams shows messages."""

    def __init__(self, writer: MessageWriter) -> None:
        self._writer = writer

    def message(self, alert: Alert) -> dict[str, Any]:
        """Return the message of one alert."""
        message = self._writer.write(alert)
        title = message.headline(MAX_TITLE)
        facts = [{"title": name, "value": escape(end_cut(value, MAX_VALUE))} for name, value in message.fields_under(title)]
        colour = "Good" if alert.is_closed else COLOURS[alert.incident.severity]
        body = [_text(escape(title), size="Large", weight="Bolder", color=colour)]
        body.append(_text(end_cut(message.body, MAX_BODY)) if message.body else {"type": "FactSet", "facts": facts})
        links = [one for one in message.links if len(one.url) < MAX_VALUE * 2]
        return card(body, [{"type": "Action.OpenUrl", "title": one.name, "url": one.url} for one in links])

    def digest(self, alerts: Sequence[Alert]) -> dict[str, Any]:
        """Return one message for many."""
        worst = worst_first(alerts)[:MAX_DIGEST_LINES]
        more = f"and {len(alerts) - len(worst)} more" if len(alerts) > len(worst) else ""
        lines = [_text(escape(self._writer.write(one).summary(MAX_VALUE))) for one in worst]
        head = _text(digest_headline(alerts), size="Large", weight="Bolder")
        return card([head, *lines, *([_text(more)] if more else [])], [])


def card(body: list[dict[str, Any]], actions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the request that holds one adaptive card."""
    content = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
        "msteams": {"width": "Full"}, "body": body, "actions": actions,
    }  # fmt: skip
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": content}
    return {"type": "message", "attachments": [attachment]}


def _text(text: str, **style: str) -> dict[str, Any]:
    return {"type": "TextBlock", "text": text, "wrap": True, **style}
