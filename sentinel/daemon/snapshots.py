"""Snapshots: the state of a run after one decision, from which a restart goes on, and what of the spool it needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from sentinel.daemon.run_files import FilePositions
from sentinel.daemon.stages import RunStages
from sentinel.errors import SentinelError
from sentinel.ingest.incarnation import SpoolPosition
from sentinel.judge.snapshot import Snapshot
from sentinel.store.journal import Journal
from sentinel.wire.spool import write_ack

log = logging.getLogger("sentinel.serving")

SNAPSHOT_SHARE = 0.05
"""Most of the time that snapshots may take."""

_Made = TypeVar("_Made")


def snapshot_of(stages: RunStages, positions: FilePositions) -> Snapshot:
    """Return the state of a run's stages. positions: where its files are whole."""
    return Snapshot(
        pack_hash=stages.pack_hash, judge=stages.judge.snapshot(), ingest=stages.assembler.snapshot(),
        anomalies=positions[0], incidents=positions[1],
    )  # fmt: skip


class Snapshots:
    """Those that a run's journal keeps."""

    def __init__(self, name: str, journal: Journal, interval_s: float) -> None:
        """name: of the run. interval_s: least seconds between two."""
        self.seq = 0
        """The decision behind which the newest was taken; 0: there is none."""
        self.interval_s = interval_s
        self._name, self._journal = name, journal
        self._due = 0.0

    def is_due(self, mono: float) -> bool:
        """Return whether it is time for another. mono: monotonic seconds."""
        return mono >= self._due

    def kept(self, seq: int, begun: float) -> None:
        """Take note that the journal has a new one. begun: monotonic seconds when it was begun."""
        took = time.monotonic() - begun
        self.seq = seq
        self._due = begun + max(self.interval_s, took / SNAPSHOT_SHARE)

    def restore(
        self, make: Callable[[Snapshot], _Made], until: int | None = None, *, may_begin_anew: bool = False
    ) -> tuple[_Made, Snapshot] | None:
        """Return what `make` makes of the newest that it can make anything of; None: there is none. Others are dropped.

        until: a decision; one of it or before is better than a newer one, for what came behind it is wanted again.
        may_begin_anew: none at all is better than a newer one too, for the spool still has everything.
        """
        known = list(self._journal.snapshots())
        if until is not None:
            newer = [one for one in known if one[0] > until]
            known = [one for one in known if one[0] <= until]
            if known or not may_begin_anew or self._journal.cut.seq:
                known += newer
        for seq, body in known:
            try:
                snapshot = Snapshot.read(body)
                made = make(snapshot)
            except (SentinelError, msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
                # An older one, or the whole spool, gives the same state; it only takes longer.
                log.warning("run %s: the snapshot after decision %d cannot be used: %s", self._name, seq, error)
                self._journal.drop_snapshot(seq)
                continue
            self.seq = seq
            self._drop_newer(until)
            return made, snapshot
        self._drop_newer(until)
        return None

    def _drop_newer(self, until: int | None) -> None:
        """Drop those behind the one that was restored: beside them the journal would let go of it with the next one."""
        if until is not None:
            for seq, _ in list(self._journal.snapshots()):
                if seq > self.seq:
                    self._journal.drop_snapshot(seq)


class Acknowledgement:
    """Tells the writers of the spool what no snapshot needs any more: they may delete it."""

    def __init__(self, spool_dir: Path) -> None:
        self.problem = ""
        """Why it could not be written; empty: it could."""
        self._spool_dir = spool_dir
        self._former: dict[str, SpoolPosition] = {}
        self._acked: dict[str, tuple[int, int]] = {}
        """Folder -> (file index, offset) that was written there last: of ranks that are gone it stays so."""

    def advance(self, positions: dict[str, SpoolPosition]) -> None:
        """Acknowledge what the snapshot before the newest does not need. positions: what the newest needs, by folder."""
        # Two snapshots are kept, for the newer may prove unreadable: what the older one needs must stay.
        former, self._former = self._former, positions
        for folder, position in former.items():
            place = position.file_index, position.offset
            if self._acked.get(folder) == place:
                continue
            try:
                write_ack(self._spool_dir / folder, *place)
            except OSError as error:
                self.problem = f"spool {folder} cannot be acknowledged: {error.strerror or error}"
                return
            self._acked[folder] = place
        self.problem = ""
