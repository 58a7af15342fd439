"""`/api/v1/series`: recent steps out of memory, older ones out of the spool; bounded in series, points and time."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from sentinel.aggregate import Aggregate, matches, nearest_names
from sentinel.errors import ConfigError, SentinelError
from sentinel.exports.series import SCALAR, TENSOR_KINDS, VALUE, ExportedPoints, MergedStep, Picker, RecentSteps, SeriesQuery
from sentinel.judge.recorded import STEP, recorded_views
from sentinel.known_words import nearest
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

MAX_SERIES = 1000
MAX_POINTS = 100_000
"""Most points of one answer, all series together: about 4 MB of JSON."""
MAX_AGGREGATES = 32
DEFAULT_POINTS = 1000
READ_S = 20.0
"""Seconds that the spool is read for one answer; a bound on time. Too small: long runs are answered in part."""
PAUSE_S = 0.002
"""Pause between two looks at the spool: the thread that judges comes first."""
MAX_PICKERS = 16
"""Queries that are remembered."""
WAIT_S = 1.0
"""One request reads a spool at a time; the next waits so long."""

PARAMETERS = ("run", "name", "kind", "statistic", "from", "to", "aggregate", "limit")


class Busy(SentinelError):
    """Another request is being answered that costs as much as the daemon may spend at once."""


class SeriesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for."""

    run: str | None
    """None: all runs."""
    query: SeriesQuery
    limit: int = DEFAULT_POINTS
    """Newest points of each series."""
    reads_spool: bool = False
    """Older steps than memory has are wanted too: the client says from where. Where it has none the spool is read anyway."""

    @classmethod
    def parse(cls, parameters: Sequence[tuple[str, str]]) -> SeriesRequest:
        """Return the request that the parameters of a URL are. ConfigError, or ValueError, says what was expected."""
        given: dict[str, list[str]] = {}
        for name, text in parameters:
            if name not in PARAMETERS:
                raise ConfigError(f'unknown parameter "{name[:80]}"{nearest(name[:80], PARAMETERS)}')
            given.setdefault(name, []).append(text)
        for name, texts in given.items():
            if len(texts) > 1 and name not in ("name", "aggregate"):
                raise ConfigError(f"{name}: expected it once, got it {len(texts)} times")
        aggregates = tuple(map(Aggregate.parse, given.get("aggregate", ())))
        if len(aggregates) > MAX_AGGREGATES:
            raise ConfigError(f"aggregate: expected at most {MAX_AGGREGATES}, got {len(aggregates)}")
        if aggregates and "name" in given:
            raise ConfigError("name picks single tensors and aggregate groups; give one of them")
        kinds = _words(given, "kind") or (TENSOR_KINDS if aggregates else (SCALAR,))
        kinds = TENSOR_KINDS if kinds == ("*",) else kinds
        usual = (VALUE,) if kinds == (SCALAR,) else ("norm",) if SCALAR not in kinds else ("norm", VALUE)
        query = SeriesQuery(
            names=tuple(given.get("name", ("*",))),
            aggregates=aggregates,
            kinds=kinds,
            statistics=_words(given, "statistic") or usual,
            first_step=whole_number(given, "from", 0),
            last_step=whole_number(given, "to", 2**62),
        )
        limit = min(whole_number(given, "limit", DEFAULT_POINTS), MAX_POINTS)
        run = given["run"][0] if "run" in given else None
        return cls(run=run, query=query, limit=limit, reads_spool="from" in given)


def _words(given: Mapping[str, list[str]], name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in given.get(name, [""])[0].split(",") if word.strip()))


def whole_number(given: Mapping[str, list[str]], name: str, otherwise: int) -> int:
    """Return a whole number of a URL's parameters; `otherwise` where it is not there. ConfigError for any other text."""
    text = given[name][0] if name in given else None
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise ConfigError(f'{name} must be a whole number, got "{text[:40]}"')
    return int(text)


class SeriesSource(Protocol):
    """What of a served run is asked."""

    name: str
    paths: RunPaths
    recent: RecentSteps

    def recent_scalars(self, name: str | None) -> list[tuple[str, list[tuple[int, int, float]]]]:
        """Return (scalar, [(attempt, step, value)]), oldest first."""
        ...


class SeriesQueries:
    """Answers requests for series, from any thread; the thread that judges is never waited for, nor made to wait."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._pickers: OrderedDict[tuple[str, bytes], Picker] = OrderedDict()
        self._keeping = threading.Lock()

    def _picker(self, run: str, query: SeriesQuery) -> Picker:
        """Return the query at work on a run: a page that asks again and again has its globs looked up once."""
        key = (run, msgspec.msgpack.encode(msgspec.structs.replace(query, first_step=0, last_step=0)))
        with self._keeping:
            picker = self._pickers.pop(key, None) or Picker(query)
            self._pickers[key] = picker
            while len(self._pickers) > MAX_PICKERS:
                self._pickers.popitem(last=False)
        return picker

    def answer(self, runs: Sequence[SeriesSource], request: SeriesRequest) -> dict[str, Any]:
        """Return {"series": [...], "truncated": bool, "notes": [...]}.

        ConfigError, with the nearest names, for a glob that matches nothing in any run. Busy when another request reads a
        spool.
        """
        found = _Answer(request)
        names: set[str] = set()
        met: set[str] = set()
        is_logged = request.query.kinds == (SCALAR,)
        for run in runs:
            picker = self._picker(run.name, request.query)
            found.begin(run.name)
            if is_logged:
                # Scalars are kept for longer than steps.
                scalars = run.recent_scalars(None)
                picker.saw({name for name, _ in scalars})
                found.add_scalars(scalars)
            if not is_logged or request.reads_spool:
                for points in self._points(run, request, picker, found):
                    if not found.add(points):
                        break
            names |= picker.names
            met |= picker.met
            for (group, kind), (count, _) in sorted(dict(picker.excluded).items()):
                found.note(f'{run.name}: "{group}" of {kind}: {count} series have no known placement and are in no group')
        for glob in request.query.globs:
            if glob not in met and names:
                kinds = "" if request.query.kinds == TENSOR_KINDS else f" of kind {', '.join(request.query.kinds)}"
                near = ", ".join(nearest_names([glob], names))
                raise ConfigError(f'"{glob}" matches no name{kinds}; nearest: {near}')
        return found.result()

    def _points(self, run: SeriesSource, request: SeriesRequest, picker: Picker, found: _Answer) -> Iterator[ExportedPoints]:
        """Yield the wanted steps, the newest first, of repeated ones the newest attempt."""
        query, left = request.query, request.limit
        recent = run.recent.steps()
        # Decisions rise with attempts: the one met first, from the end, is of a step's newest attempt.
        seen: set[int] = set()
        for step in reversed(recent):
            if step.step in seen or not query.first_step <= step.step <= query.last_step:
                continue
            seen.add(step.step)
            if not left:
                found.cut_at_limit()
                return
            left -= 1
            yield picker.points(step)
        oldest = recent[0].seq if recent else 2**62
        if oldest <= 1:
            return
        if recent and not request.reads_spool:
            kept = f"{len(recent)} steps are" if len(recent) != 1 else "1 step is"
            found.note(f"{run.name}: {kept} in memory; from=STEP reads older ones from the spool")
            return
        if not self._reading.acquire(timeout=WAIT_S):
            raise Busy("the spool is being read for another request; try again in a moment")
        try:
            yield from reversed(_read(run.paths, query, oldest, seen, left, picker, found))
        finally:
            self._reading.release()


def _read(
    paths: RunPaths, query: SeriesQuery, before: int, seen: set[int], limit: int, picker: Picker, found: _Answer
) -> deque[ExportedPoints]:
    """Return the newest wanted steps that the spool still has of the decisions below `before`, oldest first."""
    begun = time.monotonic()
    kept: deque[ExportedPoints] = deque()
    num_kept = num_gone = 0
    journal = Journal(paths.journal, read_only=True)
    try:
        newest: dict[int, int] = {}
        for seq, kind, body in journal.decisions(journal.cut.seq, until=before - 1):
            if kind == STEP:
                step = msgspec.msgpack.decode(body, type=_DecidedStep).step
                if query.first_step <= step <= query.last_step and step not in seen:
                    newest[step] = seq
        wanted = sorted(newest.values())
        if len(wanted) > limit:
            found.cut_at_limit()
            wanted = wanted[len(wanted) - limit :]
        left = set(wanted)
        for view, decision in recorded_views(paths, journal, pause_s=PAUSE_S) if wanted else ():
            if decision.seq in left:
                left.remove(decision.seq)
                num_gone += not view.parts
                if view.parts:
                    kept.append(picker.points(MergedStep.of(view)))
                    num_kept += len(kept[-1]) * len(query.statistics)
                while num_kept > MAX_POINTS and len(kept) > 1:
                    num_kept -= len(kept.popleft()) * len(query.statistics)
                    found.cut_at_most()
            if not left:
                break
            if time.monotonic() - begun > READ_S:
                found.cut(f"{paths.name}: the spool was read for {READ_S:g} s; {len(left)} steps are left out")
                break
    finally:
        journal.close()
    if num_gone:
        found.cut(f"{paths.name}: {num_gone} steps are no longer in the spool")
    return kept


class _DecidedStep(msgspec.Struct):
    step: int


class _Answer:
    """Gathers points up to the bounds."""

    def __init__(self, request: SeriesRequest) -> None:
        self._request = request
        self._points: dict[tuple[str, str, str, str, str], dict[str, Any]] = {}
        self._num_points = 0
        self._run = ""
        self._is_cut = False
        self._notes: list[str] = []

    def begin(self, run: str) -> None:
        """The points that follow are of this run."""
        self._run = run

    def note(self, text: str) -> None:
        """Say something about the answer."""
        if text not in self._notes:
            self._notes.append(text)

    def cut(self, text: str) -> None:
        """Say what was left out."""
        self._is_cut = True
        self.note(text)

    def cut_at_limit(self) -> None:
        """Say that there are more points than were asked for."""
        self.cut(f"the newest {self._request.limit} points of each series are here; limit=N asks for more")

    def cut_at_most(self) -> None:
        """Say that there are more points than an answer holds."""
        self.cut(f"the newest {MAX_POINTS} points are here; narrow name, kind, statistic or steps")

    def add(self, points: ExportedPoints) -> bool:
        """Take the points of one step, which is older than those before; False when there is no more room."""
        for statistic, values in points.values.items():
            for at, one in enumerate(points.series):
                if (statistic == VALUE) != (one.kind == SCALAR):
                    continue
                series = self._series(one.name, one.kind, one.place, statistic)
                if series is None:
                    continue
                if not self._put(series, points.attempt, points.step, float(values[at])):
                    return False
                if not points.is_whole[at]:
                    series["partial_steps"].append(points.step)
        return True

    def add_scalars(self, scalars: Sequence[tuple[str, list[tuple[int, int, float]]]]) -> None:
        """Take logged values that are kept apart from steps: (name, [(attempt, step, value)]), oldest first."""
        query = self._request.query
        for name, points in scalars:
            if not any(matches(glob, name) for glob in query.names):
                continue
            series = self._series(name, SCALAR, "", VALUE)
            if series is None:
                continue
            for attempt, step, value in reversed(points):
                if query.first_step <= step <= query.last_step and not self._put(series, attempt, step, value):
                    break

    def _series(self, name: str, kind: str, place: str, statistic: str) -> dict[str, Any] | None:
        key = (self._run, name, kind, place, statistic)
        series = self._points.get(key)
        if series is None:
            if len(self._points) >= MAX_SERIES:
                self.cut(f"only the first {MAX_SERIES} series are here; narrow name, kind or statistic")
                return None
            series = {"run": self._run, "name": name, "kind": kind, "statistic": statistic, "place": place}
            series |= {"points": {}, "partial_steps": []}
            self._points[key] = series
        return series

    def _put(self, series: dict[str, Any], attempt: int, step: int, value: float) -> bool:
        """Take a point unless the series has one of a newer attempt; False when there is no more room."""
        points = series["points"]
        if step in points:
            return True
        if len(points) >= self._request.limit:
            self.cut_at_limit()
            return True
        if self._num_points >= MAX_POINTS:
            self.cut_at_most()
            return False
        # An infinity is no JSON.
        points[step] = (attempt, step, value if math.isfinite(value) else None)
        self._num_points += 1
        return True

    def result(self) -> dict[str, Any]:
        """Return the answer; points from the oldest to the newest step."""
        for series in self._points.values():
            series["points"] = [point for _, point in sorted(series["points"].items())]
            series["partial_steps"].sort()
        return {"series": list(self._points.values()), "truncated": self._is_cut, "notes": self._notes}
