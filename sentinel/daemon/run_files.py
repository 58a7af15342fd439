"""RunFiles: the anomaly files and `incidents.jsonl` of a run, which are always a prefix of its journal."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence, Set
from pathlib import Path

from sentinel.errors import StoreError
from sentinel.judge.snapshot import snapshot_at_cut
from sentinel.report.files import AppendLog, LogPosition
from sentinel.store.journal import Commit, Journal
from sentinel.store.retention import RetentionConfig
from sentinel.store.run_paths import RunPaths
from sentinel.store.trouble import disk_trouble, room_words
from sentinel.store.write_clock import WriteClock

log = logging.getLogger("sentinel.serving")

FilePositions = tuple[LogPosition, LogPosition]
"""Of the anomaly files, and of `incidents.jsonl`."""

_WRITTEN = "incidents_written"
"""The journal's word for how often `incidents.jsonl` was replaced, and 1."""
_ID = re.compile(rb'"id":"([^"]*)"')


class RunFiles:
    """Appended to after each commit; what is missing behind a crash, or a full disk, is completed from the journal."""

    def __init__(self, paths: RunPaths, journal: Journal) -> None:
        self._name, self._journal = paths.name, journal
        self._anomalies, self._incidents = AppendLog(paths.anomalies), AppendLog(paths.incidents)
        self.writes = WriteClock(str(paths.run_dir))
        """How long its lines take to reach the disk."""
        self.problems: list[str] = []
        """Why lines cannot be written, in words; replaced, never changed."""

    @property
    def positions(self) -> FilePositions:
        """Where the next line goes."""
        return self._anomalies.position, self._incidents.position

    @property
    def num_failures(self) -> int:
        """Writes that failed."""
        return self._anomalies.num_failures + self._incidents.num_failures

    @property
    def num_pending(self) -> int:
        """Lines that wait for the disk."""
        return self._anomalies.num_pending + self._incidents.num_pending

    def complete(self, since: FilePositions | None) -> None:
        """Append what the journal has and the files do not. since: where they were whole; None: look from the beginning."""
        anomalies, incidents = since or (None, None)
        self._complete_anomalies(anomalies)
        self._complete_incidents(incidents)
        self._note_problems()

    def append(self, commit: Commit) -> None:
        """Append what a commit brought, once the journal has it."""
        if commit.anomalies or commit.incidents:
            with self.writes.writing():
                self._anomalies.append(one.body for _, one in commit.anomalies)
                self._incidents.append(one.body for _, one in commit.incidents)
            self._note_problems()

    def mend(self) -> None:
        """Try again what the disk did not take."""
        if self._anomalies.needs_recovery:
            self._complete_anomalies(self._anomalies.position)
        if self._incidents.needs_recovery:
            self._complete_incidents(self._incidents.position)
        for lines in (self._anomalies, self._incidents):
            if lines.num_pending:
                lines.retry()
        if self.problems:
            self._note_problems()

    def prune(self, config: RetentionConfig, now: float, evidence: Set[str], before: int) -> None:
        """Delete the oldest files of anomalies, down to the first that has evidence. before: files from this number on stay.

        evidence: ids of anomalies that stay. now: seconds since the epoch.
        """
        for path in self._anomalies.prunable(config.anomalies_bytes, now - config.age_s, before):
            if not evidence.isdisjoint(_ids_in(path)):
                return
            path.unlink()
            log.info("run %s: %s is deleted (retention)", self._name, path)

    def forget(self, incidents: Sequence[str]) -> None:
        """Delete incidents that are over from the journal, and their lines from `incidents.jsonl`."""
        if self._incidents.num_pending:
            return
        self._journal.values.put(_WRITTEN, str(self._num_written + 1))
        self._journal.found.forget_incidents(incidents)
        try:
            self._rewrite()
        except StoreError as error:
            # Lines go on into the former file, which a restart replaces.
            log.warning("run %s: %s", self._name, error)

    def sync(self) -> None:
        """Have all that was appended on the disk."""
        with self.writes.writing():
            self._anomalies.sync()
            self._incidents.sync()
        self._note_problems()

    def close(self) -> None:
        """Close the files. What was written stays."""
        self._anomalies.close()
        self._incidents.close()

    def _note_problems(self) -> None:
        # Here, in the loop: a disk that does not even say how full it is must not keep those waiting who ask.
        logs = (self._anomalies, self._incidents)
        self.problems = [one.problem + room_words(one.path) for one in logs if one.problem]

    @property
    def _num_written(self) -> int:
        """How often `incidents.jsonl` was replaced, and 1."""
        return int(self._journal.values.get(_WRITTEN) or 1)

    def _complete_anomalies(self, since: LogPosition | None) -> None:
        begin = None if since is not None else snapshot_at_cut(self._journal)
        try:
            self._complete(self._anomalies, "anomalies", begin.anomalies if begin else since)
        except StoreError:
            # Somebody cut or removed a file. What the journal has is written again; from where it begins, it knows.
            begin = begin or snapshot_at_cut(self._journal)
            if begin is None:
                self._complete(self._anomalies, "anomalies", None)
                return
            self._anomalies.begin_file(begin.anomalies)
            tail = self._journal.found.bodies("anomalies", begin.anomalies.num_lines)
            self._anomalies.append(body for _, body in tail)

    def _complete_incidents(self, since: LogPosition | None) -> None:
        if self._num_written > 1 and (since is None or since.index != self._num_written):
            self._rewrite()
            return
        try:
            self._complete(self._incidents, "incidents", since)
        except StoreError:
            if self._num_written > 1:
                self._rewrite()
            else:
                self._complete(self._incidents, "incidents", None)

    def _rewrite(self) -> None:
        try:
            self._incidents.rewrite(self._journal.found.bodies("incidents"), self._num_written)
        except OSError as error:
            raise disk_trouble(self._incidents.path, error) from error

    def _complete(self, lines: AppendLog, table: str, since: LogPosition | None) -> None:
        num_lines = since.num_lines if since else 0
        found = lines.recover((body for _, body in self._journal.found.bodies(table, num_lines)), since)
        if found.num_written or found.set_aside:
            aside = f"; bytes that are not ours are now in {found.set_aside}" if found.set_aside else ""
            log.info("run %s: %d lines of %s were completed%s", self._name, found.num_written, table, aside)


def _ids_in(path: Path) -> set[str]:
    with path.open("rb") as file:
        return {match.group(1).decode() for line in file if (match := _ID.search(line)) is not None}
