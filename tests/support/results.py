"""What a judge wrote into a run directory, read back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.decision import Decision, decode_decision
from sentinel.incident import Incident
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths


def anomalies(run_dir: Path) -> list[Anomaly]:
    """Return every anomaly of a run, in the order written."""
    decode = msgspec.json.Decoder(Anomaly).decode
    files = sorted((run_dir / "anomalies").glob("*.jsonl"))
    return [decode(line) for file in files for line in file.read_bytes().splitlines()]


PACE = frozenset({"slow-rank", "stale-rank"})
"""Rules about the pace of ranks, which may be true of any run here: more ranks than cores take turns."""


def anomalies_but_of_pace(run_dir: Path) -> list[Anomaly]:
    """Return the anomalies of a run, without what a busy machine makes true."""
    return [one for one in anomalies(run_dir) if one.rule not in PACE]


def revisions(run_dir: Path) -> list[Incident]:
    """Return every revision of every incident of a run, in the order written; each names the members that it added."""
    path = run_dir / "incidents.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Incident) for line in lines]


def incidents(run_dir: Path) -> list[Incident]:
    """Return the newest revision of every incident of a run."""
    return list({one.id: one for one in revisions(run_dir)}.values())


def result_bytes(run_dir: Path) -> tuple[bytes, bytes]:
    """Return the bytes of all anomalies and of all revisions of incidents: two runs judged alike have the same."""
    files = sorted((run_dir / "anomalies").glob("*.jsonl"))
    incidents = run_dir / "incidents.jsonl"
    return b"".join(file.read_bytes() for file in files), incidents.read_bytes() if incidents.exists() else b""


def decisions(run_dir: Path) -> list[Decision]:
    """Return, from the journal, which rows were in each step that was judged, in order."""
    journal = Journal(RunPaths.of(run_dir).journal, read_only=True)
    try:
        decided = (decode_decision(kind, body) for _, kind, body in journal.decisions())
        return [one for one in decided if isinstance(one, Decision)]
    finally:
        journal.close()
