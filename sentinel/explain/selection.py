"""The k earliest of the anomalies in some ranges of files, and the worst, in bounded memory.

Every line is decoded only as far as attempt, step and severity; the rest is looked at only where those say that the line
may belong to the k earliest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.errors import MALFORMED
from sentinel.explain.anomaly_files import Damage, FileRange, chunks, msprobe_chunks, packed_chunks, repaired
from sentinel.explain.msprobe_records import MsprobeRecord, from_msprobe, msprobe_sort_key
from sentinel.order.causal import SortKey, sort_key
from sentinel.order.position import ObservationKey, observation_key

ORDERS: dict[str, Callable[[Anomaly], SortKey]] = {"causal": sort_key, "msprobe": msprobe_sort_key}


class _Glance(msgspec.Struct, gc=False):
    """All that is decoded of every line."""

    step: int
    attempt: int = 0
    severity: Severity = Severity.INFO
    event: str = "onset"


class _NamedGlance(_Glance, gc=False):
    """A glance that can be looked up among an incident's members."""

    id: str = ""


_NOT_READ = frozenset({"dtype", "members", "members_id", "moved_ranks", "reference_score"})
"""Fields of an anomaly that sorting does not look at: a line that is damaged there is read all the same."""


def _incomplete_anomaly() -> type[Anomaly]:
    """Return an Anomaly of which any field but the step may be missing, as in files that others wrote."""
    empty = {int: 0, str: "", Severity: Severity.INFO}
    fields: list[tuple[str, Any, Any]] = []
    for field in (one for one in msgspec.structs.fields(Anomaly) if one.name not in _NOT_READ):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        fields.append((field.name, field.type, empty.get(field.type) if default is msgspec.NODEFAULT else default))
    required = [("step", int)]
    made = msgspec.defstruct("IncompleteAnomaly", [*required, *(one for one in fields if one[0] != "step")])
    return cast(type[Anomaly], made)


_GLANCE = msgspec.json.Decoder(_Glance)
_NAMED = msgspec.json.Decoder(_NamedGlance)
RECORD = msgspec.json.Decoder(_incomplete_anomaly())
MSPROBE_LINE = msgspec.json.Decoder(MsprobeRecord)


class Selection(msgspec.Struct, frozen=True):
    """What a reader is asked for."""

    k: int
    order: str
    steps: frozenset[int] | None
    ids: frozenset[str] | None
    min_level: int
    behind: frozenset[str] = frozenset()
    """Ids of anomalies that come behind all others: mere notes, and ill timing."""
    is_by_place: bool = False
    """Of one observation the earliest record stands for all; the others come behind the k earliest observations."""


class Candidate(msgspec.Struct, frozen=True):
    """A sort key, and the raw record or the msProbe record that it belongs to."""

    key: SortKey
    raw: bytes
    source: str
    is_msprobe: bool = False
    place: ObservationKey | None = None
    """The observation that it is about; None: it stands for itself alone."""


class _Heap:
    """The k least candidates so far, in order."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.keys: list[SortKey] = []
        self.items: list[Candidate] = []
        self.limit: tuple[float, float] = (math.inf, math.inf)
        """(attempt, step) past which nothing can get in any more."""
        self._of_place: dict[ObservationKey, Candidate] = {}

    def offer(self, candidate: Candidate) -> Candidate | None:
        """Keep a candidate if it is among the k least; return the later one of two that are about one observation.

        A second copy of one, from another file, is one.
        """
        at = bisect_left(self.keys, candidate.key)
        if at >= self.k or (at < len(self.keys) and self.keys[at] == candidate.key):
            return None
        later = None
        if candidate.place is not None:
            known = self._of_place.get(candidate.place)
            if known is not None and known.key < candidate.key:
                return candidate
            if known is not None:
                self._drop(bisect_left(self.keys, known.key))
                later = known
            self._of_place[candidate.place] = candidate
        self.keys.insert(at, candidate.key)
        self.items.insert(at, candidate)
        if len(self.keys) > self.k:
            self._drop(self.k)
        if len(self.keys) == self.k:
            attempt, step = self.keys[-1][:2]
            self.limit = (cast(int, attempt), cast(int, step))
        return later

    def _drop(self, at: int) -> None:
        self.keys.pop(at)
        place = self.items.pop(at).place
        if place is not None:
            del self._of_place[place]


Packed = tuple[list[list[Candidate]], int, Damage]
"""What one process found, as it is sent to another: the candidates of each heap, the count, and the damage."""


class Findings:
    """What one process found in its ranges."""

    def __init__(self, wanted: Selection) -> None:
        self.wanted = wanted
        self.earliest = _Heap(wanted.k)
        self.repeated = _Heap(wanted.k)
        """Further records of observations that `earliest` holds; all of them, as long as there is room in it."""
        self.behind = _Heap(wanted.k)
        self.worst = _Heap(1)
        self.num_anomalies = 0
        self.damage = Damage()
        is_named = wanted.ids is not None or bool(wanted.behind)
        self._decoder: msgspec.json.Decoder[_Glance] = cast(Any, _NAMED) if is_named else _GLANCE
        self._key = ORDERS[wanted.order]
        # Only the causal order says what came first: it chooses the worst, whatever order was asked for.
        self._is_causal = wanted.order == "causal"

    def read(self, part: FileRange) -> None:
        """Take in one range."""
        if part.path.endswith(".json"):
            self._read_msprobe(part.path)
        else:
            is_packed = part.path.endswith(".gz")
            for chunk, offset, is_tail in packed_chunks(part.path, self.damage) if is_packed else chunks(part):
                self._take_lines(part.path, chunk, offset, is_tail and part.is_last)

    def _take_lines(self, path: str, chunk: memoryview, offset: int, is_tail: bool) -> None:
        """Take whole lines; `is_tail`: the file ends here without a line feed."""
        try:
            glances = self._decoder.decode_lines(chunk)
        except MALFORMED:
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
        if wanted.steps is None and wanted.ids is None and wanted.min_level == 0 and not wanted.behind:
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
        steps, ids, least, behind = wanted.steps, wanted.ids, wanted.min_level, wanted.behind
        matching = [
            i
            for i, g in enumerate(glances)
            if g.event == "onset"
            and (steps is None or g.step in steps)
            and (ids is None or g.id in ids)  # type: ignore[attr-defined]
            and g.severity.level >= least
        ]
        self.num_anomalies += len(matching)
        if behind:
            # Of many, only those need be read on that may be among the k earliest of their own kind.
            front, back, bad = self.earliest.limit, self.behind.limit, self.worst.limit
            return [
                i
                for i in matching
                if (at := (glances[i].attempt, glances[i].step)) <= (back if glances[i].id in behind else front)  # type: ignore[attr-defined]
                or (glances[i].severity is Severity.CRITICAL and at <= bad)
            ]
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
            except MALFORMED:
                strict = repaired(line)
                try:
                    glance = self._decoder.decode(strict or b"")
                    line = strict or line
                except MALFORMED:
                    if is_tail and number == len(lines) - 1:
                        self.damage.torn.append(path)
                    else:
                        self.damage.note_line(f"{path}:{where}")
                    continue
            for _ in self._choose([glance]):
                self._offer(path, line, glance.severity is Severity.CRITICAL)

    def _offer(self, path: str, line: bytes, is_critical: bool) -> None:
        try:
            record = RECORD.decode(line)
            line.decode()  # fields that sorting does not look at
        except MALFORMED:
            self.num_anomalies -= 1
            self.damage.note_line(f"{path}: step, severity and the like are there, but not as their kind")
            return
        if not record.kind and "/" in record.tag_name:
            self._offer_anomaly(path, line, from_msprobe(MSPROBE_LINE.decode(line)), True)
            return
        if not record.id:
            identity = (record.step, record.micro_step, record.rank, f"{record.tag_name}/{record.kind}/{record.statistic}")
            record = msgspec.structs.replace(record, id=anomaly_id(record.run, record.attempt, *identity, record.rule))
        self._offer_anomaly(path, line, record, False, is_critical)

    def _offer_anomaly(
        self, path: str, raw: bytes, anomaly: Anomaly, is_msprobe: bool, is_critical: bool | None = None
    ) -> None:
        if is_critical is None:
            is_critical = anomaly.severity is Severity.CRITICAL
        key = self._key(anomaly)
        if anomaly.id in self.wanted.behind:
            self.behind.offer(Candidate(key, raw, path, is_msprobe))
            return
        place = observation_key(anomaly) if self.wanted.is_by_place else None
        candidate = Candidate(key, raw, path, is_msprobe, place)
        self._offer_earliest(candidate)
        if is_critical:
            self.worst.offer(candidate if self._is_causal else Candidate(sort_key(anomaly), raw, path, is_msprobe))

    def _offer_earliest(self, candidate: Candidate) -> None:
        later = self.earliest.offer(candidate)
        if later is not None:
            self.repeated.offer(msgspec.structs.replace(later, place=None))

    def _read_msprobe(self, path: str) -> None:
        wanted = self.wanted
        for records in msprobe_chunks(path, self.damage):
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

    def in_order(self) -> list[Candidate]:
        """Return the k that come first: what repeats them, and what stands behind all others, only where there is room."""
        return [*self.earliest.items, *self.repeated.items, *self.behind.items][: self.wanted.k]

    def packed(self) -> Packed:
        """Return what another process needs to know."""
        heaps = (self.earliest, self.repeated, self.behind, self.worst)
        return [heap.items for heap in heaps], self.num_anomalies, self.damage

    def add(self, packed: Packed) -> None:
        """Take in what another process found."""
        (earliest, repeated, behind, worst), num_anomalies, damage = packed
        for candidate in earliest:
            self._offer_earliest(candidate)
        for heap, items in ((self.repeated, repeated), (self.behind, behind), (self.worst, worst)):
            for candidate in items:
                heap.offer(candidate)
        self.num_anomalies += num_anomalies
        self.damage.add(damage)
