"""The k earliest of any number of recorded anomalies, in bounded memory and independent of the order of files.

Large inputs are cut into ranges of bytes and shared among processes.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.errors import ConfigError, SentinelError
from sentinel.explain.anomaly_files import Damage, FileRange, anomaly_files, ranges_of
from sentinel.explain.msprobe_records import from_msprobe, msprobe_key
from sentinel.explain.selection import MSPROBE_LINE, RECORD, Candidate, Findings, Selection
from sentinel.recorded_incidents import find_incident, incident_members, incident_revisions, newest_revisions, no_causes

RESULT_NAME = "anomaly_analyse.json"

_PARALLEL_BYTES = 48 << 20
"""Inputs below this are read in this process: starting another takes longer."""


class TopEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One of the k earliest."""

    record: dict[str, Any]
    """All fields as they were recorded, those of an msProbe record with ours added; strict JSON."""
    anomaly: Anomaly
    source: str
    """File it was read from."""


class TopK(msgspec.Struct, frozen=True, kw_only=True):
    """What `topk` found."""

    entries: tuple[TopEntry, ...]
    """The k earliest, in order; behind them, where there is room, what repeats them and what is no cause."""
    worst: TopEntry | None
    """The earliest of the critical ones: what most deserves to be looked at first; None when nothing is critical."""
    num_anomalies: int
    """Anomalies that were asked for: of these steps, this incident, this severity."""
    num_unwritten: int = 0
    """Of a whole incident: those of `num_anomalies` that were counted, but not written for want of room in a step."""
    num_files: int
    torn: tuple[str, ...] = ()
    """Files whose last line was half written; it was skipped."""
    malformed: tuple[str, ...] = ()
    """`file:offset` of other lines that could not be read, at most eight."""
    num_malformed: int = 0
    """At least so many: of a line that cannot be among the k, only the fields that decide this are read."""

    def analysis(self) -> dict[str, dict[str, Any]]:
        """Return what `anomaly_analyse.json` holds: msProbe's keys, made unique where several rules fired."""
        result: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            key = unique = msprobe_key(entry.record)
            if unique in result:
                key = unique = f"{key}_{entry.anomaly.statistic}_{entry.anomaly.rule}"
            number = 2
            while unique in result:
                unique = f"{key}_{number}"
                number += 1
            result[unique] = entry.record
        return result


def topk(
    directory: str | Path,
    k: int = 8,
    steps: Collection[int] | None = None,
    incident: str | None = None,
    *,
    order: str = "causal",
    min_severity: Severity = Severity.INFO,
    all_alike: bool = False,
    processes: int | None = None,
) -> TopK:
    """Return the k earliest anomalies that were recorded: by causal order, or msProbe's own.

    Members of incidents that are mere notes (`info`), or about late and silent ranks, come behind all others, unless
    all_alike, an incident, or msProbe's order is asked for. Of one observation (a tensor or logged value, at one step and
    micro-step, on one rank) the earliest record stands for all, what further rules and statistics say of it coming behind
    the k earliest observations, unless all_alike or msProbe's order is asked for.

    directory: a run, a directory of `*.jsonl`, or msProbe's output, mixed too. incident: an id, a prefix of one, or
    `latest`. processes: by default as many as there are CPUs for this process, for inputs worth it. The result does not
    depend on the order of files or lines (where lines are malformed, their count may, and num_anomalies by as much).
    Records of an episode's end are not anomalies.

    ConfigError for no such directory, no such incident, k below 1.
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1, got {k}")
    directory = Path(directory)
    files = anomaly_files(directory)
    ids, behind, num_members = None, frozenset[str](), 0
    if incident is not None:
        revisions = incident_revisions(directory)
        found = find_incident(revisions, incident)
        ids = incident_members(revisions, found)
        if steps is None and min_severity is Severity.INFO:
            num_members = newest_revisions(revisions)[found].num_members
    elif order == "causal" and not all_alike:
        behind = no_causes(incident_revisions(directory))
    is_by_place = order == "causal" and not all_alike
    wanted = Selection(
        k, order, None if steps is None else frozenset(steps), ids, min_severity.level, behind, is_by_place
    )  # fmt: skip
    ranges, unreadable = _ranges(files)
    findings = _read_all(ranges, wanted, processes)
    findings.damage.add(unreadable)
    # Whatever file was read first, the same ones are said first.
    return TopK(
        entries=tuple(_entry(item) for item in findings.in_order()),
        worst=_entry(findings.worst.items[0]) if findings.worst.items else None,
        num_anomalies=max(findings.num_anomalies, num_members),
        num_unwritten=max(num_members - findings.num_anomalies, 0),
        num_files=len(files),
        torn=tuple(sorted(set(findings.damage.torn))),
        malformed=tuple(sorted(findings.damage.malformed)[:8]),
        num_malformed=findings.damage.num_malformed,
    )


def _ranges(files: Collection[Path]) -> tuple[list[FileRange], Damage]:
    """Return the files in ranges, and which cannot be opened: one rank's must not hide what the others say."""
    ranges: list[FileRange] = []
    damage = Damage()
    for path in files:
        try:
            path.open("rb").close()
            ranges += ranges_of(path)
        except OSError as error:
            damage.note_file(f"{path}: {error.strerror}")
    return ranges, damage


def _entry(candidate: Candidate) -> TopEntry:
    try:
        record: dict[str, Any] = msgspec.json.decode(candidate.raw)
    except RecursionError:  # in a field that is none of ours
        record = msgspec.to_builtins(RECORD.decode(candidate.raw))
    if candidate.is_msprobe:
        anomaly = from_msprobe(MSPROBE_LINE.decode(candidate.raw))
        record = msgspec.to_builtins(anomaly) | {key: value for key, value in record.items() if value is not None}
    else:
        anomaly = Anomaly(**msgspec.structs.asdict(RECORD.decode(candidate.raw)))
    return TopEntry(record=record, anomaly=anomaly, source=candidate.source)


def _read_all(ranges: list[FileRange], wanted: Selection, processes: int | None) -> Findings:
    num_bytes = sum(part.end - part.start for part in ranges)
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # A fork copies only the calling thread: among threads, read alone.
        if num_bytes < _PARALLEL_BYTES or threading.active_count() > 1:
            processes = 1
    processes = max(1, min(processes, len(ranges), 8))
    findings = Findings(wanted)
    if processes == 1 or "fork" not in multiprocessing.get_all_start_methods():
        for part in ranges:
            findings.read(part)
        return findings
    context = multiprocessing.get_context("fork")
    # Each takes the next range when it has done one: a busy CPU then holds up nobody.
    ticket = context.Value("l", 0)

    def work(into: Findings) -> None:
        while True:
            with ticket.get_lock():
                mine = ticket.value
                ticket.value += 1
            if mine >= len(ranges):
                return
            into.read(ranges[mine])

    def child(pipe: Any) -> None:
        own = Findings(wanted)
        try:
            work(own)
            pipe.send(own.packed())
        except Exception as error:
            pipe.send(error)

    helpers = []
    for _ in range(processes - 1):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(sending,), daemon=True)
        process.start()
        sending.close()
        helpers.append((process, receiving))
    work(findings)
    for process, receiving in helpers:
        try:
            packed = receiving.recv()
        except EOFError as error:
            process.join()
            raise SentinelError(f"a process that read anomalies ended, exit code {process.exitcode}") from error
        process.join()
        if isinstance(packed, Exception):
            raise packed
        findings.add(packed)
    return findings
