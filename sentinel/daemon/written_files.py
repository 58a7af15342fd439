"""What the files of a run say that was found so far: its anomalies and the revisions of its incidents, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.errors import MALFORMED
from sentinel.incident import Incident
from sentinel.report.files import LogPosition
from sentinel.store.found import FoundAnomaly, FoundIncident
from sentinel.store.run_paths import RunPaths


class _Known(msgspec.Struct):
    id: str
    attempt: int = 0
    step: int = -1
    severity: str = "info"
    event: str = "onset"


class _Revision(msgspec.Struct):
    id: str
    revision: int


_KNOWN = msgspec.json.Decoder(_Known)
_REVISION = msgspec.json.Decoder(_Revision)
_ANOMALY = msgspec.json.Decoder(Anomaly)
_INCIDENT = msgspec.json.Decoder(Incident)


class WrittenFiles:
    """Reads whole lines alone: a torn last line, or one that is no record, ends what is known of its file."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self.ids: set[str] = set()
        """Of the anomalies read so far."""
        self.num_onsets = 0
        self.newest = (-1, -1)
        """(attempt, step) of the newest anomaly read so far."""
        self.newest_incidents: dict[str, bytes] = {}
        """Id -> line of the newest revision, of the incidents read so far."""
        self.anomalies_position = LogPosition()
        """Behind the last line that was read."""
        self.incidents_position = LogPosition()

    def anomalies(self) -> Iterator[FoundAnomaly]:
        """Yield the anomalies, oldest first."""
        files = sorted(one for one in self._paths.anomalies.glob("*.jsonl") if one.stem.isdecimal())
        for path in files:
            self.anomalies_position = LogPosition(num_lines=self.anomalies_position.num_lines, index=int(path.stem))
            for line in _lines(path):
                try:
                    one = _KNOWN.decode(line)
                except MALFORMED:
                    break
                self.ids.add(one.id)
                self.num_onsets += one.event == "onset"
                self.newest = max(self.newest, (one.attempt, one.step))
                self.anomalies_position = _behind(self.anomalies_position, line)
                yield FoundAnomaly(id=one.id, attempt=one.attempt, step=one.step, severity=one.severity, body=line)

    def incidents(self) -> Iterator[FoundIncident]:
        """Yield the revisions of incidents, oldest first."""
        for line in _lines(self._paths.incidents):
            try:
                one = _REVISION.decode(line)
            except MALFORMED:
                break
            self.newest_incidents[one.id] = line
            self.incidents_position = _behind(self.incidents_position, line)
            yield FoundIncident(id=one.id, revision=one.revision, body=line)

    def newest_revisions(self) -> dict[str, Incident]:
        """Return the newest revision of each incident read so far, by id."""
        return {one: _INCIDENT.decode(line) for one, line in self.newest_incidents.items()}

    def roots(self, wanted: set[str]) -> dict[str, Anomaly]:
        """Return the anomalies with these ids."""
        found: dict[str, Anomaly] = {}
        if wanted:
            for path in sorted(self._paths.anomalies.glob("*.jsonl")):
                for line in _lines(path):
                    # Most lines are of others: told by their first bytes, without reading them.
                    if line[7:23].decode("ascii", "replace") in wanted:
                        found |= {one.id: one for one in (_ANOMALY.decode(line),)}
        return found


def _lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line[:-1]


def _behind(position: LogPosition, line: bytes) -> LogPosition:
    return msgspec.structs.replace(position, num_lines=position.num_lines + 1, offset=position.offset + len(line) + 1)
