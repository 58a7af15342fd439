"""RuleTallies: how often each rule spoke in a run, and when last, counted from its journal as that grows."""

from __future__ import annotations

import threading
import time

import msgspec

from sentinel.store.found import Found

COUNT_S = 1.0
"""Seconds that one look counts (chosen: a million anomalies take two looks); the next look goes on from there."""
PAUSE_S = 0.001
"""Pause between two pages of the journal: the thread that judges comes first."""
PAGE = 1000
"""Anomalies between two looks at the clock."""


class LastOnset(msgspec.Struct, frozen=True, kw_only=True):
    """The newest onset of a rule."""

    id: str
    rule: str
    event: str
    attempt: int
    step: int
    severity: str
    kind: str
    tag_name: str
    statistic: str
    rank: int | None = None
    time: float = 0.0


class RuleTally(msgspec.Struct, kw_only=True):
    """What the journal has of one rule."""

    onsets: dict[str, int] = {}
    """Severity -> onsets."""
    last: LastOnset | None = None
    incident: str = ""
    """Id of the incident of `last`; empty: it is in none."""


class _Members(msgspec.Struct):
    id: str
    members: tuple[str, ...] = ()


class RuleTallies:
    """Of one run. May be asked from any thread; nothing is counted twice."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._counting = threading.Lock()
        self._tallies: dict[str, RuleTally] = {}
        self._anomalies = self._incidents = 0
        """Positions up to which the tables were counted."""

    def read(self) -> tuple[dict[str, RuleTally], bool]:
        """Return (rule -> tally, whether all there is was counted). What the journal no longer has is not counted."""
        with self._counting:
            is_whole = self._count(time.monotonic() + COUNT_S)
            if is_whole:
                self._find_incidents()
            kept = {name: msgspec.structs.replace(one, onsets=dict(one.onsets)) for name, one in self._tallies.items()}
        return kept, is_whole

    def _count(self, until: float) -> bool:
        decode = msgspec.json.Decoder(LastOnset).decode
        for num, (position, body) in enumerate(self._found.bodies("anomalies", self._anomalies), 1):
            self._anomalies = position
            one = decode(body)
            if one.event == "onset":
                tally = self._tallies.setdefault(one.rule, RuleTally(onsets={}))
                tally.onsets[one.severity] = tally.onsets.get(one.severity, 0) + 1
                tally.last, tally.incident = one, ""
            if num % PAGE == 0:
                if time.monotonic() > until:
                    return False
                time.sleep(PAUSE_S)
        return True

    def _find_incidents(self) -> None:
        """Look for the incidents of the newest onsets; a revision never lies before the anomalies that join with it."""
        wanted = {tally.last.id: tally for tally in self._tallies.values() if tally.last is not None}
        decode = msgspec.json.Decoder(_Members).decode
        for position, body in self._found.bodies("incidents", self._incidents):
            self._incidents = position
            one = decode(body)
            for member in one.members:
                if member in wanted:
                    wanted[member].incident = one.id
