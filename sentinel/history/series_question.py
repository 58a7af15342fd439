"""A question for series: which are meant, and their rows at full rate or in buckets, each step once, none left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa

from sentinel.aggregate import matches, nearest_names
from sentinel.errors import ConfigError
from sentinel.history.questions import answered
from sentinel.history.sql_views import DERIVED, Span, quoted
from sentinel.history.table_schemas import STATISTICS, WIDTHS
from sentinel.known_words import nearest

if TYPE_CHECKING:
    import duckdb

SCALAR = "scalar"
VALUE = "value"
"""The statistic of a scalar: the number itself."""
KNOWN = (*STATISTICS, *DERIVED, "count", "zeros", VALUE)
MOST_STEPS = 2000
"""Rows of a series up to which steps are not put into wider buckets: twice what a screen is wide."""
LAST = 2**62

FORMS = ("min", "avg", "max", "last")
_ABOUT = "series, attempt, step, last_step, num_steps"
_SQUARE = (
    "(CASE WHEN mean_min <= 0 AND mean_max >= 0 THEN 0 ELSE least(mean_min * mean_min, mean_max * mean_max) END)",
    "greatest(mean_min * mean_min, mean_max * mean_max)",
)
"""Least and greatest square of the mean in a bucket."""
BOUNDS: Mapping[str, tuple[str, ...]] = {
    "var": ("std_min * std_min", "std_avg * std_avg", "std_max * std_max", "std_last * std_last"),
    "rms": (
        f"sqrt({_SQUARE[0]} + std_min * std_min)", "sqrt(mean_avg * mean_avg + std_avg * std_avg)",
        f"sqrt({_SQUARE[1]} + std_max * std_max)", "sqrt(mean_last * mean_last + std_last * std_last)",
    ),
    "absmax": (
        "greatest(max_min, -min_max)", "greatest(max_avg, -min_avg)", "greatest(max_max, -min_min)",
        "greatest(max_last, -min_last)",
    ),
}  # fmt: skip
"""Statistic -> what of it a bucket of others says: least and greatest are bounds that hold every value."""

COLUMNS = (
    "run", "name", "kind", "place", "statistic", "attempt", "step", "last_step", "num_steps", "min", "avg", "max", "last",
    "nans", "infs", "bad_steps", "is_bound",
)  # fmt: skip
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in COLUMNS[:5]),
        *(pa.field(name, pa.int64()) for name in COLUMNS[5:9]),
        *(pa.field(name, pa.float64()) for name in COLUMNS[9:13]),
        *(pa.field(name, pa.int64()) for name in COLUMNS[13:16]),
        pa.field("is_bound", pa.bool_()),
    ]
)
"""Of an answer: a row is a step or a bucket of steps of one series. `is_bound`: min and max hold every value of the bucket,
but are not values of it; null where nothing at all is known of them."""


class Meant(NamedTuple):
    """A series that a question means."""

    run: str
    number: int
    """Of the series in the history of its run."""
    name: str
    kind: str
    place: str
    statistic: str


class SeriesQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which series are wanted, of which steps. ConfigError for words that are not known and for steps that are none."""

    name: str
    """Of a tensor or a scalar, or a glob of such; `*` crosses dots."""
    statistic: str | None = None
    """None: `value` of a scalar; of a tensor of one element its mean, of a larger one `std`."""
    kind: str | None = None
    """None: all kinds that have the name."""
    steps: tuple[int | None, int | None] = (None, None)
    """First and last, both included; None: from the first on, or to the last."""
    points: int | None = MOST_STEPS
    """About the most rows of a series: narrower buckets are taken where they are fewer. None: the narrowest there are."""

    def __post_init__(self) -> None:
        if self.statistic is not None and self.statistic not in KNOWN:
            raise ConfigError(f'series: unknown statistic "{self.statistic}"{nearest(self.statistic, KNOWN)}')
        if self.points is not None and self.points < 1:
            raise ConfigError(f"series: points must be at least 1, or None for all, got {self.points}")
        if self.first > self.last:
            raise ConfigError(f"series: steps must be (first, last), both included, got {self.steps}")

    @property
    def first(self) -> int:
        """First step that is wanted."""
        return 0 if self.steps[0] is None else self.steps[0]

    @property
    def last(self) -> int:
        """Last step that is wanted."""
        return LAST if self.steps[1] is None else self.steps[1]

    @property
    def span(self) -> Span:
        """First and last step that are read: as far as the widest buckets reach that stand for any of the steps, for it is
        asked whether narrower ones hold all of each."""
        return self.first // WIDTHS[-1] * WIDTHS[-1], (self.last // WIDTHS[-1] + 1) * WIDTHS[-1] - 1


def meant(question: SeriesQuestion, connection: duckdb.DuckDBPyConnection) -> list[Meant]:
    """Return the series that a question means, by run, name, kind and place. ConfigError names the nearest where none is."""
    known = connection.execute("SELECT run, series, name, kind, place, num_elements FROM series").fetchall()
    names = {row[2] for row in known}
    # A name may hold what is a wildcard in a glob: the very name goes before.
    of_name = [
        row for row in known if (row[2] == question.name if question.name in names else matches(question.name, row[2]))
    ]
    if not of_name:
        near = ", ".join(f'"{one}"' for one in nearest_names([question.name], names))
        raise ConfigError(
            f'series: "{question.name}" is no name of a tensor or scalar; '
            + (f"nearest: {near}" if near else "there are none")
        )
    of_kind = [row for row in of_name if question.kind is None or row[3] == question.kind]
    if not of_kind:
        kinds = sorted({row[3] for row in of_name})
        raise ConfigError(f'series: "{question.name}" has no kind "{question.kind}"{nearest(str(question.kind), kinds)}')
    fitting = [row for row in of_kind if question.statistic is None or (row[3] == SCALAR) == (question.statistic == VALUE)]
    if not fitting:
        what = "a scalar, whose statistic is value" if of_kind[0][3] == SCALAR else "a tensor, which has no value"
        raise ConfigError(f'series: "{question.name}" is {what}; got statistic "{question.statistic}"')
    return sorted(
        Meant(run, number, name, kind, place, question.statistic or _usual(kind, size))
        for run, number, name, kind, place, size in fitting
    )


def _usual(kind: str, num_elements: int) -> str:
    """Return the statistic of a question that names none."""
    return VALUE if kind == SCALAR else "mean" if num_elements == 1 else "std"


def answer(
    question: SeriesQuestion,
    connection: duckdb.DuckDBPyConnection,
    attempts: Mapping[str, Sequence[tuple[int, int]]],
) -> pa.Table:
    """Return the rows of the series that a question means, by run, name, kind, place, step and attempt: `SCHEMA`.

    attempts: of each run its (attempt, first step), as its manifest has them.
    """
    wanted = meant(question, connection)
    width = _width(question, wanted, connection)
    parts = []
    for run in dict.fromkeys(one.run for one in wanted):
        for statistic in dict.fromkeys(one.statistic for one in wanted if one.run == run):
            ids = {one.number: one for one in wanted if one.run == run and one.statistic == statistic}
            parts.append(answered(connection, _query(question, run, ids, statistic, width, attempts[run])))
    rows = pa.concat_tables([part.select(COLUMNS).cast(SCHEMA) for part in parts])
    return rows.sort_by([(name, "ascending") for name in ("run", "name", "kind", "place", "statistic", "step", "attempt")])


def _width(question: SeriesQuestion, wanted: Sequence[Meant], connection: duckdb.DuckDBPyConnection) -> int:
    """Return how many steps a bucket is to have: 1, or one of WIDTHS."""
    if question.points is None:
        return 1
    most = [0] * (len(WIDTHS) + 1)
    for run in dict.fromkeys(one.run for one in wanted):
        where = _where(question, run, [one.number for one in wanted if one.run == run])
        # A bucket at the edge of what is wanted counts with all of its steps: at most one too wide is taken.
        inside = f"greatest(step, {question.first}) AS a, least(last_step, {question.last}) AS b"
        steps = "sum(least(num_steps, b - a + 1))"
        spans = [f"sum(least(num_steps, b // {width} - a // {width} + 1))" for width in WIDTHS]
        of_series = (
            f"SELECT {', '.join(f'{sql} AS n{at}' for at, sql in enumerate((steps, *spans)))} "
            f"FROM (SELECT *, {inside} FROM moments_{WIDTHS[-1]} WHERE {where}) GROUP BY series"
        )
        found = connection.execute(
            f"SELECT {', '.join(f'max(n{at})' for at in range(len(most)))} FROM ({of_series})"
        ).fetchall()[0]
        most = [max(one, int(other or 0)) for one, other in zip(most, found, strict=True)]
    return next((width for width, num in zip((1, *WIDTHS), most, strict=True) if num <= question.points), WIDTHS[-1])


def _query(
    question: SeriesQuestion,
    run: str,
    ids: dict[int, Meant],
    statistic: str,
    width: int,
    attempts: Sequence[tuple[int, int]],
) -> str:
    """Return the SQL of some series of one run: of each stretch of steps the narrowest rows that are all there.

    From the widest buckets down: those of which the narrower rows hold every step are replaced by them.
    """
    widths = [one for one in (1, *WIDTHS) if one >= width]
    tables = []
    for one in widths:
        # What stands in the place of a wider bucket is read as far as that reaches.
        rows = _steps(question, run, ids, statistic) if one == 1 else _buckets(question, run, ids, statistic, one, attempts)
        tables.append(f"rows_{one} AS MATERIALIZED ({rows})")
    for narrow, wide in pairwise(widths):
        tables.append(
            f"whole_{wide} AS MATERIALIZED (SELECT w.series, w.attempt, w.step FROM rows_{wide} w JOIN "
            f"(SELECT series, attempt, step // {wide} * {wide} AS begins, sum(num_steps) AS num FROM rows_{narrow} "
            f"GROUP BY ALL) n ON n.series = w.series AND n.attempt = w.attempt AND n.begins = w.step "
            f"WHERE n.num >= w.num_steps - {_repeated(attempts)})"
        )
    shown = []
    for at, one in enumerate(widths):
        conditions = []
        if at > 0:
            conditions.append(f"NOT {_is_in(f'whole_{one}', 'r.step')}")
        conditions += [_is_in(f"whole_{wide}", f"r.step // {wide} * {wide}") for wide in widths[at + 1 :]]
        shown.append(f"SELECT r.* FROM rows_{one} r" + (f" WHERE {' AND '.join(conditions)}" if conditions else ""))
    names = ", ".join(
        f"({number}, {quoted(one.name)}, {quoted(one.kind)}, {quoted(one.place)})" for number, one in ids.items()
    )
    return (
        f"WITH named(series, name, kind, place) AS (VALUES {names}), {', '.join(tables)} "
        f"SELECT {quoted(run)} AS run, named.name, named.kind, named.place, {quoted(statistic)} AS statistic, "
        f"found.* EXCLUDE (series) FROM ({' UNION ALL '.join(shown)}) found JOIN named USING (series) "
        f"WHERE found.step <= {question.last} AND found.last_step >= {question.first}"
    )


def _is_in(table: str, begins: str) -> str:
    return f"EXISTS (SELECT 1 FROM {table} w WHERE w.series = r.series AND w.attempt = r.attempt AND w.step = {begins})"


def _repeated(attempts: Sequence[tuple[int, int]]) -> str:
    """Return how many steps of a bucket a later attempt may have repeated: the bucket counts them, narrower rows do not."""
    firsts = sorted(attempts)
    cases = [
        f"WHEN {attempt} THEN greatest(0, w.last_step - {min(first for _, first in firsts[at + 1 :])} + 1)"
        for at, (attempt, _) in enumerate(firsts[:-1])
    ]
    return f"(CASE w.attempt {' '.join(cases)} ELSE 0 END)" if cases else "0"


def _buckets(
    question: SeriesQuestion,
    run: str,
    ids: Mapping[int, Meant],
    statistic: str,
    width: int,
    attempts: Sequence[tuple[int, int]],
) -> str:
    where = _where(question, run, ids)
    if statistic in STATISTICS or statistic == VALUE:
        column = "mean" if statistic == VALUE else statistic
        kept = ", ".join(f'{column}_{of} AS "{of}"' for of in FORMS)
        return f"SELECT {_ABOUT}, {kept}, nans, infs, bad_steps, false AS is_bound FROM moments_{width} WHERE {where}"
    # Made of the steps where all of them are there; else it is what other statistics of the bucket say.
    bounds = BOUNDS.get(statistic, ("NULL::DOUBLE",) * len(FORMS))
    shown = ", ".join(
        f'CASE WHEN is_whole THEN own_{of} ELSE {sql} END AS "{of}"' for of, sql in zip(FORMS, bounds, strict=True)
    )
    of_steps = "min(own) AS own_min, avg(own) AS own_avg, max(own) AS own_max, arg_max(own, own_step) AS own_last"
    steps = (
        f"SELECT series, attempt, own_step // {width} * {width} AS step, count(*) AS num, {of_steps} "
        f'FROM (SELECT series, attempt, step AS own_step, "{statistic}" AS own FROM moments WHERE {where}) GROUP BY 1, 2, 3'
    )
    is_whole = f"coalesce(num >= num_steps - {_repeated(attempts)}, false) AS is_whole"
    return (
        f"SELECT {_ABOUT}, {shown}, nans, infs, bad_steps, NOT is_whole AS is_bound FROM (SELECT *, {is_whole} "
        f"FROM (SELECT * FROM moments_{width} WHERE {where}) w LEFT JOIN ({steps}) USING (series, attempt, step))"
    )


def _steps(question: SeriesQuestion, run: str, ids: Mapping[int, Meant], statistic: str) -> str:
    if statistic == VALUE:
        where = _where(question, run, [quoted(one.name) for one in ids.values()], "name")
        numbers = ", ".join(f"({number}, {quoted(one.name)})" for number, one in ids.items())
        rows = (
            f"SELECT n.series, s.attempt, s.step, s.value, s.nans, s.infs FROM (SELECT * FROM scalars WHERE {where}) s "
            f"JOIN (VALUES {numbers}) n(series, name) USING (name)"
        )
    else:
        where = _where(question, run, ids)
        rows = f'SELECT series, attempt, step, "{statistic}" AS value, nans, infs FROM moments WHERE {where}'
    shown = ", ".join(f'value AS "{of}"' for of in FORMS)
    return (
        f"SELECT series, attempt, step, step AS last_step, 1::BIGINT AS num_steps, {shown}, nans, infs, "
        f"(nans + infs > 0)::BIGINT AS bad_steps, false AS is_bound FROM ({rows})"
    )


def _where(question: SeriesQuestion, run: str, ids: Iterable[int | str], column: str = "series") -> str:
    first, last = question.span
    return f"run = {quoted(run)} AND {column} IN ({', '.join(map(str, ids))}) AND step BETWEEN {first} AND {last}"
