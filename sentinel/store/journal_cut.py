"""JournalCut: where a journal begins. What lies before is deleted, a little at a time, and counted.

The cut is a decision behind which a snapshot was taken: from that snapshot and the decisions behind it a replay makes the
same judgements. The mark is where the cut moves next; so between one half and all of what may be kept is there.
"""

from __future__ import annotations

from collections.abc import Collection

from sentinel.store.journal_file import JournalFile

ROWS_PER_TURN = 4000
"""Most rows deleted at once (chosen): about 20 ms, in which no step is judged."""
AUDIT_LINES = 100_000
"""Most lines of the audit that are kept."""
PAGES_PER_TURN = 1000
"""Most free pages given back to the file system at once."""
FREE_SHARE = 0.5
"""Share of a journal that is free from which on pages are given back: less is used again by what comes."""


class JournalCut:
    """Of one journal. Written by its daemon; `seq` is what readers ask for."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self.seq = self._number("cut")
        """Decisions up to this one may be gone; 0: none is."""
        self.mark = self._number("mark")
        """Where the cut moves next; 0: the beginning."""
        self.mark_time = float(file.meta("mark:time") or 0.0)
        """Seconds since the epoch when the mark was set."""
        self.num_bytes = self._number("mark:bytes")
        """Bytes that were added since the mark was set, about."""
        self._outbox = self._number("cut:outbox")
        self._passed = 0
        """Anomalies up to this position were looked at; what is left of them is evidence."""
        self._is_behind = self.seq > 0

    @property
    def snapshots(self) -> tuple[int, int]:
        """The decisions whose snapshots are kept for a replay, beside the newest."""
        return self.seq, self.mark

    def add(self, num_bytes: int) -> None:
        """Count what was written. `keep_count` makes it survive a restart."""
        self.num_bytes += num_bytes

    def keep_count(self) -> None:
        """Write the count down, inside a transaction of somebody else."""
        self._put("mark:bytes", self.num_bytes)

    def begin(self, now: float) -> None:
        """Count age from now on, in a journal that has no mark yet."""
        self.mark_time = now
        with self._file.mutex, self._file.transaction():
            self._put("mark:time", now)

    def advance(self, seq: int, now: float) -> None:
        """Cut where the mark is, and mark `seq`, a decision with a snapshot. now: seconds since the epoch."""
        self.put(self.mark, seq, now, outbox=self._number("mark:outbox"))

    def put(self, cut: int, mark: int, now: float, *, outbox: int = 0) -> None:
        """Set both. outbox: the last row of the outbox that belongs before the cut."""
        with self._file.mutex, self._file.transaction():
            for key, value in (("cut", cut), ("mark", mark), ("mark:time", now), ("mark:bytes", 0), ("cut:outbox", outbox)):
                self._put(key, value)
            self._put("mark:outbox", self._file.one("SELECT coalesce(max(position), 0) FROM outbox"))
        self.seq, self.mark, self.mark_time, self.num_bytes, self._outbox = cut, mark, now, 0, outbox
        self._passed = 0
        self._is_behind = cut > 0

    def work(self, evidence: Collection[str], *, num_anomalies: int) -> bool:
        """Delete some of what lies before the cut; False: nothing is left to delete.

        evidence: ids of anomalies that stay. num_anomalies: as many of the first anomalies are whole in their files.
        """
        if not self._is_behind:
            return False
        with self._file.mutex, self._file.transaction():
            num_rows = self._delete_decisions() + self._delete_anomalies(evidence, num_anomalies)
            if num_rows < ROWS_PER_TURN:
                self._delete_done()
        self._is_behind = num_rows >= ROWS_PER_TURN or self._give_back()
        return self._is_behind

    def pruned(self, kind: str) -> int:
        """Return how many decisions of a kind were deleted."""
        return self._number(f"pruned:{kind}")

    def _delete_decisions(self) -> int:
        rows = self._file.db.execute(
            "SELECT seq, kind FROM decisions WHERE seq < ? ORDER BY seq LIMIT ?", (self.seq, ROWS_PER_TURN)
        ).fetchall()
        if rows:
            self._file.db.execute("DELETE FROM decisions WHERE seq <= ?", (rows[-1][0],))
        for kind in {kind for _, kind in rows}:
            self._put(f"pruned:{kind}", self.pruned(kind) + sum(one == kind for _, one in rows))
        return len(rows)

    def _delete_anomalies(self, evidence: Collection[str], until: int) -> int:
        rows = self._file.db.execute(
            # The newest row stays: its position is where the next goes on from.
            "SELECT position, id FROM anomalies WHERE position > ? AND position <= ? AND seq <= ? "
            "AND position < (SELECT max(position) FROM anomalies) ORDER BY position LIMIT ?",
            (self._passed, until, self.seq, ROWS_PER_TURN),
        ).fetchall()
        gone = [(position,) for position, one in rows if one not in evidence]
        self._file.db.executemany("DELETE FROM anomalies WHERE position = ?", gone)
        self._passed = rows[-1][0] if rows else self._passed
        return len(rows)

    def _delete_done(self) -> None:
        """Delete what was sent before the cut, and the oldest of a long audit; the newest row of each stays."""
        self._file.db.execute(
            "DELETE FROM outbox WHERE outcome != '' AND position <= ? AND position < (SELECT max(position) FROM outbox)",
            (self._outbox,),
        )
        self._file.db.execute("DELETE FROM audit WHERE position <= (SELECT max(position) FROM audit) - ?", (AUDIT_LINES,))

    def _give_back(self) -> bool:
        """Give free pages back to the file system where half of the file is free; False: it is not."""
        with self._file.mutex:
            num_pages, num_free = self._file.one("PRAGMA page_count"), self._file.one("PRAGMA freelist_count")
            if num_free <= PAGES_PER_TURN or num_free < FREE_SHARE * num_pages or not self._file.one("PRAGMA auto_vacuum"):
                return False
            # `execute` would stop behind the first page.
            self._file.db.executescript(f"PRAGMA incremental_vacuum({PAGES_PER_TURN})")
        return True

    def _number(self, key: str) -> int:
        return int(self._file.meta(key) or 0)

    def _put(self, key: str, value: float) -> None:
        self._file.db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, value))
