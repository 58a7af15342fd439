"""Ledger: what one sink was told of which incidents, so that ends reach whoever heard of the beginning, and nobody else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from sentinel.report.alert import Alert, reports_end

Where = tuple[str, str]
"""(run, id of the incident)."""


def where_of(alert: Alert) -> Where:
    """Return which incident an alert is about."""
    return alert.incident.run, alert.incident.id


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink was told of one incident. Kept with the outbox of the incident's run."""

    alert: Alert
    """As it was told last."""
    thread: str
    """The incidents that were told together: `run:incident` of the first of them."""
    first: float
    """Seconds since the epoch when it was told first."""
    last: float
    """When it was told last."""

    @property
    def is_over(self) -> bool:
        """The sink was told its end."""
        return self.alert.is_closed

    @property
    def body(self) -> bytes:
        """JSON for the outbox; `Ledger.load` takes it back."""
        return msgspec.json.encode(self)


_DECODER = msgspec.json.Decoder(Told)


def thread_of(where: Where) -> str:
    """Return the thread that an incident begins."""
    return ":".join(where)


class Thread:
    """Incidents of several runs, or one, that a sink was told of together."""

    def __init__(self, name: str, members: Iterable[Told]) -> None:
        self.members = sorted(members, key=lambda told: told.first)
        self.lead = next((one for one in self.members if thread_of(where_of(one.alert)) == name), self.members[0])
        """What was told of the first of them; where its run is served no more, of the next."""

    @property
    def first(self) -> float:
        """Seconds since the epoch when something of it was told first."""
        return self.members[0].first

    @property
    def last(self) -> float:
        """When something of it was told last."""
        return max(one.last for one in self.members)

    @property
    def was_paged(self) -> bool:
        """Somebody was paged for it."""
        return any(one.alert.incident.paged for one in self.members)

    @property
    def stands(self) -> bool:
        """Something of it is open, or is the end of a run."""
        return any(not one.is_over or reports_end(one.alert.incident) for one in self.members)

    @property
    def was_escalated(self) -> bool:
        """It was told because nobody had acknowledged it."""
        return any(one.alert.change == "escalated" for one in self.members)


class Ledger:
    """All that one sink was told of the runs that are served now."""

    def __init__(self) -> None:
        self._told: dict[Where, Told] = {}
        self._threads: dict[str, set[Where]] = {}

    def load(self, bodies: Iterable[bytes]) -> None:
        """Take what the outbox holds in place of what was known."""
        self._told, self._threads = {}, {}
        for body in bodies:
            self.note(_DECODER.decode(body))

    def note(self, told: Told) -> None:
        """Take in what was told just now."""
        where = where_of(told.alert)
        former = self._told.get(where)
        if former is not None:
            self._threads[former.thread].discard(where)
        self._told[where] = told
        self._threads.setdefault(told.thread, set()).add(where)

    def get(self, where: Where) -> Told | None:
        """Return what was told of an incident; None: nothing."""
        return self._told.get(where)

    def thread(self, name: str) -> Thread | None:
        """Return a thread of which something was told; None: nothing was."""
        members = self._threads.get(name)
        return Thread(name, (self._told[where] for where in members)) if members else None

    def since(self, moment: float) -> Iterator[tuple[str, Thread]]:
        """Yield the threads that began after a moment, seconds since the epoch."""
        for name in list(self._threads):
            thread = self.thread(name)
            if thread is not None and thread.first >= moment:
                yield name, thread

    def open_alerts(self) -> list[Alert]:
        """Return what was told last of each incident whose end was not told."""
        return [one.alert for one in self._told.values() if not one.is_over]

    def standing(self) -> Iterator[Alert]:
        """Yield what holds for whoever reads it: what is open, and ends of runs."""
        for one in self._told.values():
            if not one.is_over or reports_end(one.alert.incident):
                yield one.alert
