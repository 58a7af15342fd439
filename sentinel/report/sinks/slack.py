"""Slack, by incoming webhook: one message an alert, a digest when it storms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.chat_webhook import ChatWebhook
from sentinel.report.sinks.delivery import SinkParts
from sentinel.report.sinks.slack_blocks import digest_blocks, escape, message_blocks
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates


class SlackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="slack"):
    """An incoming webhook of Slack. Its address is a secret."""

    name: str = "slack"
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
    """Put before a page, as Slack writes it: `<!here>`, `<@U123>`."""

    rate_per_s: float = 1.0
    """Most messages a second, on average; Slack allows about one."""

    digest_after: int = 2
    """Most incidents within a minute (`notify.digest.window_s`) with a message each; of more, one of all. 0: always each."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def build(self, parts: SinkParts) -> ChatWebhook:
        """Return the sink; `SinkSettings.build`."""
        form = SlackForm(parts.writer(self.name, self.templates, escape), self.page_mention)
        return ChatWebhook(
            self.name, form, parts.poster(self.timeout_s), parts.environ,
            digest_after=self.digest_after, url_file=self.url_file, url_env=self.url_env,
        )  # fmt: skip


class SlackForm:
    """How an incoming webhook of Slack shows messages."""

    def __init__(self, writer: MessageWriter, page_mention: str = "") -> None:
        self._writer = writer
        self._mention = page_mention

    def message(self, alert: Alert) -> dict[str, Any]:
        """Return the message of one alert."""
        return message_blocks(alert, self._writer.write(alert), self._mention)

    def digest(self, alerts: Sequence[Alert]) -> dict[str, Any]:
        """Return one message for many."""
        return digest_blocks(alerts, self._writer, self._mention)
