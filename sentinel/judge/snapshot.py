"""Snapshot: the state of a run after one decision, from which a restart, or a replay behind the journal's cut, goes on."""

from __future__ import annotations

import msgspec

from sentinel.errors import StoreError
from sentinel.report.files import LogPosition
from sentinel.store.journal import Journal

VERSION = 1


class Snapshot(msgspec.Struct, kw_only=True):
    """What a restart goes on from: the state after one decision."""

    version: int = VERSION
    pack_hash: str
    judge: bytes
    ingest: bytes
    anomalies: LogPosition
    incidents: LogPosition

    @property
    def body(self) -> bytes:
        """Bytes for the journal; `read` takes them back."""
        return msgspec.msgpack.encode(self)

    @property
    def positions(self) -> tuple[LogPosition, LogPosition]:
        """Where the anomaly files and `incidents.jsonl` were whole."""
        return self.anomalies, self.incidents

    @classmethod
    def read(cls, body: bytes) -> Snapshot:
        """Return the snapshot that `body` says. StoreError or msgspec.MsgspecError where it cannot be read."""
        snapshot = msgspec.msgpack.decode(body, type=cls)
        if snapshot.version != VERSION:
            raise StoreError(f"version {snapshot.version}, expected {VERSION}")
        return snapshot


def snapshot_at_cut(journal: Journal) -> Snapshot | None:
    """Return the state where a journal begins; None: it begins where the run did.

    StoreError where what it begins with cannot be read.
    """
    if not journal.cut.seq:
        return None
    body = journal.snapshot(journal.cut.seq)
    try:
        if body is None:
            raise StoreError("it is not there")
        return Snapshot.read(body)
    except (StoreError, msgspec.MsgspecError) as error:
        raise StoreError(
            f"{journal.path}: the state after decision {journal.cut.seq}, where it begins, cannot be used: {error}; "
            "--recompute reads the spool without it"
        ) from error
