"""Gather: which of what may be sent goes out with the next message. Few come one by one, a storm as one now and then."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from sentinel.errors import ConfigError
from sentinel.report.message import worst_first
from sentinel.report.stages.pending import Pending, Turn

ALONE_AFTER = 3
"""Failures after which a message is sent by itself. Too small: one outage breaks digests up; too large: a message that the
server refuses holds back the others of its digest."""
MESSAGES_PER_INCIDENT = 3
"""Words that an incident may have in a window without being a storm: its opening, a change, its end."""
MAX_S = 86400.0
"""Longest window or interval; a bound against a typing error that would keep alarms back."""


class DigestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a sink is sent digests: by how often it is sent something."""

    window_s: float = 60.0
    """Messages about more incidents than the sink's `digest_after` within so many seconds are a storm, as are more than
    three times as many messages: what follows is gathered."""

    interval_s: float = 300.0
    """What a storm gathers is sent as one message, and the next not before so many seconds. A page breaks through, once in
    this time; one of a run for which nobody was paged in it, `window_s` after the last page."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value <= MAX_S:
                raise ConfigError(f"notify.digest.{name} must be in (0, {MAX_S:g}], got {value:g}")


class Gather:
    """Chooses the next message. `note_sent` tells it of each that the sink took."""

    def __init__(self, config: DigestConfig, *, after: int, max_batch: int, is_resending: bool) -> None:
        """after, max_batch: `digest_after` and `max_batch` of the sink. is_resending: it groups what it is sent by itself,
        so that all that is due goes out in one request at once."""
        self._config = config
        self._after = after
        self._max_batch = max_batch
        self._is_resending = is_resending
        self._sent: deque[tuple[float, str]] = deque()
        """When messages were sent within the window, and the thread of each, a digest's first."""
        self._gathered: set[int] = set()
        """Positions of what a storm keeps back: when it is over, that goes as one message too."""
        self._digest_at = -math.inf
        self._page_at = -math.inf
        self._paged: dict[str, float] = {}
        """Run -> when somebody was paged for it last, within the interval."""

    def apply(self, pending: list[Pending], turn: Turn) -> list[Pending]:
        """Return what the next message is made of, the worst first; nothing while a storm gathers."""
        # What failed before goes last, so that one message which a sink cannot stomach holds up no other.
        order = {alert.key: place for place, alert in enumerate(worst_first([one.alert for one in pending]))}
        ready = sorted(pending, key=lambda one: (one.num_failures, order[one.alert.key]))
        together = [one for one in ready if one.num_failures < ALONE_AFTER]
        if self._after <= 0 or not together:
            return ready[:1]
        if self._is_resending:
            return together[: self._max_batch] if len(together) > self._after else ready[:1]
        self._forget(turn.now)
        gathered = [one for one in together if not self._gathered.isdisjoint(one.positions)]
        if not self._is_storm(together, turn.now):
            return gathered[: self._max_batch] if len(gathered) > 1 else ready[:1]
        self._gathered = {position for one in together for position in one.positions}
        if self._sent:
            turn.wake_at(self._sent[0][0] + self._config.window_s)
        return self._of_storm(together, turn)[: self._max_batch]

    def note_sent(self, batch: list[Pending], now: float) -> None:
        """Take note of a message that the sink took."""
        self._sent.append((now, batch[0].thread))
        if len(batch) > 1:
            self._digest_at = now
        interval_s = self._config.interval_s
        self._paged = {run: at for run, at in self._paged.items() if at <= now < at + interval_s}
        for pending in batch:
            if pending.alert.is_page:
                self._page_at = now
                self._paged |= dict.fromkeys((one.alert.incident.run for one in pending.incidents), now)

    def _is_storm(self, together: list[Pending], now: float) -> bool:
        # What follows a digest at once is of the same storm.
        if self._digest_at <= now < self._digest_at + self._config.window_s:
            return True
        threads = {thread for _, thread in self._sent} | {one.thread for one in together}
        return len(threads) > self._after or len(self._sent) + len(together) > MESSAGES_PER_INCIDENT * self._after

    def _of_storm(self, together: list[Pending], turn: Turn) -> list[Pending]:
        interval_s = self._config.interval_s
        if self._digest_at <= turn.now < self._digest_at + interval_s:
            is_due = turn.is_due(self._digest_at, interval_s)
        else:
            oldest = min(one.since for one in together)
            is_due = len(together) > self._after or turn.is_due(oldest, self._config.window_s)
        if is_due:
            return together
        pages = [one for one in together if one.alert.is_page]
        if not pages:
            return []
        # Who was paged for one run does not know of another; who was paged for this one looks at it.
        is_news = any(self._is_news(one.alert.incident.run, turn.now) for page in pages for one in page.incidents)
        return pages if turn.is_due(self._page_at, self._config.window_s if is_news else interval_s) else []

    def _is_news(self, run: str, now: float) -> bool:
        paged = self._paged.get(run)
        return paged is None or not paged <= now < paged + self._config.interval_s

    def _forget(self, now: float) -> None:
        while self._sent and not self._sent[0][0] <= now < self._sent[0][0] + self._config.window_s:
            self._sent.popleft()
