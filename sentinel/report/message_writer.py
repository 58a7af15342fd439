"""MessageWriter: what makes the message of an alert for one sink, with all that the sink itself does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sentinel.report.alert import Alert
from sentinel.report.links import NO_LINKS, MessageLinks
from sentinel.report.message import AlertMessage, message_of

OrdersOf = Callable[[Alert], Sequence[str]]
"""Returns what was ordered of the trainer because of an incident, in words, as it stands now."""


def no_orders(alert: Alert) -> Sequence[str]:
    """Return nothing: no daemon that could order anything is there."""
    return ()


class MessageWriter:
    """Asked when a message is about to leave: what was ordered behind the judgement is in it."""

    def __init__(self, links: MessageLinks = NO_LINKS, orders_of: OrdersOf = no_orders) -> None:
        self._links = links
        self._orders_of = orders_of

    def write(self, alert: Alert) -> AlertMessage:
        """Return what is said of an alert."""
        return message_of(alert, self._orders_of(alert), self._links.of(alert))
