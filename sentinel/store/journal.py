"""The journal: what was decided, judged, found, sent and commanded, in one SQLite file that survives kill -9.

The order of events for every step, which makes "never twice, never lost" hold at any instant:

1. the decision is written (`record`) before anything judges it;
2. one transaction (`commit`) moves the judged offset, the anomalies, the incidents and the outbox together;
3. only then do lines reach `anomalies/*.jsonl` and `incidents.jsonl`, messages the sinks, and commands the ranks.

So the files are always a prefix of the journal, and what is missing from them after a crash is appended from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sentinel.errors import StoreError
from sentinel.store.audit import Audit
from sentinel.store.found import Found, FoundAnomaly, FoundIncident
from sentinel.store.journal_cut import JournalCut
from sentinel.store.journal_file import JournalFile
from sentinel.store.lease_fence import EPOCH
from sentinel.store.outbox_table import OutboxTable, Outgoing
from sentinel.store.run_values import RunValues
from sentinel.store.salvage import Salvage

ROW_BYTES = 48
"""Bytes that a row takes beside its body, with its place in the indexes, about."""


@dataclass(kw_only=True)
class Commit:
    """The results of judging up to one decision; `Journal.commit` writes them whole or not at all."""

    judged: int
    """Seq of the last decision whose results these are."""
    anomalies: list[tuple[int, FoundAnomaly]] = field(default_factory=list)
    """(seq of the decision, anomaly) in total order."""
    incidents: list[tuple[int, FoundIncident]] = field(default_factory=list)
    outbox: list[Outgoing] = field(default_factory=list)
    num_onsets: int = 0
    """Onsets among the anomalies since the run began, these included."""
    snapshot: bytes | None = None
    """State after the decision `judged`; None: no snapshot this time."""


class Journal:
    """One run's journal. Safe to share between threads; one process at a time writes (the run's lock sees to that).

    path: `<state-dir>/journal.sqlite`, made 0600 with its directory 0700. Raises StoreError on a network file system,
    for a journal of a newer version, for a file that is no journal, and for what the disk did (`journal_trouble`).
    epoch: of the lease under which this process writes; 0: under none. FencedOff where the journal knows a higher one, now
    or at any later write.
    """

    def __init__(self, path: Path, *, read_only: bool = False, epoch: int = 0) -> None:
        self.path = path
        self._file = JournalFile(path, read_only=read_only, epoch=epoch)
        self.found = Found(self._file)
        self.outbox = OutboxTable(self._file, read_only=read_only)
        self.audit = Audit(self._file)
        self.values = RunValues(self._file)
        self.cut = JournalCut(self._file)
        self.writes = self._file.writes
        """How long its transactions take to reach the disk."""
        self._last_seq = int(self._file.one("SELECT coalesce(max(seq), 0) FROM decisions"))

    def close(self) -> None:
        """Close the file. What was committed stays."""
        self._file.close()

    @property
    def epoch(self) -> int:
        """The highest epoch of a lease under which it was written; 0: under none."""
        return int(self._file.meta(EPOCH) or 0)

    @property
    def is_fenced_off(self) -> bool:
        """Whether a process with a lease of a higher epoch has taken this journal over."""
        return self._file.fence.is_passed(self.epoch)

    # Decisions and packs: written before anything judges them.

    @property
    def last_seq(self) -> int:
        """Seq of the newest decision; 0 when there is none."""
        return self._last_seq

    @property
    def id(self) -> str:
        """What it is told by from one that is made in its place: positions of rows are of one journal."""
        return str(self._file.meta("id") or "")

    @property
    def judged(self) -> int:
        """Seq of the last decision whose judgement was committed; 0 when there is none."""
        value = self._file.meta("judged")
        return int(value) if value is not None else 0

    def record(self, decisions: Sequence[tuple[int, str, bytes]]) -> None:
        """Write (seq, kind, body), in one transaction. Seqs go on from `last_seq` without a gap.

        When this returns, kill -9 cannot undo it. A power cut can until the next `commit`, which syncs it to the disk before
        a judgement on it leaves the daemon; until then a step may be decided anew. That saves a sync a step.
        """
        if not decisions:
            return
        with self._file.mutex:
            self._file.db.execute("PRAGMA synchronous=NORMAL")
            try:
                with self._file.transaction():
                    self._file.db.executemany("INSERT INTO decisions VALUES(?, ?, ?)", decisions)
            finally:
                self._file.db.execute("PRAGMA synchronous=FULL")
            self._last_seq = decisions[-1][0]
            self.cut.add(sum(ROW_BYTES + len(body) for _, _, body in decisions))

    def decisions(self, after: int = 0, until: int | None = None) -> Iterator[tuple[int, str, bytes]]:
        """Yield (seq, kind, body) of decisions after `after` and up to `until`, in order."""
        position = after
        while True:
            with self._file.mutex:
                page = self._file.db.execute(
                    "SELECT seq, kind, body FROM decisions WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT 256",
                    (position, 2**62 if until is None else until),
                ).fetchall()
            yield from page
            if len(page) < 256:
                return
            position = page[-1][0]

    def newest_decisions(self, kind: str, limit: int) -> list[bytes]:
        """Return the newest decisions of a kind, `step` or `tick`, newest first."""
        with self._file.mutex:
            rows = self._file.db.execute(
                f"SELECT body FROM decisions WHERE kind = '{_known(kind)}' ORDER BY seq DESC LIMIT ?", (limit,)
            ).fetchall()
        return [bytes(row[0]) for row in rows]

    @property
    def num_steps(self) -> int:
        """Steps that were decided since the run began."""
        num_ticks = int(self._file.one("SELECT count(*) FROM decisions WHERE kind = 'tick'"))
        return self._last_seq - num_ticks - self.cut.pruned("tick")

    def keep_pack(self, pack_hash: str, body: bytes) -> None:
        """Keep the text of a rule pack, so that a replay judges with the rules that the daemon had."""
        with self._file.mutex, self._file.transaction():
            self._file.db.execute("INSERT OR IGNORE INTO packs VALUES(?, ?)", (pack_hash, body))

    def pack(self, pack_hash: str) -> bytes | None:
        """Return the text kept for `pack_hash`, or None."""
        row = self._file.row("SELECT body FROM packs WHERE hash = ?", (pack_hash,))
        return None if row is None else bytes(row[0])

    def pack_hashes(self) -> set[str]:
        """Return the hashes of the rule packs that are kept."""
        with self._file.mutex:
            return {row[0] for row in self._file.db.execute("SELECT hash FROM packs")}

    def drop_packs(self, hashes: Collection[str]) -> None:
        """Delete the texts of rule packs. A replay needs each that a decision names."""
        with self._file.mutex, self._file.transaction():
            self._file.db.executemany("DELETE FROM packs WHERE hash = ?", [(one,) for one in hashes])

    def take_over(self, found: Salvage) -> None:
        """Write what was salvaged of a former journal: messages that wait, the audit, rules, small values."""
        with self._file.mutex, self._file.transaction():
            for query, rows in found.inserts:
                self._file.db.executemany(query, rows)

    # Judgements.

    def commit(self, commit: Commit) -> None:
        """Write the judged offset, anomalies, incidents and outbox of a commit in one transaction.

        StoreError where its offset is below the one committed before, or the disk refuses.
        """
        with self._file.mutex, self._file.transaction():
            before = self.judged
            if commit.judged < before:
                raise StoreError(
                    f"{self.path}: expected a judgement after decision {before}, got {commit.judged}; a second daemon?"
                )
            self._file.db.execute("INSERT OR REPLACE INTO meta VALUES('judged', ?)", (commit.judged,))
            if commit.anomalies:
                self._file.db.execute("INSERT OR REPLACE INTO meta VALUES('num_onsets', ?)", (commit.num_onsets,))
            self._file.db.executemany(
                "INSERT INTO anomalies(seq, id, attempt, step, severity, body) VALUES(?, ?, ?, ?, ?, ?)",
                [(seq, one.id, one.attempt, one.step, one.severity, one.body) for seq, one in commit.anomalies],
            )
            self._file.db.executemany(
                "INSERT INTO incidents(seq, id, revision, body) VALUES(?, ?, ?, ?)",
                [(seq, one.id, one.revision, one.body) for seq, one in commit.incidents],
            )
            self._file.db.executemany(
                "INSERT OR IGNORE INTO outbox(key, topic, body, tries) VALUES(?, ?, ?, ?)",
                [(one.key, one.topic, one.body, one.tries) for one in commit.outbox],
            )
            if commit.snapshot is not None:
                self._file.db.execute("INSERT OR REPLACE INTO snapshots VALUES(?, ?)", (commit.judged, commit.snapshot))
                # Two are kept: the newest may have been written by a version that cannot be read back.
                self._file.db.execute(
                    "DELETE FROM snapshots WHERE seq NOT IN (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT 2) "
                    "AND seq NOT IN (?, ?)",
                    self.cut.snapshots,
                )
                self.cut.keep_count()
            bodies = [one.body for _, one in commit.anomalies] + [one.body for _, one in commit.incidents]
            self.cut.add(sum(ROW_BYTES + len(body) for body in (*bodies, *(one.body for one in commit.outbox))))

    def snapshots(self) -> Iterator[tuple[int, bytes]]:
        """Yield (seq, state) of the kept snapshots, newest first."""
        with self._file.mutex:
            seqs = [row[0] for row in self._file.db.execute("SELECT seq FROM snapshots ORDER BY seq DESC")]
        for seq in seqs:
            body = self.snapshot(seq)
            if body is not None:
                yield seq, body

    def snapshot(self, seq: int) -> bytes | None:
        """Return the state after a decision; None: it was not kept."""
        row = self._file.row("SELECT body FROM snapshots WHERE seq = ?", (seq,))
        return None if row is None else bytes(row[0])

    def drop_snapshot(self, seq: int) -> None:
        """Delete a snapshot that is of no use. seq: the decision behind which it was taken."""
        with self._file.mutex, self._file.transaction():
            self._file.db.execute("DELETE FROM snapshots WHERE seq = ?", (seq,))


def _known(kind: str) -> str:
    assert kind in ("step", "tick"), kind
    return kind
