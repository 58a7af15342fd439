"""MessageWriter: what makes the message of an alert for one sink, with all that the sink itself does not know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sentinel.report.alert import Alert
from sentinel.report.links import NO_LINKS, MessageLinks
from sentinel.report.message import AlertMessage, message_of
from sentinel.report.templates import CompiledTemplates, TemplateFailure

log = logging.getLogger("sentinel.notify")

OrdersOf = Callable[[Alert], Sequence[str]]
"""Returns what was ordered of the trainer because of an incident, in words, as it stands now."""


def no_orders(alert: Alert) -> Sequence[str]:
    """Return nothing: no daemon that could order anything is there."""
    return ()


class MessageWriter:
    """Asked when a message is about to leave: what was ordered behind the judgement is in it."""

    def __init__(
        self,
        links: MessageLinks = NO_LINKS,
        orders_of: OrdersOf = no_orders,
        templates: CompiledTemplates | None = None,
    ) -> None:
        """templates: the user's own texts; None: there are none."""
        self._links = links
        self._orders_of = orders_of
        self._templates = templates

    def write(self, alert: Alert) -> AlertMessage:
        """Return what is said of an alert: without the user's texts where they fail, for the news is worth more."""
        message = message_of(alert, self._orders_of(alert), self._links.of(alert))
        try:
            return message if self._templates is None else self._templates.applied(message, alert)
        except TemplateFailure as error:
            log.warning("%s; the usual text is sent", error)
            return message
