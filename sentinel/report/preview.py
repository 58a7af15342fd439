"""Preview: takes down what a sink would send, with nothing in it that is secret."""

from __future__ import annotations

import json
from collections.abc import Mapping
from email.message import EmailMessage
from typing import Any

import msgspec

from sentinel.report.message import AlertMessage
from sentinel.report.sinks.delivery import SENT, Delivery, host_of

SHOWN_HEADERS = ("webhook-id", "webhook-timestamp")
"""Headers that say something of a message; others are secrets, or the same for all."""
SECRET_KEYS = frozenset({"routing_key"})


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """One request or mail that was not sent."""

    to: str
    headers: dict[str, str] = {}
    body: Any = None
    """Of JSON its values, of a mail its text."""

    @property
    def in_words(self) -> str:
        """All of it as text."""
        head = [f"to {self.to}", *(f"{name}: {value}" for name, value in self.headers.items())]
        body = self.body if isinstance(self.body, str) else json.dumps(self.body, indent=2, ensure_ascii=False)
        return "\n".join([*head, "", body])


class Preview:
    """A `Capture`: every sending is well received."""

    def __init__(self) -> None:
        self.sendings: list[Sending] = []

    def post(self, url: str, body: bytes, headers: Mapping[str, str], now: float) -> Delivery:
        """Take a request down."""
        shown = {name: value for name, value in headers.items() if name in SHOWN_HEADERS}
        found = msgspec.json.decode(body)
        if isinstance(found, dict):
            found = {name: "(secret)" if name in SECRET_KEYS else value for name, value in found.items()}
        self.sendings.append(Sending(to=host_of(url), headers=shown, body=found))
        return SENT

    def carry(self, message: EmailMessage) -> Delivery:
        """Take a mail down."""
        headers = {name: str(message[name]) for name in ("From", "Subject", "Message-ID", "References") if message[name]}
        self.sendings.append(Sending(to=str(message["To"]), headers=headers, body=message.get_content()))
        return SENT


def plain_text(message: AlertMessage) -> str:
    """Return a message as text: what every service is told, each in its own form."""
    lines = [f"{name}: {text}" for name, text in message.fields]
    links = [f"{one.name}: {one.url}" for one in message.links]
    return "\n".join([message.headline(), "", *lines, *(["", *links] if links else [])])
