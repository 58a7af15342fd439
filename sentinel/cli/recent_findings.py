"""RecentFindings: the open incidents of a run, its newest anomalies, and where there were most of them lately."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

import msgspec

from sentinel.anomaly import Anomaly, is_liveness
from sentinel.anomaly_words import value_words
from sentinel.errors import MALFORMED
from sentinel.incident import Incident
from sentinel.recorded_incidents import gravity
from sentinel.report.log_tail import LogTail

TAIL_BYTES = 2**20
"""Of the anomalies that are there at the first look, those within so many bytes of the end are read: about 2,000."""
MAX_ANOMALIES = 2000
"""Newest onsets that are kept; a bound on memory."""
LATELY_STEPS = 200
"""Newest steps of which layers are counted. Too small: one that is ill every hundredth step is missed; too large: one that
is well again stays at the top."""

_ANOMALY = msgspec.json.Decoder(Anomaly)
_INCIDENT = msgspec.json.Decoder(Incident)


class HotLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the model that was anomalous lately."""

    name: str
    """The segment of the black box, else the tensor's own name."""
    num_anomalies: int
    """Onsets in the newest LATELY_STEPS steps."""
    score: float | None
    """The largest departure from the usual, in units of what its rule allows; null: a rule about absolute states fired, as
    about NaN, which is more than any number."""
    worst: str
    """What and where that was: `wgrad of blocks.1.fc1.weight: norm 12.5`."""
    last_step: int


class RecentFindings:
    """Reads what a daemon writes into a run, as it is appended."""

    def __init__(self, run_dir: Path) -> None:
        self.num_unreadable = 0
        """Lines that are no anomaly and no incident."""
        self._incidents: dict[str, Incident] = {}
        self._onsets: deque[Anomaly] = deque(maxlen=MAX_ANOMALIES)
        self._incident_log = LogTail(run_dir / "incidents.jsonl", self._incidents.clear)
        self._anomaly_log = LogTail(run_dir / "anomalies", self._onsets.clear, tail_bytes=TAIL_BYTES)

    def look(self) -> None:
        """Read what is new."""
        for line in self._incident_log.lines():
            try:
                self._take_incident(_INCIDENT.decode(line))
            except MALFORMED:
                self.num_unreadable += 1
        for line in self._anomaly_log.lines():
            try:
                anomaly = _ANOMALY.decode(line)
            except MALFORMED:
                self.num_unreadable += 1
                continue
            if anomaly.event == "onset":
                self._onsets.append(anomaly)

    def _take_incident(self, one: Incident) -> None:
        known = self._incidents.get(one.id)
        if known is None or known.revision <= one.revision:
            # Who belongs to it is asked of the file (`sentinel explain`), and may be a hundred thousand.
            self._incidents[one.id] = msgspec.structs.replace(one, members=(), first_causes=())

    def open_incidents(self) -> tuple[Incident, ...]:
        """Return the open incidents, the gravest and newest first, without the ids of their members."""
        return tuple(sorted((one for one in self._incidents.values() if one.state == "open"), key=gravity))

    def newest(self, most: int) -> tuple[Anomaly, ...]:
        """Return the newest onsets, the newest first."""
        return tuple(reversed(self._onsets))[:most]

    def hottest(self, most: int, attempt: int, step: int) -> tuple[HotLayer, ...]:
        """Return the parts of the model that were anomalous lately: by how far the worst departed, then by how often.

        attempt, step: the newest.
        """
        by_layer: dict[str, list[Anomaly]] = {}
        for one in self._onsets:
            is_lately = one.attempt == attempt and one.step > step - LATELY_STEPS
            if is_lately and one.kind != "scalar" and one.tag_name and not is_liveness(one):
                by_layer.setdefault(one.segment or one.tag_name, []).append(one)
        layers = [_layer(name, found) for name, found in by_layer.items()]
        layers.sort(key=lambda one: (-_size(one.score), -one.num_anomalies, one.name))
        return tuple(layers[:most])


def _size(score: float | None) -> float:
    return math.inf if score is None else score


def _layer(name: str, found: list[Anomaly]) -> HotLayer:
    worst = max(found, key=lambda one: _size(one.score))
    return HotLayer(
        name=name, num_anomalies=len(found), score=worst.score, last_step=max(one.step for one in found),
        worst=f"{worst.kind} of {worst.tag_name}: {value_words(worst)}",
    )  # fmt: skip
