"""Slack, by incoming webhook: Block Kit within Slack's limits, a digest when it storms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message import facts, headline, worst_first
from sentinel.report.sinks.delivery import Delivery, Poster, SinkParts, check_url
from sentinel.report.sinks.secret import read_secret

MAX_HEADER = 150
MAX_SECTION = 3000
MAX_BLOCKS = 50
MAX_TOTAL = 12_000
"""Characters in all; the true limit is not documented; about 13,000 were taken when it was tried."""
MAX_DIGEST_LINES = 40


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

    page_mention: str = ""
    """Put before a page, as Slack writes it: `<!here>`, `<@U123>`."""

    rate_per_s: float = 1.0
    """Most messages a second, on average; Slack allows about one."""

    digest_after: int = 5
    """More alerts than this waiting at once go out as one message; 0: never."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def build(self, parts: SinkParts) -> SlackSink:
        """Return the sink; `SinkSettings.build`."""
        return SlackSink(self, parts.poster(self.timeout_s), parts.environ, parts.external_url)


class SlackSink:
    """Posts alerts to one Slack webhook. external_url: where the daemon's page is, for links; empty: no links."""

    max_batch = 500

    def __init__(self, config: SlackConfig, poster: Poster, environ: Mapping[str, str], external_url: str = "") -> None:
        path = f"notify.sinks.{config.name}.url"
        self.name = config.name
        self.digest_after = config.digest_after
        if not config.url_file and not config.url_env:
            raise ConfigError(
                f"{path}: expected url_file or url_env, which says where the webhook's address is; got neither"
            )
        self._url = check_url(read_secret(path, config.url_file, config.url_env, environ), path)
        self._mention = config.page_mention
        self._external_url = external_url
        self._poster = poster

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Post one message: the alert, or a digest of several."""
        message = self.message(alerts[0]) if len(alerts) == 1 else self.digest(alerts)
        return self._poster.post(self._url, msgspec.json.encode(message), {}, now)

    def message(self, alert: Alert) -> dict[str, Any]:
        """Return the Block Kit message of one alert."""
        text = headline(alert)
        lines = "\n".join(f"*{escape(name)}*  {escape(value)}" for name, value in facts(alert.incident))
        blocks: list[dict[str, Any]] = [
            {"type": "header", "text": {"type": "plain_text", "text": clip(text, MAX_HEADER)}},
            {"type": "section", "text": {"type": "mrkdwn", "text": clip(lines, MAX_SECTION)}},
        ]
        if alert.is_page and self._mention:
            blocks.insert(1, {"type": "section", "text": {"type": "mrkdwn", "text": clip(self._mention, MAX_SECTION)}})
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": clip(self._footer(alert), 2000)}]})
        return {"text": clip(escape(text), MAX_SECTION), "blocks": blocks}

    def digest(self, alerts: Sequence[Alert]) -> dict[str, Any]:
        """Return one message for many alerts: numbers first, then the worst ones by name, within all limits."""
        runs = sorted({alert.incident.run for alert in alerts})
        num_pages = sum(alert.is_page for alert in alerts)
        text = f"{len(alerts)} alerts at once in {len(runs)} run{'s' if len(runs) > 1 else ''}"
        text += f", {num_pages} of them pages" if num_pages else ""
        header = {"type": "plain_text", "text": clip(text, MAX_HEADER)}
        blocks: list[dict[str, Any]] = [{"type": "header", "text": header}]
        if num_pages and self._mention:
            blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": clip(self._mention, MAX_SECTION)}})
        used, num_shown = len(text) * 2 + len(self._mention) + 200, 0
        for alert in worst_first(alerts)[:MAX_DIGEST_LINES]:
            line = clip(escape(headline(alert)), 400)
            if used + len(line) > MAX_TOTAL or len(blocks) >= MAX_BLOCKS - 1:
                break
            blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": line}})
            used += len(line)
            num_shown += 1
        if num_shown < len(alerts):
            blocks.append(
                {"type": "context", "elements": [{"type": "mrkdwn", "text": f"and {len(alerts) - num_shown} more"}]}
            )
        return {"text": clip(escape(text), MAX_SECTION), "blocks": blocks}

    def _footer(self, alert: Alert) -> str:
        incident = alert.incident
        words = f"incident {incident.id}, revision {incident.revision}"
        if alert.repeated:
            words += ", repeated: true"
        if self._external_url:
            words += f" | <{self._external_url.rstrip('/')}/#incident={incident.id}|open>"
        return words


def escape(text: str) -> str:
    """Return text in which nothing is a mention or a link: tensor names are not markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def clip(text: str, limit: int) -> str:
    """Return text of at most `limit` characters, never ending inside an escape like `&amp;`."""
    if len(text) <= limit:
        return text or " "
    cut = text[: limit - 3]
    start = cut.rfind("&", max(len(cut) - 5, 0))
    if start >= 0 and ";" not in cut[start:]:
        cut = cut[:start]
    return cut + "..."
