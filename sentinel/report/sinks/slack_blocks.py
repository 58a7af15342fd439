"""Slack's own form of a message: Block Kit within Slack's limits, the run's name in the header whatever else is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sentinel.report.alert import Alert
from sentinel.report.message import AlertMessage, digest_headline, end_cut, fitted, worst_first
from sentinel.report.message_writer import MessageWriter

MAX_HEADER = 150
MAX_SECTION = 3000
MAX_CONTEXT = 2000
MAX_BLOCKS = 50
MAX_TOTAL = 12_000
"""Characters in all; the true limit is not documented; about 13,000 were taken when it was tried."""
MAX_FACTS = 10_000
"""Characters of all facts behind the escapes; the rest of MAX_TOTAL is for header, mention and links."""
MAX_URL = 580
"""A longer address is left out: cut off it would lead elsewhere. Three of them fit one context."""
MAX_DIGEST_LINES = 40

Block = dict[str, Any]


def message_blocks(alert: Alert, message: AlertMessage, mention: str) -> dict[str, Any]:
    """Return the Block Kit message of one alert. mention: put before a page, as Slack writes it."""
    header = message.headline(MAX_HEADER)
    blocks: list[Block] = [{"type": "header", "text": {"type": "plain_text", "text": header}}]
    if alert.is_page and mention:
        blocks.append(section(mention))
    if message.body:
        blocks.append(section(message.body))
    else:
        blocks += _fact_blocks([f"*{escape(name)}*  {escape(value)}" for name, value in message.fields_under(header)])
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": clip(_footer(alert, message), MAX_CONTEXT)}]})
    return {"text": clip(escape(message.summary(MAX_SECTION)), MAX_SECTION), "blocks": blocks}


def digest_blocks(alerts: Sequence[Alert], writer: MessageWriter, mention: str) -> dict[str, Any]:
    """Return one message for many alerts: numbers first, then the worst ones by name, within all limits."""
    text = digest_headline(alerts)
    num_pages = sum(alert.is_page for alert in alerts)
    blocks: list[Block] = [{"type": "header", "text": {"type": "plain_text", "text": clip(text, MAX_HEADER)}}]
    if num_pages and mention:
        blocks.append(section(mention))
    used, num_shown = len(text) * 2 + len(mention) + 200, 0
    for alert in worst_first(alerts)[:MAX_DIGEST_LINES]:
        message = writer.write(alert)
        line = clip(escape(message.summary(300)), 400)
        if message.link and len(escape(message.link)) < MAX_URL:
            line += f" | <{escape(message.link)}|open>"
        if used + len(line) > MAX_TOTAL or len(blocks) >= MAX_BLOCKS - 1:
            break
        blocks.append(section(line))
        used += len(line)
        num_shown += 1
    if num_shown < len(alerts):
        more = f"and {len(alerts) - num_shown} more"
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": more}]})
    return {"text": clip(escape(text), MAX_SECTION), "blocks": blocks}


def section(text: str) -> Block:
    """Return a block of text in Slack's markup."""
    return {"type": "section", "text": {"type": "mrkdwn", "text": clip(text, MAX_SECTION)}}


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


def _fact_blocks(lines: Sequence[str]) -> list[Block]:
    blocks: list[str] = []
    for line in fitted(lines, MAX_FACTS, lambda text, limit: clip(text, min(limit, MAX_SECTION))):
        if blocks and len(blocks[-1]) + 1 + len(line) <= MAX_SECTION:
            blocks[-1] += "\n" + line
        else:
            blocks.append(line)
    return [section(text) for text in blocks]


def _footer(alert: Alert, message: AlertMessage) -> str:
    links = [f"<{escape(one.url)}|{one.name}>" for one in message.links if len(escape(one.url)) < MAX_URL]
    incident = alert.incident
    words = f"{end_cut(escape(incident.id), 100)}, revision {incident.revision}"
    return " | ".join([*links, words + (", repeated: true" if alert.repeated else "")])
