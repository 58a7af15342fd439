"""Series of statistics: of tensors, of groups of them, of logged scalars; picked by glob out of merged steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.aggregate import Aggregate, Groups, matches, nearest_names, rows_at
from sentinel.errors import ConfigError
from sentinel.kinds import MEASURED_KINDS, WATCHED_KINDS, is_of_kind
from sentinel.known_words import nearest
from sentinel.moments import EMPTY, Moments
from sentinel.record import STATISTICS, STATS_DTYPE

if TYPE_CHECKING:
    from sentinel.step_view import Layout, LogicalTensor, StepView

SCALAR = "scalar"
VALUE = "value"
"""The statistic of a scalar: the number itself."""
SERIES_KINDS: tuple[str, ...] = tuple(kind.label for kind in WATCHED_KINDS)
TENSOR_KINDS: tuple[str, ...] = tuple(kind.label for kind in MEASURED_KINDS)
RECENT_BYTES = 16 * 2**20
"""Most bytes that a run's recent steps take; a bound on memory that holds 170 steps of 1,000 tensors."""
RECENT_LAYOUTS = 4
"""Layouts that the recent steps of a run may have; they are larger than steps."""


class SeriesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which series are wanted. ConfigError, with the nearest word, for kinds and statistics that do not exist."""

    names: tuple[str, ...] = ("*",)
    """Globs of tensors and scalars; not asked where there are aggregates."""
    aggregates: tuple[Aggregate, ...] = ()
    """Groups, one series each and kind; empty: each tensor by itself."""
    kinds: tuple[str, ...] = TENSOR_KINDS
    statistics: tuple[str, ...] = STATISTICS
    first_step: int = 0
    last_step: int = 2**62
    """The last step; first and last are both included."""

    def __post_init__(self) -> None:
        for what, words, known in (
            ("kind", self.kinds, SERIES_KINDS), ("statistic", self.statistics, (*STATISTICS, VALUE)),
        ):  # fmt: skip
            for word in words:
                if word not in known:
                    raise ConfigError(f'unknown {what} "{word}"{nearest(word, known)}')
            if not words:
                raise ConfigError(f"expected at least one {what}; known: {', '.join(known)}")
        if self.aggregates and SCALAR in self.kinds:
            raise ConfigError('aggregate: expected kinds of tensors, got "scalar": logged values are not merged')
        names = [one.name for one in self.aggregates]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f'aggregate "{name}" is there twice; give one of them another name: NAME=GLOB')

    @property
    def globs(self) -> tuple[str, ...]:
        """All globs of the query."""
        return tuple(glob for one in self.aggregates for glob in one.globs) or self.names


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One series of a query."""

    name: str
    """Canonical name of a tensor or scalar; name of a group."""
    kind: str
    place: str = ""
    """Coordinates of a tensor that each rank keeps for itself: `tp=1`; empty: the whole tensor."""
    num_excluded: int = 0
    """Series that match and are in no group, because they cannot be merged (unknown and partial placements)."""
    rank: int = 0
    """The lowest rank that holds it, or any of its members."""
    border: str = ""
    """Which border of the black box a tensor is; empty: none."""
    also: tuple[str, ...] = ()
    """Outer modules that handed the same tensor on as their own output."""
    consumers: tuple[str, ...] = ()
    """Modules that read the same tensor."""


@dataclass(frozen=True, slots=True)
class MergedStep:
    """The merged moments of the tensors of one step, without its rows and view."""

    seq: int
    """Number of the decision that closed it; 0: none."""
    attempt: int
    step: int
    time: float
    is_skipped: bool
    layout: Layout
    index: npt.NDArray[np.int32]
    """[present] index of each tensor in the layout."""
    stats: npt.NDArray[np.void]
    """[present] STATS_DTYPE."""
    is_whole: npt.NDArray[np.bool_] | None
    """[num_tensors] whether no shard is missing; None: none is of any tensor."""
    scalars: dict[str, float]

    @classmethod
    def of(cls, view: StepView) -> MergedStep:
        """Return the merged moments of a view, copied: neither rows nor the view are kept."""
        index = np.flatnonzero(view.present).astype(np.int32)
        stats = view.stats if len(index) == len(view.stats) else rows_at(view.stats, index)
        whole = None if len(view.parts) == len(view.places) and not _unended(view) else view.is_whole
        scalars = {name: one.mean for name, one in view.scalars.items()}
        seq = view.decision.seq if view.decision is not None else 0
        return cls(seq, view.attempt, view.step, view.time, view.is_skipped, view.layout, index, stats, whole, scalars)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, without the layout."""
        whole = 0 if self.is_whole is None else self.is_whole.nbytes
        return 512 + self.index.nbytes + self.stats.nbytes + whole + 200 * len(self.scalars)

    def all_stats(self) -> npt.NDArray[np.void]:
        """Return [num_tensors] STATS_DTYPE, empty where a tensor is absent."""
        if len(self.stats) == len(self.layout.tensors):
            return self.stats
        found = np.full(len(self.layout.tensors), EMPTY)
        num_words = STATS_DTYPE.itemsize // 8
        words = self.stats.view(np.uint64).reshape(len(self.stats), num_words)
        found.view(np.uint64).reshape(len(found), num_words)[self.index] = words
        return found


def _unended(view: StepView) -> bool:
    return any(part.end_step is None for part in view.parts)


@dataclass(frozen=True, slots=True)
class ExportedPoints:
    """The values of a query's series at one step: of those that the step has."""

    attempt: int
    step: int
    time: float
    is_skipped: bool
    series: list[Series]
    num_tensors: npt.NDArray[np.int64]
    """[series] tensors that were merged."""
    num_elements: npt.NDArray[np.int64]
    is_whole: npt.NDArray[np.bool_]
    """[series] whether no shard of any tensor is missing."""
    values: dict[str, npt.NDArray[np.float64]]
    """Statistic -> [series]; NaN where it is undefined."""
    moments: Moments
    """[tensors and groups] the moments they were computed from; scalars, which come last in `series`, have none."""

    def __len__(self) -> int:
        return len(self.series)


class Picked:
    """A query applied to one layout; made once a layout."""

    def __init__(self, query: SeriesQuery, layout: Layout) -> None:
        self.query = query
        self.layout = layout
        self.groups: Groups | None = None
        self.partial: list[str] = []
        """Keys of what is asked for, and of which each rank holds a summand, so that they cannot be merged."""
        if query.aggregates:
            self.groups = Groups(layout.tensors, query.aggregates, kinds=query.kinds)
            met: dict[tuple[str, str], str] = {}
            for group in self.groups.groups:
                other = met.setdefault((group.name, group.kind), group.definition)
                if other != group.definition:
                    raise ConfigError(
                        f'aggregate: "{other}" and "{group.definition}" both make a group "{group.name}"; name one anew'
                    )
            lowest = [min(tensor.ranks, default=0) for tensor in layout.tensors]
            self.series = [
                Series(
                    name=group.name, kind=group.kind, num_excluded=group.num_excluded,
                    rank=min((lowest[at] for at in group.members), default=0),
                )
                for group in self.groups.groups
            ]  # fmt: skip
            return
        of_name: dict[tuple[str, ...], bool] = {}
        taken: list[LogicalTensor] = []
        for tensor in layout.tensors:
            called = (tensor.name, *tensor.also)
            if called not in of_name:
                of_name[called] = any(matches(glob, name) for glob in query.names for name in called)
            if not of_name[called] or tensor.is_part or not is_of_kind(tensor.kind, tensor.border, query.kinds):
                continue
            if tensor.is_partial:
                self.partial.append(tensor.key)
            else:
                taken.append(tensor)
        self._index = np.array([tensor.index for tensor in taken], np.int64)
        self.series = [
            Series(
                name=one.name,
                kind=one.kind,
                place=_words(one.place),
                rank=min(one.ranks, default=0),
                border=one.border,
                also=one.also,
                consumers=one.consumers,
            )
            for one in taken
        ]

    def keep(self, num: int) -> int:
        """Keep the first so many tensors alone, in the order of the layout; return how many are left out. Not of groups."""
        assert self.groups is None
        num_left_out = max(len(self.series) - num, 0)
        self.series, self._index = self.series[:num], self._index[:num]
        return num_left_out

    def points(self, step: MergedStep) -> ExportedPoints:
        """Return the step's values, of the tensors or groups that it has."""
        stats = step.all_stats()
        present = np.zeros(len(stats), np.bool_)
        present[step.index] = True
        if self.groups is not None:
            num_tensors = self.groups.count(present)
            here = np.flatnonzero(num_tensors)
            merged, num_tensors = self.groups.merge(stats)[here], num_tensors[here]
            whole = np.ones(len(here), np.bool_) if step.is_whole is None else self.groups.count(~step.is_whole)[here] == 0
        else:
            here = np.flatnonzero(present[self._index])
            index = self._index[here]
            merged, num_tensors = rows_at(stats, index), np.ones(len(here), np.int64)
            whole = np.ones(len(here), np.bool_) if step.is_whole is None else step.is_whole[index]
        return self._formed(step, [self.series[at] for at in here], merged, num_tensors, whole)

    def _formed(
        self,
        step: MergedStep,
        series: list[Series],
        stats: npt.NDArray[np.void],
        num_tensors: npt.NDArray[np.int64],
        whole: npt.NDArray[np.bool_],
    ) -> ExportedPoints:
        moments = Moments(stats) if len(stats) else Moments(np.empty(0, STATS_DTYPE))
        num_elements = moments.num_elements()
        values = {
            name: np.full(len(series), np.nan) if name == VALUE else moments.statistic(name)
            for name in self.query.statistics
        }
        if SCALAR in self.query.kinds:
            found = {
                name: value for name, value in step.scalars.items() if any(matches(glob, name) for glob in self.query.names)
            }
            series = [*series, *(Series(name=name, kind=SCALAR) for name in found)]
            no_tensor = np.zeros(len(found), np.int64)
            num_tensors, num_elements = (np.concatenate([one, no_tensor]) for one in (num_tensors, num_elements))
            whole = np.concatenate([whole, np.ones(len(found), np.bool_)])
            for name, column in values.items():
                logged = list(found.values()) if name == VALUE else [np.nan] * len(found)
                values[name] = np.concatenate([column, np.array(logged, np.float64)])
        return ExportedPoints(
            step.attempt, step.step, step.time, step.is_skipped, series, num_tensors, num_elements, whole, values, moments
        )


class Picker:
    """Applies a query to steps whose layouts may change, and keeps which globs have matched."""

    def __init__(self, query: SeriesQuery) -> None:
        self.query = query
        self._picked: list[Picked] = []
        self.met: set[str] = set()
        """Globs that matched something."""
        self.names: set[str] = set()
        """Names of the tensors and scalars of the wanted kinds met so far."""
        self.excluded: dict[tuple[str, str], tuple[int, bool]] = {}
        """(group, kind) -> (most series that cannot be merged, whether there are others)."""
        self.partial: set[str] = set()
        """Keys of tensors of which each rank holds a summand: no series is made of them."""

    def meet(self, layout: Layout, scalars: Iterable[str] = ()) -> Picked:
        """Return the query applied to a layout."""
        for known in self._picked:
            if known.layout is layout:
                if SCALAR in self.query.kinds:
                    self.saw(set(scalars) - self.names)
                return known
        picked = Picked(self.query, layout)
        self._picked = [*self._picked[-(RECENT_LAYOUTS - 1) :], picked]
        wanted = [one for one in layout.tensors if is_of_kind(one.kind, one.border, self.query.kinds)]
        fresh = {name for one in wanted for name in (one.name, *one.also)}
        if SCALAR in self.query.kinds:
            fresh.update(scalars)
        self.saw(fresh - self.names)
        for group in picked.groups.groups if picked.groups is not None else ():
            if group.num_excluded:
                before, had_others = self.excluded.get((group.name, group.kind), (0, False))
                counted = max(group.num_excluded, before), len(group.members) > 0 or had_others
                self.excluded[group.name, group.kind] = counted
        self.partial.update(picked.partial)
        return picked

    def saw(self, names: set[str]) -> None:
        """Note that these names exist, for `check`."""
        self.names |= names
        for glob in self.query.globs:
            if glob not in self.met and any(matches(glob, name) for name in names):
                self.met.add(glob)

    def points(self, step: MergedStep) -> ExportedPoints:
        """Return the step's values."""
        return self.meet(step.layout, step.scalars).points(step)

    def check(self) -> None:
        """Raise ConfigError, with the nearest names, when a glob has matched nothing so far."""
        for glob in self.query.globs:
            if glob not in self.met:
                near = nearest_names([glob], self.names)
                kinds = "" if self.query.kinds == TENSOR_KINDS else f" of kind {', '.join(self.query.kinds)}"
                hint = f"; nearest: {', '.join(near)}" if near else f"; there are no names{kinds} at all"
                raise ConfigError(f'"{glob}" matches no name{kinds}{hint}')


class RecentSteps:
    """The newest merged steps of a run, in bounded memory. One thread adds; others take copies of the list."""

    def __init__(self, max_bytes: int = RECENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._steps: deque[MergedStep] = deque()
        self.num_bytes = 0

    def add(self, view: StepView) -> MergedStep:
        """Keep a judged step, and return what is kept of it; the oldest go.

        One that the run goes back to takes the place of the former.
        """
        step = MergedStep.of(view)
        self._steps.append(step)
        self.num_bytes += step.num_bytes
        while len(self._steps) > 1 and (self.num_bytes > self._max_bytes or self._num_layouts() > RECENT_LAYOUTS):
            self.num_bytes -= self._steps.popleft().num_bytes
        return step

    def _num_layouts(self) -> int:
        # The layout changes seldom: only where it does the others are looked at.
        if len(self._steps) < 2 or self._steps[-1].layout is self._steps[-2].layout:
            return 1
        return len({id(one.layout) for one in self._steps})

    def clear(self) -> None:
        """Drop all steps."""
        self._steps.clear()
        self.num_bytes = 0

    def steps(self) -> list[MergedStep]:
        """Return the steps, oldest first."""
        while True:
            try:
                return list(self._steps)
            except RuntimeError:  # it was added to in between
                continue


def newest_attempts(steps: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return step -> its newest attempt, of (attempt, step) in any order."""
    found: dict[int, int] = {}
    for attempt, step in steps:
        if attempt >= found.get(step, -1):
            found[step] = attempt
    return found


def rows_of(points: ExportedPoints, statistics: Sequence[str]) -> Iterator[tuple[object, ...]]:
    """Yield one row a series, of the columns `COLUMNS` and the statistics."""
    for at, one in enumerate(points.series):
        yield (
            points.attempt, points.step, points.time, points.is_skipped, one.kind, one.name, one.place,
            int(points.num_tensors[at]), one.num_excluded, int(points.num_elements[at]), bool(points.is_whole[at]),
            *(float(points.values[name][at]) for name in statistics),
        )  # fmt: skip


COLUMNS = (
    "attempt", "step", "time", "is_skipped", "kind", "name", "place", "num_tensors", "num_excluded", "num_elements",
    "is_whole",
)  # fmt: skip
"""Columns of an export before its statistics."""


def _words(place: dict[str, int]) -> str:
    return ",".join(f"{axis}={coordinate}" for axis, coordinate in place.items())
