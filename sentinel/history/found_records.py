"""What was found in runs as rows: their anomalies, and their incidents as they stand.

Read from JSON lines, and of a run in a store from its history.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec
import pyarrow as pa

from sentinel.anomaly import Anomaly, Severity
from sentinel.errors import MALFORMED, ConfigError, StoreError
from sentinel.history.remote_run import RemoteRun, RunPlace
from sentinel.incident import Incident
from sentinel.known_words import nearest
from sentinel.recorded_incidents import gravity, incident_revisions, newest_revisions, revisions_in

ANOMALIES = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in ("run", "id", "event")),
        *(pa.field(name, pa.int64()) for name in ("attempt", "step")),
        *(pa.field(name, pa.string()) for name in ("severity", "rule", "kind", "tag_name", "statistic")),
        *(pa.field(name, pa.float64()) for name in ("value", "baseline", "score")),
        *(pa.field(name, pa.string()) for name in ("value_text", "message")),
        *(pa.field(name, pa.int64()) for name in ("rank", "micro_step", "pp_stage", "vpp_stage", "call_id", "count")),
        pa.field("ranks", pa.list_(pa.int64())),
        *(pa.field(name, pa.string()) for name in ("detector", "onset_id")),
        pa.field("time", pa.timestamp("us", tz="UTC")),
    ]
)
INCIDENTS = pa.schema(
    [
        *(
            pa.field(name, pa.string())
            for name in ("run", "id", "state", "severity", "title", "root_name", "verdict", "to_do")
        ),
        *(pa.field(name, pa.int64()) for name in ("opened_step", "last_step", "num_members")),
        pa.field("ranks", pa.list_(pa.int64())),
        *(pa.field(name, pa.int64()) for name in ("attempt", "revision")),
        pa.field("time", pa.timestamp("us", tz="UTC")),
    ]
)
STATES = ("open", "resolved", "settled", "ended", "closed")
"""Of an incident that stands by itself."""

_ANOMALY = msgspec.json.Decoder(Anomaly)


def anomalies(
    runs: Mapping[str, RunPlace], *, rule: str | None, severity: str | None, steps: tuple[int | None, int | None]
) -> pa.Table:
    """Return the anomalies of some runs, by run, attempt and step: `ANOMALIES`. A line that is cut is left out.

    rule: of this rule alone; severity: at least so grave. ConfigError, with the nearest, for words that are not known.
    """
    least = 0 if severity is None else _severity(severity).level
    first, last = steps[0] or 0, math.inf if steps[1] is None else steps[1]
    rows: list[tuple[str, Anomaly]] = []
    rules: set[str] = set()
    for run, place in runs.items():
        for one in _anomalies(place):
            rules.add(one.rule)
            if one.severity.level >= least and first <= one.step <= last and rule in (None, one.rule):
                rows.append((run, one))
    if rule is not None and rules and rule not in rules:
        raise ConfigError(f'anomalies: no anomaly is of the rule "{rule}"{nearest(rule, sorted(rules))}')
    order = {run: at for at, run in enumerate(runs)}
    rows.sort(key=lambda row: (order[row[0]], row[1].attempt, row[1].step))
    return _table(ANOMALIES, [msgspec.to_builtins(one) | {"run": run} for run, one in rows])


def _anomalies(place: RunPlace) -> Iterable[Anomaly]:
    if isinstance(place, RemoteRun):
        lines = place.found("anomalies")
    else:
        lines = [line for path in sorted((place / "anomalies").glob("*.jsonl")) for line in _lines(path)]
    for line in lines:
        try:
            yield _ANOMALY.decode(line)
        except MALFORMED:
            continue  # The last line of a file that is being written, or one that a crash cut.


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def standing_incidents(runs: Mapping[str, RunPlace], *, state: str | None = None) -> list[tuple[str, Incident]]:
    """Return (run, newest revision) of the incidents of some runs: the open ones first, the gravest and newest before.

    Those that became part of another are in that. state: of this state alone; ConfigError for one that there is not.
    """
    if state is not None and state not in STATES:
        raise ConfigError(f'incidents: unknown state "{state}"{nearest(state, STATES)}')
    found = [
        (run, one)
        for run, place in runs.items()
        for one in newest_revisions(_revisions(place)).values()
        if one.state != "merged" and state in (None, one.state)
    ]
    found.sort(key=lambda row: gravity(row[1]))
    return found


def _revisions(place: RunPlace) -> list[Incident]:
    return revisions_in(place.found("incidents")) if isinstance(place, RemoteRun) else incident_revisions(place)


def incidents(runs: Mapping[str, RunPlace], *, state: str | None = None) -> pa.Table:
    """Return the newest revision of each incident, in the order of `standing_incidents`: `INCIDENTS`."""
    return _table(
        INCIDENTS,
        [
            msgspec.to_builtins(one) | {"run": run, "to_do": one.to_do, "last_step": max(one.last_step, one.active_step)}
            for run, one in standing_incidents(runs, state=state)
        ],
    )


def _severity(word: str) -> Severity:
    known = [one.value for one in Severity]
    if word not in known:
        raise ConfigError(f'anomalies: unknown severity "{word}"{nearest(word, known)}')
    return Severity(word)


def _table(schema: pa.Schema, rows: Collection[dict[str, object]]) -> pa.Table:
    made = [{**row, "time": _microseconds(row["time"])} for row in rows]
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in made], schema=schema)


def _microseconds(seconds: object) -> int | None:
    """Return a time as Arrow has it; None where it is not known, or none that a clock shows."""
    return int(seconds * 1e6) if isinstance(seconds, float) and 0 < seconds < 2**33 else None
