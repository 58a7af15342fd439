"""TrackerState: the open and remembered incidents and the background of the attempt, as a snapshot holds them."""

from __future__ import annotations

import msgspec

from sentinel.incidents.diagnosis.background import Background
from sentinel.incidents.open_incident import OpenIncident

MAX_CLOSED = 64
"""Newest closed incidents that are remembered, for a person to reopen: a bound on memory."""


class TrackerState(msgspec.Struct, kw_only=True):
    """The open incidents, the closed ones that may be reopened, and what is usual in the attempt."""

    open: list[OpenIncident] = []
    owner: dict[str, str] = {}
    """Onset id to the incident that holds its episode."""
    attempt: int = -1
    step: int = -1
    num_incidents: int = 0
    background: Background = msgspec.field(default_factory=Background)
    closed: list[OpenIncident] = []
    """The newest `MAX_CLOSED` closed incidents, oldest first."""

    def known(self, incident: str) -> OpenIncident | None:
        """Return the incident of this id, open or remembered; None: there is none."""
        return next((one for one in (*self.open, *self.closed) if one.incident.id == incident), None)

    def begin_attempt(self, attempt: int) -> list[OpenIncident]:
        """End what is open and forget what was usual; return what ended. Before the first attempt nothing is open."""
        ended = self.open
        for one in ended:
            one.revise(state="ended", evidence=f"attempt {attempt} began")
        self.open, self.owner = [], {}
        self.attempt, self.step, self.background = attempt, -1, Background()
        return ended

    def end_episode(self, onset_id: str, has_settled: bool) -> None:
        """Take in the end of an episode. has_settled: its series goes on at a new level."""
        owner = self.owner.pop(onset_id, None)
        one = next((o for o in self.open if o.incident.id == owner), None)
        if one is not None:
            one.episodes.pop(onset_id, None)
            one.has_settled = one.has_settled or has_settled

    def forget(self, one: OpenIncident) -> None:
        """Drop the episodes that a closed incident waits for, and all but the first of its series and modules."""
        for onset_id in one.episodes:
            if self.owner.get(onset_id) == one.incident.id:
                del self.owner[onset_id]
        # What is over waits for nothing; of what it had, enough is kept to be opened again by a person.
        one.episodes = {}
        one.series, one.lineages = _first(one.series), _first(one.lineages)


def _first(known: dict[str, int]) -> dict[str, int]:
    return dict(list(known.items())[:MAX_CLOSED])
