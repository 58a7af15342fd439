"""RunRetention: keeps the journal and the files of a run within what the configuration allows, a little at a time.

Nothing goes that an open incident has for evidence, that a replay behind the journal's cut needs, or that is not yet whole
in the files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import msgspec

from sentinel.daemon.kept_packs import KeptPacks
from sentinel.daemon.run_files import RunFiles
from sentinel.errors import StoreError
from sentinel.incident import Incident
from sentinel.judge.snapshot import Snapshot, snapshot_at_cut
from sentinel.store.journal import Journal
from sentinel.store.retention import RetentionConfig

log = logging.getLogger("sentinel.serving")

LOOK_S = 60.0
"""Least seconds between two looks at what has come to be too old."""
FIRST_MEMBERS = 1000
"""Members of an open incident that are kept, the first ones (chosen): a bound where it grows for ever."""
INCIDENTS_SHARE = 0.75
"""Share of its limit to which `incidents.jsonl` is brought, so that it is not written anew each time."""

_INCIDENT = msgspec.json.Decoder(Incident)


class RunRetention:
    """Of one run. Called by the loop, which judges nothing meanwhile: each turn takes milliseconds."""

    def __init__(self, name: str, journal: Journal, files: RunFiles, packs: KeptPacks, config: RetentionConfig) -> None:
        self._name, self._journal, self._files, self._packs, self._config = name, journal, files, packs, config
        self._seen = -1
        self._look_at = 0.0
        self._is_deleting = journal.cut.seq > 0
        self._begin: Snapshot | None = None
        """The state at the cut, once something is deleted; it says how much of the files lay before it."""
        self._evidence: set[str] = set()

    def use(self, config: RetentionConfig) -> None:
        """Keep so much from now on."""
        self._config = config

    def turn(self, snapshot_seq: int, open_incidents: Sequence[Incident], now: float) -> None:
        """Cut the journal where it is time to, and delete some of what lies before.

        snapshot_seq: the decision of the newest snapshot. now: seconds since the epoch.
        """
        if self._is_deleting:
            self._delete(open_incidents)
        elif snapshot_seq != self._seen or now >= self._look_at:
            self._seen, self._look_at = snapshot_seq, now + LOOK_S
            if snapshot_seq > self._journal.cut.mark and self._is_due(now):
                self._cut(snapshot_seq, open_incidents, now)

    def _is_due(self, now: float) -> bool:
        cut, limit = self._journal.cut, self._config.journal_bytes
        if not cut.mark_time:
            cut.begin(now)
        # Between one half and all of what is allowed is kept: the cut moves by halves.
        return (bool(limit) and cut.num_bytes >= limit / 2) or now - cut.mark_time >= self._config.age_s / 2

    def _cut(self, seq: int, open_incidents: Sequence[Incident], now: float) -> None:
        self._journal.cut.advance(seq, now)
        self._begin = None
        if not self._journal.cut.seq:
            return
        log.info("run %s: the journal begins with decision %d (retention)", self._name, self._journal.cut.seq + 1)
        self._is_deleting = True
        begin = self._take_stock(open_incidents)
        if begin is None:
            return
        self._files.prune(self._config, now, self._evidence, before=begin.anomalies.index)
        gone = self._incidents_to_go({one.id for one in open_incidents}, now)
        if gone:
            self._files.forget(gone)
            log.info("run %s: %d incidents that are over are forgotten (retention)", self._name, len(gone))

    def _delete(self, open_incidents: Sequence[Incident]) -> None:
        begin = self._begin or self._take_stock(open_incidents)
        if begin is not None:
            # What a restart would look for in the files stays too.
            num_whole = min(begin.anomalies.num_lines, self._files.positions[0].num_lines)
            self._is_deleting = self._journal.cut.work(self._evidence, num_anomalies=num_whole) or self._packs.prune()

    def _take_stock(self, open_incidents: Sequence[Incident]) -> Snapshot | None:
        """Learn what the journal begins with, and what open incidents need; None: nothing may be deleted."""
        try:
            self._begin = snapshot_at_cut(self._journal)
        except StoreError as error:
            log.warning("run %s: nothing is deleted from the journal: %s", self._name, error)
            self._is_deleting = False
            return None
        self._evidence = {one for incident in open_incidents for one in self._evidence_of(incident)}
        return self._begin

    def _evidence_of(self, incident: Incident) -> list[str]:
        found = [*filter(None, [incident.root]), *incident.first_causes]
        members: list[str] = []
        for body in self._journal.found.incident_bodies(incident.id):
            members += _INCIDENT.decode(body).members
            if len(members) >= FIRST_MEMBERS:
                break
        return found + members[:FIRST_MEMBERS]

    def _incidents_to_go(self, still_open: set[str], now: float) -> list[str]:
        """Return the ids of incidents that are over and too old, or for which there is no room: the oldest first."""
        sizes, cut = self._journal.found.incident_sizes(), self._journal.cut.seq
        limit = self._config.incidents_bytes or math.inf
        total, gone = sum(size for _, _, size in sizes), []
        least = INCIDENTS_SHARE * limit if total > limit else math.inf
        for one, newest_seq, size in sizes:
            if newest_seq > cut or one in still_open:
                continue
            if total <= least and self._ended_at(one) >= now - self._config.age_s:
                break
            gone.append(one)
            total -= size
        return gone

    def _ended_at(self, incident: str) -> float:
        return _INCIDENT.decode(self._journal.found.incident_bodies(incident)[-1]).time
