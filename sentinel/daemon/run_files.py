"""RunFiles: the anomaly files and `incidents.jsonl` of a run, which are always a prefix of its journal."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sentinel.errors import StoreError
from sentinel.report.files import AppendLog, LogPosition
from sentinel.store.journal import Commit, Journal
from sentinel.store.run_paths import RunPaths

log = logging.getLogger("sentinel.serving")

FilePositions = tuple[LogPosition, LogPosition]
"""Of the anomaly files, and of `incidents.jsonl`."""


class RunFiles:
    """Appended to after each commit; what is missing behind a crash, or a full disk, is completed from the journal."""

    def __init__(self, paths: RunPaths, journal: Journal) -> None:
        self._name, self._journal = paths.name, journal
        self._anomalies, self._incidents = AppendLog(paths.anomalies), AppendLog(paths.incidents)

    @property
    def positions(self) -> FilePositions:
        """Where the next line goes."""
        return self._anomalies.position, self._incidents.position

    @property
    def problems(self) -> list[str]:
        """Why lines cannot be written, in words."""
        return [one.problem for one in (self._anomalies, self._incidents) if one.problem]

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
        self._complete(self._anomalies, "anomalies", anomalies)
        self._complete(self._incidents, "incidents", incidents)

    def append(self, commit: Commit) -> None:
        """Append what a commit brought, once the journal has it."""
        self._anomalies.append(one.body for _, one in commit.anomalies)
        self._incidents.append(one.body for _, one in commit.incidents)

    def mend(self) -> None:
        """Try again what the disk did not take."""
        for lines, table in ((self._anomalies, "anomalies"), (self._incidents, "incidents")):
            if lines.needs_recovery:
                self._complete(lines, table, lines.position)
            elif lines.num_pending:
                lines.retry()

    def sync(self) -> None:
        """Have all that was appended on the disk."""
        self._anomalies.sync()
        self._incidents.sync()

    def close(self) -> None:
        """Close the files. What was written stays."""
        self._anomalies.close()
        self._incidents.close()

    def _complete(self, lines: AppendLog, table: str, since: LogPosition | None) -> None:
        def tail(after: int) -> Iterable[bytes]:
            return (body for _, body in self._journal.found.bodies(table, after))

        try:
            found = lines.recover(tail(since.num_lines if since else 0), since)
        except StoreError:
            found = lines.recover(tail(0))
        if found.num_written or found.set_aside:
            aside = f"; bytes that are not ours are now in {found.set_aside}" if found.set_aside else ""
            log.info("run %s: %d lines of %s were completed%s", self._name, found.num_written, table, aside)
