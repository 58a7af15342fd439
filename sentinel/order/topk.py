"""The k earliest of any number of recorded anomalies, in bounded memory and independent of the order of files.

Every line is decoded only as far as attempt, step and severity; the rest is looked at only where those say that the line
may belong to the k earliest. Large inputs are cut into ranges of bytes and shared among processes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from sentinel.anomaly import Anomaly, Incident, Severity, anomaly_id
from sentinel.errors import ConfigError
from sentinel.order.causal import SortKey, sort_key
from sentinel.order.msprobe import MsprobeRecord, from_msprobe, msprobe_key, msprobe_sort_key

RESULT_NAME = "anomaly_analyse.json"
ORDERS: dict[str, Callable[[Anomaly], SortKey]] = {"causal": sort_key, "msprobe": msprobe_sort_key}

_CHUNK_BYTES = 1 << 20
_RANGE_BYTES = 16 << 20
"""Size of the pieces that processes share."""
_PARALLEL_BYTES = 48 << 20
"""Inputs below this are read in this process: starting another takes longer."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One of the k earliest."""

    record: dict[str, Any]
    """All fields as they were recorded, those of an msProbe record with ours added; strict JSON."""
    anomaly: Anomaly
    source: str
    """File it was read from."""


class TopK(msgspec.Struct, frozen=True, kw_only=True):
    """What `topk` found."""

    entries: tuple[Entry, ...]
    """The k earliest, in order."""
    worst: Entry | None
    """The earliest of the critical ones: what most deserves to be looked at first; None when nothing is critical."""
    num_anomalies: int
    """Anomalies that were asked for: of these steps, this incident, this severity."""
    num_files: int
    torn: tuple[str, ...] = ()
    """Files whose last line was half written; it was skipped."""
    malformed: tuple[str, ...] = ()
    """`file:offset` of other lines that could not be read, at most eight."""
    num_malformed: int = 0

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


class _Glance(msgspec.Struct, gc=False):
    """All that is decoded of every line."""

    step: int
    attempt: int = 0
    severity: Severity = Severity.INFO
    event: str = "onset"


class _Named(_Glance, gc=False):
    """A glance that can be looked up among an incident's members."""

    id: str = ""


class _Record(msgspec.Struct):
    """What sorting looks at: an Anomaly of which any field but the step may be missing."""

    step: int
    id: str = ""
    run: str = ""
    attempt: int = 0
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    micro_step: int | None = None
    pp_stage: int = 0
    vpp_stage: int = 0
    call_id: int | None = None
    tag_name: str = ""
    kind: str = ""
    statistic: str = ""
    rule: str = ""
    detector: str = ""
    severity: Severity = Severity.INFO
    value: float | None = None
    value_text: str = ""
    baseline: float | None = None
    score: float | None = None
    message: str = ""
    group_mates: tuple[int, ...] = ()
    time: float = 0.0
    event: str = "onset"
    count: int = 1
    onset_id: str | None = None
    depth: int = 0
    site_pos: int = 0
    place: dict[str, int] = {}
    consumers: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    segment: str = ""
    border: str = ""
    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    communicates: bool = False


_FIELDS = frozenset(_Record.__struct_fields__)
_GLANCE = msgspec.json.Decoder(_Glance)
_NAMED = msgspec.json.Decoder(_Named)
_RECORD = msgspec.json.Decoder(_Record)
_MSPROBE = msgspec.json.Decoder(dict[str, MsprobeRecord])


class _Wanted(msgspec.Struct, frozen=True):
    """What a reader is asked for."""

    k: int
    order: str
    steps: frozenset[int] | None
    ids: frozenset[str] | None
    min_level: int


class _Range(msgspec.Struct, frozen=True):
    """Bytes [start, end) of a file, cut at line feeds."""

    path: str
    start: int
    end: int
    is_last: bool


class _Candidate(msgspec.Struct, frozen=True):
    """A sort key, and the raw record or the msProbe record that it belongs to."""

    key: SortKey
    raw: bytes
    source: str
    is_msprobe: bool = False


class _Heap:
    """The k least candidates so far, in order."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.keys: list[SortKey] = []
        self.items: list[_Candidate] = []
        self.limit: tuple[float, float] = (math.inf, math.inf)
        """(attempt, step) past which nothing can get in any more."""

    def offer(self, candidate: _Candidate) -> None:
        """Keep a candidate if it is among the k least. A second copy of one, from another file, is one."""
        at = bisect_left(self.keys, candidate.key)
        if at >= self.k or (at < len(self.keys) and self.keys[at] == candidate.key):
            return
        self.keys.insert(at, candidate.key)
        self.items.insert(at, candidate)
        if len(self.keys) > self.k:
            self.keys.pop()
            self.items.pop()
        if len(self.keys) == self.k:
            attempt, step = self.keys[-1][:2]
            self.limit = (cast(int, attempt), cast(int, step))


class _Findings:
    """What one process found in its ranges."""

    def __init__(self, wanted: _Wanted) -> None:
        self.wanted = wanted
        self.earliest = _Heap(wanted.k)
        self.worst = _Heap(1)
        self.num_anomalies = 0
        self.torn: list[str] = []
        self.malformed: list[str] = []
        self.num_malformed = 0
        self._decoder: msgspec.json.Decoder[_Glance] = _GLANCE if wanted.ids is None else cast(Any, _NAMED)
        self._key = ORDERS[wanted.order]
        # Only the causal order says what came first: it chooses the worst, whatever order was asked for.
        self._is_causal = wanted.order == "causal"

    def read(self, part: _Range) -> None:
        """Take in one range."""
        if part.path.endswith(".json"):
            self._read_msprobe(part.path)
        else:
            for chunk, offset, is_tail in _chunks(part):
                self._take_lines(part.path, chunk, offset, is_tail and part.is_last)

    def _take_lines(self, path: str, chunk: memoryview, offset: int, is_tail: bool) -> None:
        """Take whole lines; `is_tail`: the file ends here without a line feed."""
        try:
            glances = self._decoder.decode_lines(chunk)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._take_doubtful_lines(path, bytes(chunk), offset, is_tail)
            return
        chosen = self._choose(glances)
        if not chosen:
            return
        lines = bytes(chunk).split(b"\n")
        if len(lines) - (not lines[-1]) != len(glances):
            lines = [line for line in lines if line.strip()]
        for i in chosen:
            self._offer(path, lines[i], glances[i].severity is Severity.CRITICAL)

    def _choose(self, glances: Sequence[_Glance]) -> list[int]:
        """Count what was asked for, and return the indices of those that may be among the k earliest, or the worst."""
        wanted = self.wanted
        if wanted.steps is None and wanted.ids is None and wanted.min_level == 0:
            # Until the heaps are full everything is a candidate.
            attempt, step = self.earliest.limit
            bad_attempt, bad_step = self.worst.limit
            critical = Severity.CRITICAL
            chosen = [
                i
                for i, g in enumerate(glances)
                if g.attempt < attempt
                or (g.step <= step and g.attempt <= attempt)
                or (g.severity is critical and (g.attempt < bad_attempt or g.step <= bad_step))
            ]
            self.num_anomalies += sum([g.event == "onset" for g in glances])
            return [i for i in chosen if glances[i].event == "onset"]
        steps, ids, least = wanted.steps, wanted.ids, wanted.min_level
        matching = [
            i
            for i, g in enumerate(glances)
            if g.event == "onset"
            and (steps is None or g.step in steps)
            and (ids is None or g.id in ids)  # type: ignore[attr-defined]
            and g.severity.level >= least
        ]
        self.num_anomalies += len(matching)
        return matching

    def _take_doubtful_lines(self, path: str, chunk: bytes, offset: int, is_tail: bool) -> None:
        """Read line by line, where at least one cannot be read."""
        lines = chunk.split(b"\n")
        for number, line in enumerate(lines):
            where, offset = offset, offset + len(line) + 1
            if not line.strip():
                continue
            try:
                glance = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                repaired = _repair(line)
                try:
                    glance = self._decoder.decode(repaired or b"")
                    line = repaired or line
                except (msgspec.DecodeError, UnicodeDecodeError):
                    if is_tail and number == len(lines) - 1:
                        self.torn.append(path)
                    else:
                        self.num_malformed += 1
                        if len(self.malformed) < 8:
                            self.malformed.append(f"{path}:{where}")
                    continue
            for _ in self._choose([glance]):
                self._offer(path, line, glance.severity is Severity.CRITICAL)

    def _offer(self, path: str, line: bytes, is_critical: bool) -> None:
        try:
            record = _RECORD.decode(line)
        except msgspec.DecodeError:
            self.num_malformed += 1
            self.num_anomalies -= 1
            if len(self.malformed) < 8:
                self.malformed.append(f"{path}: step, severity and the like are there, but not as their kind")
            return
        if not record.kind and "/" in record.tag_name:
            self._offer_anomaly(path, line, from_msprobe(_MSPROBE_LINE.decode(line)), True)
            return
        if not record.id:
            identity = (record.step, record.micro_step, record.rank, f"{record.tag_name}/{record.kind}/{record.statistic}")
            record.id = anomaly_id(record.run, record.attempt, *identity, record.rule)
        # A _Record has every attribute of an Anomaly that sorting reads.
        self._offer_anomaly(path, line, cast(Anomaly, record), False, is_critical)

    def _offer_anomaly(
        self, path: str, raw: bytes, anomaly: Anomaly, is_msprobe: bool, is_critical: bool | None = None
    ) -> None:
        if is_critical is None:
            is_critical = anomaly.severity is Severity.CRITICAL
        key = self._key(anomaly)
        candidate = _Candidate(key, raw, path, is_msprobe)
        self.earliest.offer(candidate)
        if is_critical:
            self.worst.offer(
                candidate if self._is_causal else _Candidate(sort_key(anomaly), raw, path, is_msprobe)
            )

    def _read_msprobe(self, path: str) -> None:
        wanted = self.wanted
        for records in _msprobe_chunks(path, self):
            for record in records.values():
                if wanted.steps is not None and record.step not in wanted.steps:
                    continue
                if wanted.min_level == 0 and wanted.ids is None:
                    self.num_anomalies += 1
                    is_early = (0, record.step) <= self.earliest.limit
                    if not is_early and not ("AnomalyNan" in record.message and (0, record.step) <= self.worst.limit):
                        continue
                    anomaly = from_msprobe(record)
                else:
                    anomaly = from_msprobe(record)
                    if anomaly.severity.level < wanted.min_level:
                        continue
                    if wanted.ids is not None and anomaly.id not in wanted.ids:
                        continue
                    self.num_anomalies += 1
                self._offer_anomaly(path, msgspec.json.encode(record), anomaly, True)

    def packed(self) -> tuple[list[_Candidate], list[_Candidate], int, list[str], list[str], int]:
        """Return what another process needs to know."""
        found = (self.earliest.items, self.worst.items, self.num_anomalies)
        return (*found, self.torn, self.malformed, self.num_malformed)

    def add(self, packed: tuple[list[_Candidate], list[_Candidate], int, list[str], list[str], int]) -> None:
        """Take in what another process found."""
        earliest, worst, num_anomalies, torn, malformed, num_malformed = packed
        for candidate in earliest:
            self.earliest.offer(candidate)
        for candidate in worst:
            self.worst.offer(candidate)
        self.num_anomalies += num_anomalies
        self.torn += torn
        self.malformed += malformed
        self.num_malformed += num_malformed


_MSPROBE_LINE = msgspec.json.Decoder(MsprobeRecord)


def _chunks(part: _Range) -> Iterator[tuple[memoryview, int, bool]]:
    """Yield (whole lines, offset, is the end) of a range, each valid until the next is asked for."""
    buffer = bytearray(_CHUNK_BYTES)
    have, offset = 0, part.start
    with Path(part.path).open("rb", buffering=0) as file:
        file.seek(part.start)
        while True:
            left = part.end - offset - have
            view = memoryview(buffer)
            num = file.readinto(view[have : have + min(left, len(buffer) - have)]) if left > 0 else 0
            if not num:
                if have:
                    yield view[:have], offset, True
                return
            cut = buffer.rfind(b"\n", have, have + num) + 1
            have += num
            if not cut:
                if have == len(buffer):
                    view.release()
                    buffer.extend(bytes(len(buffer)))
                continue
            yield view[:cut], offset, False
            offset += cut
            have -= cut
            buffer[:have] = buffer[cut : cut + have]


def _msprobe_chunks(path: str, findings: _Findings) -> Iterator[dict[str, MsprobeRecord]]:
    """Yield the records of one of msProbe's files, some at a time.

    A JSON string holds no line feed, so `},` at the end of a line ends a record, if records are flat: msProbe's are. A
    file that is laid out otherwise is read whole.
    """
    with Path(path).open("rb") as file:
        rest = b""
        is_first = True
        while block := file.read(_CHUNK_BYTES):
            rest += block
            cut = max(rest.rfind(b"},\n"), rest.rfind(b"},\r\n"))
            if cut < 0:
                continue
            head = rest[: cut + 1] + b"}" if is_first else b"{" + rest[: cut + 1] + b"}"
            try:
                records = _MSPROBE.decode(head)
            except (msgspec.DecodeError, UnicodeDecodeError):
                rest += file.read()
                break
            yield records
            rest, is_first = rest[cut + 2 :], False
        if not rest.strip():
            return
        if is_first and not rest.lstrip().startswith(b"{"):
            findings.num_malformed += 1
            findings.malformed.append(f"{path}: expected an object of records")
            return
        try:
            yield _MSPROBE.decode(rest if is_first else b"{" + rest)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # The file is rewritten whole each step: cut short, it ends in the middle of a record.
            cut = rest.rfind(b"}")
            while cut > 0:
                try:
                    yield _MSPROBE.decode((b"" if is_first else b"{") + rest[: cut + 1] + b"}")
                    break
                except (msgspec.DecodeError, UnicodeDecodeError):
                    cut = rest.rfind(b"}", 0, cut)
            findings.torn.append(path)


def _repair(line: bytes) -> bytes | None:
    """Return a line that others wrote with bare NaN or Infinity in it as strict JSON; None when that is not what ails it."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return msgspec.json.encode(_strict(record)) if isinstance(record, dict) else None


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        result = {key: _strict(one) for key, one in value.items()}
        number = value.get("value")
        if isinstance(number, float) and not math.isfinite(number):
            result["value_text"] = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
        return result
    return [_strict(one) for one in value] if isinstance(value, list) else value


def anomaly_files(directory: Path) -> list[Path]:
    """Return the files of anomalies under a run, a directory of such files, or msProbe's output; sorted.

    ConfigError when there is no such directory, or when it holds runs instead of one.
    """
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        raise ConfigError(f"{directory}: expected a directory of anomalies, found none; give a run with -d DIR")
    files = set(directory.glob("anomalies/*.jsonl"))
    if not files and not (directory / "anomalies").is_dir():
        files.update(path for path in directory.glob("*.jsonl") if path.name != "incidents.jsonl")
    for pattern in ("anomaly_detected/rank*/anomaly.json", "rank*/anomaly.json", "anomaly.json"):
        files.update(directory.glob(pattern))
    if not files and not (directory / "spool").is_dir() and not (directory / "anomalies").is_dir():
        runs = sorted(path.parent.name for path in directory.glob("*/anomalies") if path.is_dir())
        if runs:
            raise ConfigError(f"{directory}: expected one run, found {len(runs)}: {', '.join(runs[:8])}; name one")
    return sorted(files)


def incident_revisions(directory: Path) -> list[Incident]:
    """Return all revisions in a run's `incidents.jsonl`, as written; a torn last line is left out."""
    path = next((p for p in (directory / "incidents.jsonl", directory.parent / "incidents.jsonl") if p.is_file()), None)
    if path is None:
        return []
    revisions = []
    for line in path.read_bytes().split(b"\n"):
        try:
            revisions.append(msgspec.json.decode(line, type=Incident))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return revisions


def find_incident(revisions: Sequence[Incident], wanted: str) -> str:
    """Return the id of the incident that a prefix, or `latest`, means; ConfigError when it means none, or several."""
    ids = sorted({incident.id for incident in revisions})
    if not ids:
        raise ConfigError(f'"{wanted}": expected an incident, but none is recorded here')
    if wanted == "latest":
        opened = {i.id: (i.time, i.attempt, i.opened_step, i.id) for i in reversed(revisions)}
        own = [one.id for one in _newest(revisions).values() if one.state != "merged"] or ids
        return max(own, key=lambda one: opened[one])
    matching = [one for one in ids if one.startswith(wanted)] if wanted else []
    if len(matching) != 1:
        what = "several" if matching else "no"
        raise ConfigError(f'"{wanted}": {what} incident has an id that begins so; known: {", ".join((matching or ids)[:8])}')
    return matching[0]


def _newest(revisions: Sequence[Incident]) -> dict[str, Incident]:
    newest: dict[str, Incident] = {}
    for incident in revisions:
        if incident.id not in newest or newest[incident.id].revision <= incident.revision:
            newest[incident.id] = incident
    return newest


def incident_members(revisions: Sequence[Incident], incident: str) -> frozenset[str]:
    """Return the ids of all anomalies of an incident, those of incidents merged into it among them."""
    newest = _newest(revisions)
    family = {incident}
    grows = True
    while grows:
        more = {one.id for one in newest.values() if one.merged_into in family} - family
        family |= more
        grows = bool(more)
    return frozenset(member for one in revisions if one.id in family for member in one.members)


def topk(
    directory: str | Path,
    k: int = 8,
    steps: Collection[int] | None = None,
    incident: str | None = None,
    *,
    order: str = "causal",
    min_severity: Severity = Severity.INFO,
    processes: int | None = None,
) -> TopK:
    """Return the k earliest anomalies that were recorded: by causal order, or msProbe's own.

    directory: a run, a directory of `*.jsonl`, or msProbe's output, mixed too. incident: an id, a prefix of one, or
    `latest`. processes: by default as many as there are CPUs for this process, for inputs worth it. The result does not
    depend on the order of files or lines. Records of an episode's end are not anomalies.

    ConfigError for no such directory, no such incident, k below 1.
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1, got {k}")
    directory = Path(directory)
    files = anomaly_files(directory)
    ids = None
    if incident is not None:
        revisions = incident_revisions(directory)
        ids = incident_members(revisions, find_incident(revisions, incident))
    wanted = _Wanted(k, order, None if steps is None else frozenset(steps), ids, min_severity.level)
    ranges = [part for path in files for part in _ranges(path)]
    findings = _read_all(ranges, wanted, processes)
    # Whatever file was read first, the same ones are said first.
    return TopK(
        entries=tuple(_entry(item) for item in findings.earliest.items),
        worst=_entry(findings.worst.items[0]) if findings.worst.items else None,
        num_anomalies=findings.num_anomalies,
        num_files=len(files),
        torn=tuple(sorted(set(findings.torn))),
        malformed=tuple(sorted(findings.malformed)[:8]),
        num_malformed=findings.num_malformed,
    )


def _entry(candidate: _Candidate) -> Entry:
    record: dict[str, Any] = msgspec.json.decode(candidate.raw)
    if candidate.is_msprobe:
        anomaly = from_msprobe(_MSPROBE_LINE.decode(candidate.raw))
        record = msgspec.to_builtins(anomaly) | {key: value for key, value in record.items() if value is not None}
    else:
        fields = msgspec.structs.asdict(_RECORD.decode(candidate.raw))
        anomaly = Anomaly(**{name: fields[name] for name in Anomaly.__struct_fields__ if name in _FIELDS})
    return Entry(record=record, anomaly=anomaly, source=candidate.source)


def _ranges(path: Path) -> Iterator[_Range]:
    size = path.stat().st_size
    if path.suffix == ".json":
        yield _Range(str(path), 0, size, True)
        return
    start = 0
    with path.open("rb") as file:
        while start < size:
            end = min(start + _RANGE_BYTES, size)
            if end < size:
                file.seek(end - 1)
                file.readline()
                end = min(file.tell(), size)
            yield _Range(str(path), start, end, end == size)
            start = end


def _read_all(ranges: list[_Range], wanted: _Wanted, processes: int | None) -> _Findings:
    num_bytes = sum(part.end - part.start for part in ranges)
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # A fork copies only the calling thread: among threads, read alone.
        if num_bytes < _PARALLEL_BYTES or threading.active_count() > 1:
            processes = 1
    processes = max(1, min(processes, len(ranges), 8))
    findings = _Findings(wanted)
    if processes == 1 or "fork" not in multiprocessing.get_all_start_methods():
        for part in ranges:
            findings.read(part)
        return findings
    context = multiprocessing.get_context("fork")
    # Each takes the next range when it has done one: a busy CPU then holds up nobody.
    ticket = context.Value("l", 0)

    def work(into: _Findings) -> None:
        while True:
            with ticket.get_lock():
                mine = ticket.value
                ticket.value += 1
            if mine >= len(ranges):
                return
            into.read(ranges[mine])

    def child(pipe: Any) -> None:
        own = _Findings(wanted)
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
        packed = receiving.recv()
        process.join()
        if isinstance(packed, Exception):
            raise packed
        findings.add(packed)
    return findings
