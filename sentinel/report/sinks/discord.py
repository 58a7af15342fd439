"""Discord, by webhook of a channel: an embed an alert, in which nothing mentions anybody."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message import digest_headline, end_cut, fitted, worst_first
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.chat_webhook import ChatWebhook
from sentinel.report.sinks.delivery import SinkParts
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates

MAX_CONTENT = 2000
MAX_TITLE = 256
MAX_DESCRIPTION = 4096
MAX_URL = 250
MAX_LINE = 250
"""Characters of an alert in a digest."""
MAX_DIGEST_LINES = 14
COLOURS = {Severity.CRITICAL: 0xB3191F, Severity.WARNING: 0xA05B00, Severity.INFO: 0x60646C}
OVER = 0x1D7A3C


class DiscordConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="discord"):
    """A webhook of a Discord channel. Its address is a secret."""

    name: str = "discord"
    """Name in metrics and in the outbox; unique."""

    url_file: str = ""
    """File that holds the webhook's address."""

    url_env: str = ""
    """Environment variable that holds the webhook's address."""

    route: RouteConfig = RouteConfig(min_severity=Severity.CRITICAL, detectors=("LossSpike",))
    """What is sent; by default critical incidents, and loss spikes from warning on."""

    templates: MessageTemplates = NO_TEMPLATES
    """Texts of your own."""

    page_mention: str = ""
    """Put before a page, as Discord writes it: `@here`, `<@&ID OF A ROLE>`."""

    rate_per_s: float = 0.4
    """Most messages a second, on average; Discord allows 30 a minute."""

    digest_after: int = 2
    """Most incidents within a minute (`notify.digest.window_s`) with a message each; of more, one of all. 0: always each."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def build(self, parts: SinkParts) -> ChatWebhook:
        """Return the sink; `SinkSettings.build`."""
        form = DiscordForm(parts.writer(self.name, self.templates, escape), self.page_mention)
        return ChatWebhook(
            self.name, form, parts.poster(self.timeout_s), parts.environ,
            digest_after=self.digest_after, url_file=self.url_file, url_env=self.url_env,
        )  # fmt: skip


class DiscordForm:
    """How a webhook of Discord shows messages. mention: put before a page."""

    def __init__(self, writer: MessageWriter, mention: str = "") -> None:
        self._writer = writer
        self._mention = end_cut(mention, MAX_CONTENT)

    def message(self, alert: Alert) -> dict[str, Any]:
        """Return the message of one alert."""
        message = self._writer.write(alert)
        title = message.headline(MAX_TITLE)
        links = " | ".join(f"[{one.name}]({one.url})" for one in message.links if len(one.url) <= MAX_URL)
        lines = [f"**{name}**  {escape(value)}" for name, value in message.fields_under(title)]
        room = MAX_DESCRIPTION - len(links) - 2 - len(lines)
        description = message.body or "\n".join(fitted(lines, room))
        embed = {
            "title": title,
            "description": end_cut(description, MAX_DESCRIPTION - len(links) - 2) + (f"\n\n{links}" if links else ""),
            "color": OVER if alert.is_closed else COLOURS[alert.incident.severity],
            "footer": {"text": end_cut(f"{alert.incident.id}, revision {alert.incident.revision}", MAX_TITLE)},
        }
        return self._body([embed], is_page=alert.is_page)

    def digest(self, alerts: Sequence[Alert]) -> dict[str, Any]:
        """Return one message for many."""
        shown = [end_cut(escape(self._writer.write(one).summary(150)), MAX_LINE) for one in worst_first(alerts)]
        lines = shown[:MAX_DIGEST_LINES]
        more = [f"and {len(alerts) - len(lines)} more"] if len(alerts) > len(lines) else []
        embed = {
            "title": end_cut(digest_headline(alerts), MAX_TITLE),
            "description": "\n".join([*lines, *more]),
            "color": COLOURS[worst_first(alerts)[0].incident.severity],
        }
        return self._body([embed], is_page=any(one.is_page for one in alerts))

    def _body(self, embeds: list[dict[str, Any]], *, is_page: bool) -> dict[str, Any]:
        mention = self._mention if is_page else ""
        # Embeds mention nobody; what stands in the content is the user's own.
        allowed = ["users", "roles", "everyone"] if mention else []
        return {"content": mention, "embeds": embeds, "allowed_mentions": {"parse": allowed}}


def escape(text: str) -> str:
    """Return text that Discord shows as it is: nothing in it is bold, a link or a spoiler."""
    return re.sub(r"([\\*_~`|>\[\]()#<@-])", r"\\\1", text)
