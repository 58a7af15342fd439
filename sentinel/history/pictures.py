"""Pictures of a history: a statistic of one or of many series over steps, in as few columns as a screen has.

A column holds the steps of a bucket. Its least and its greatest value stand beside its mean, and what was not finite in it
is counted: a spike or a NaN of one step is in every picture, however wide the columns are.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sentinel.aggregate import matches, nearest_names
from sentinel.errors import ConfigError, StoreError, TookTooLong
from sentinel.exports.series import SCALAR, VALUE
from sentinel.history.config import FOLDER
from sentinel.history.manifest import Manifest, read_manifest
from sentinel.history.picture_cells import PictureCells
from sentinel.history.question_cache import QuestionCache
from sentinel.history.questions import asking
from sentinel.history.sql_views import Span
from sentinel.history.table_schemas import STATISTICS, WIDTHS
from sentinel.history.wanted import ANY_TENSORS, ELAPSED, SECONDS, STEPS, TENSOR_KINDS, Wanted
from sentinel.known_words import nearest

if TYPE_CHECKING:
    import duckdb

MOST_ROWS_READ = 1_000_000
"""Rows of one table that a picture reads (chosen: half a second of one core); past it columns are wider."""
MOST_NAME = 1000
"""Characters of a name that are answered; a bound, for names come from trainers."""
BATCH_ROWS = 250_000
"""Rows that are put into a picture at a time: a bound on memory."""
ANSWER_S = 10.0
"""Seconds that a picture may take; a bound on the time that one core is taken from whoever judges."""

_AS_KEPT = {name: tuple(f"{name}_{of}" for of in ("min", "max", "avg", "last")) for name in STATISTICS}
_SQUARES = "({0}_{1} * {0}_{1})"
_MEAN_MAX = f"greatest({_SQUARES.format('mean', 'min')}, {_SQUARES.format('mean', 'max')})"
_MEAN_MIN = f"(CASE WHEN mean_min * mean_max <= 0 THEN 0 ELSE least({_MEAN_MAX[9:-1]}) END)"
_RMS = (
    f"sqrt({_MEAN_MIN} + {_SQUARES.format('std', 'min')})",
    f"sqrt({_MEAN_MAX} + {_SQUARES.format('std', 'max')})",
    "NULL::DOUBLE",
    f"sqrt({_SQUARES.format('mean', 'last')} + {_SQUARES.format('std', 'last')})",
)
OF_BUCKETS: Mapping[str, tuple[str, str, str, str]] = {
    **{name: (least, greatest, mean, last) for name, (least, greatest, mean, last) in _AS_KEPT.items()},
    "rms": _RMS,
    "norm": (
        f"{_RMS[0]} * sqrt(w.size)",
        f"{_RMS[1]} * sqrt(w.size)",
        _RMS[2],
        f"{_RMS[3]} * sqrt(w.size)",
    ),
    "absmax": (
        "greatest(0, max_min, -min_max)",
        "greatest(max_max, -min_min)",
        "NULL::DOUBLE",
        "greatest(max_last, -min_last)",
    ),
}
"""Statistic -> least, greatest, mean and last of a bucket in SQL; `w.size`: elements of the tensor. Of what is made of kept
ones the least and the greatest are bounds: no step is outside of them, and `rms` and `norm` are at most sqrt(2) above
the greatest step."""


class PictureRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a row shows: one series, or `num` neighbours of which it names the first."""

    series: int
    name: str
    place: str
    pp_stage: int
    depth: int
    num: int = 1


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of `width` steps from `first_step` on. Arrays are [rows, columns]; NaN: no step there has a finite value."""

    kind: str
    """What was wanted; of `ANY_TENSORS` what it came to, empty where the history has no tensor."""
    rows: tuple[PictureRow, ...]
    first_step: int
    last_step: int
    """The newest step that was asked for and that there is."""
    width: int
    least: npt.NDArray[np.float64]
    greatest: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    """NaN everywhere where the history cannot say it."""
    last: npt.NDArray[np.float64]
    nans: npt.NDArray[np.int64]
    infs: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    """Steps of the column in which the row has anything; 0: nothing was measured."""


def held(run: str, run_dir: Path, find: str = "", limit: int = 200, cache: QuestionCache | None = None) -> dict[str, Any]:
    """Return what a history holds: its steps, kinds, statistics, scalars, and tensors whose name has `find` in it.

    limit: most scalars and most tensors that are listed. cache: of whoever asks again.
    """
    manifest = read_manifest(run_dir / FOLDER)
    with asked_in_time({run: run_dir}, cache=cache) as connection:
        rows = connection.execute(
            "SELECT series, left(name, ?), kind, place, depth FROM series ORDER BY kind, depth, site_pos, name", [MOST_NAME]
        ).fetchall()
    series = [dict(zip(("series", "name", "kind", "place", "depth"), row, strict=True)) for row in rows]
    kinds = Counter(one["kind"] for one in series)
    found = [one for one in series if one["kind"] != SCALAR and find.lower() in one["name"].lower()]
    first, last = extent_of(manifest)
    return {
        "run": run,
        "first_step": first,
        "last_step": last,
        "full_from": manifest.full_from,
        "missing_steps": manifest.missing,
        "kinds": {kind: num for kind, num in kinds.items() if kind != SCALAR},
        "statistics": list(OF_BUCKETS),
        "scalars": [one for one in series if one["kind"] == SCALAR][:limit],
        "num_scalars": kinds.get(SCALAR, 0),
        "tensors": found[:limit],
        "num_tensors": len(found),
    }


def picture_of(run: str, run_dir: Path, wanted: Wanted, cache: QuestionCache | None = None) -> Picture:
    """Return a picture of a run. ConfigError, with the nearest words, where it has nothing of what is wanted.

    cache: of whoever asks again.
    """
    known = {SCALAR: (VALUE,), STEPS: (SECONDS, ELAPSED)}.get(wanted.kind, tuple(OF_BUCKETS))
    if wanted.statistic not in known:
        near = nearest(wanted.statistic, known)
        raise ConfigError(f'statistic: expected one of {", ".join(known)}, got "{wanted.statistic[:40]}"{near}')
    manifest = read_manifest(run_dir / FOLDER)
    first, last = extent_of(manifest)
    first, last = max(first, wanted.first_step), min(last, wanted.last_step)
    if wanted.kind == STEPS:
        with asked_in_time({run: run_dir}, cache=cache) as connection:
            return _step_times(connection, wanted.statistic, first, last, wanted.columns)
    # Columns may begin before the first step that is wanted, by less than the widest bucket.
    span = first // WIDTHS[-1] * WIDTHS[-1], max(first, last)
    with asked_in_time({run: run_dir}, span, as_parts=True, statistics=_kept(wanted), cache=cache) as connection:
        if wanted.kind == ANY_TENSORS:
            wanted = msgspec.structs.replace(wanted, kind=_first_kind(connection))
            if not wanted.kind:
                return _picture("", (), first, last, 1, PictureCells(0, 0, first, 1))
        series = _series(connection, wanted)
        group = -(-len(series) // wanted.rows)
        rows = tuple(_row(series[at : at + group]) for at in range(0, len(series), group))
        most = max(1, min(wanted.columns, wanted.cells // len(rows)))
        table, first, width = _columns(manifest, len(series), first, last, most)
        num_columns = max(0, last - first + width) // width
        numbers = [one[0] for one in series]
        about = {"series": numbers, "row": [at // group for at in range(len(series))], "size": [one[-1] for one in series]}
        connection.register("wanted", pa.table(about))
        cells = PictureCells(len(rows), num_columns, first, width)
        cells.add(connection.sql(_select(wanted, numbers, table, first, last)).to_arrow_reader(BATCH_ROWS))
        connection.unregister("wanted")
    return _picture(wanted.kind, rows, first, last, width, cells)


@contextlib.contextmanager
def asked_in_time(
    runs: Mapping[str, Path],
    span: Span | None = None,
    *,
    as_parts: bool = False,
    statistics: tuple[str, ...] = STATISTICS,
    cache: QuestionCache | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection that takes one core, and is interrupted when its time is over: TookTooLong. StoreError where
    the files of the history cannot be read. The rest is as of `asking`."""
    with asking(runs, num_threads=1, span=span, as_parts=as_parts, statistics=statistics, cache=cache) as connection:
        import duckdb

        bell = threading.Timer(ANSWER_S, connection.interrupt)
        bell.daemon = True
        bell.start()
        try:
            yield connection
        except duckdb.InterruptException as error:
            raise TookTooLong(
                f"no answer within {ANSWER_S:g} s; ask for fewer steps or fewer tensors, or with sentinel sql, which has no "
                "such limit"
            ) from error
        except duckdb.Error as error:
            raise StoreError(f"run {', '.join(runs)}: its history cannot be read: {error}") from error
        finally:
            bell.cancel()


def _kept(wanted: Wanted) -> tuple[str, ...]:
    """Return the statistics that are kept of which the wanted one is made."""
    made_of = {VALUE: ("mean",), "rms": ("mean", "std"), "norm": ("mean", "std"), "absmax": ("min", "max")}
    return made_of.get(wanted.statistic, (wanted.statistic,))


def _first_kind(connection: duckdb.DuckDBPyConnection) -> str:
    """Return the kind of tensors that is shown where nobody names one; empty: there is no tensor."""
    known = [kind for (kind,) in connection.execute("SELECT DISTINCT kind FROM series ORDER BY kind").fetchall()]
    return next((kind for kind in (*TENSOR_KINDS, *known) if kind in known and kind != SCALAR), "")


def _series(connection: duckdb.DuckDBPyConnection, wanted: Wanted) -> list[tuple[Any, ...]]:
    """Return (series, name, place, pp_stage, depth, num_elements) of what is wanted, in the order of the model's forward."""
    found = connection.execute(
        "SELECT series, name, place, pp_stage, depth, num_elements FROM series WHERE kind = ? "
        "ORDER BY depth, site_pos, name, place",
        [wanted.kind],
    ).fetchall()
    if not found:
        kinds = [kind for (kind,) in connection.execute("SELECT DISTINCT kind FROM series ORDER BY kind").fetchall()]
        raise ConfigError(f'kind: expected one of {", ".join(kinds) or "none: it is empty yet"}, got "{wanted.kind[:40]}"')
    if wanted.series:
        chosen = [one for one in found if one[0] in wanted.series]
    else:
        chosen = [one for one in found if any(glob == one[1] or matches(glob, one[1]) for glob in wanted.names)]
    if not chosen:
        near = ", ".join(nearest_names([one[:80] for one in wanted.names], [one[1][:200] for one in found]))
        asked = f"series {wanted.series[0]} is none" if wanted.series else f'"{wanted.names[0][:80]}" matches no name'
        raise ConfigError(f"{asked} of kind {wanted.kind}; nearest: {near}")
    return chosen


def _row(series: Sequence[tuple[Any, ...]]) -> PictureRow:
    number, name, place, pp_stage, depth, _ = series[0]
    return PictureRow(series=number, name=name[:MOST_NAME], place=place, pp_stage=pp_stage, depth=depth, num=len(series))


def extent_of(manifest: Manifest) -> tuple[int, int]:
    """Return the first and the last step of which a history has anything; (0, -1): it has nothing."""
    files = [one for one in manifest.files if one.last_step >= 0]
    return min((one.first_step for one in files), default=0), max((one.last_step for one in files), default=-1)


def _columns(manifest: Manifest, num_series: int, first: int, last: int, most: int) -> tuple[int, int, int]:
    """Return (steps of a row of the table to read, first step, steps of a column): as fine as there is room and data for."""
    span = max(1, last - first + 1)
    narrowest = -(-span // most)
    widths = [one for one in (1, *WIDTHS) if begin_of(manifest, one) <= first] or [WIDTHS[-1]]
    fitting = [one for one in widths if one <= narrowest][-1:] or widths[:1]
    cheap = [one for one in widths if one >= fitting[0] and num_series * span <= MOST_ROWS_READ * one] or widths[-1:]
    table = cheap[0]
    begin = first // table * table
    return table, begin, max(1, -(-(last - begin + 1) // (table * most))) * table


def begin_of(manifest: Manifest, width: int) -> int:
    """Return the first step of which there are rows of a width."""
    if width == 1:
        return manifest.full_from
    young = [one for one in manifest.of("moments") if one.level == 0]
    return min((one.first_step for one in (*manifest.of(f"moments_{width}"), *young)), default=0)


def _select(wanted: Wanted, series: Sequence[int], table: int, first: int, last: int) -> str:
    if table == 1:
        is_scalar = wanted.kind == SCALAR
        view, value = ("scalars", "value") if is_scalar else ("moments", f"m.{wanted.statistic}")
        values, num, newest = (value,) * 4, "1::BIGINT", "m.step"
    else:
        view, newest = f"moments_{table}", "m.last_step"
        values = OF_BUCKETS["mean" if wanted.kind == SCALAR else wanted.statistic]
        num = "m.num_steps"
    least, greatest, mean, last_value = values
    return (
        f"SELECT w.row AS at, m.step, {newest} AS newest, {least} AS least, {greatest} AS greatest, {mean} AS mean, "
        f"{last_value} AS last, m.nans, m.infs, {num} AS steps FROM {view} m JOIN wanted w ON m.series = w.series "
        # As numbers, and not only by the join: by them parts of files are skipped that have none of these.
        f"WHERE m.series BETWEEN {min(series)} AND {max(series)} "
        f"AND m.step BETWEEN {first} AND {last // table * table + table - 1}"
    )


def _step_times(connection: duckdb.DuckDBPyConnection, statistic: str, first: int, last: int, most: int) -> Picture:
    """Return how long steps took, or when they ended, in seconds; how long one took whose forerunner was not of its attempt
    is not known."""
    width = -(-max(1, last - first + 1) // most)
    took = "CASE WHEN step = 1 + lag(step) OVER own THEN epoch(time) - epoch(lag(time) OVER own) END"
    if statistic == ELAPSED:
        took = "epoch(time) - (SELECT epoch(min(time)) FROM steps)"
    row = PictureRow(series=0, name=statistic, place="", pp_stage=-1, depth=-1)
    cells = PictureCells(1, max(0, last - first + width) // width, first, width)
    query = (
        "SELECT 0 AS at, step, step AS newest, s AS least, s AS greatest, s AS mean, s AS last, 0::BIGINT AS nans, "
        "0::BIGINT AS infs, (s IS NOT NULL)::BIGINT AS steps "
        f"FROM (SELECT step, {took} AS s FROM steps WINDOW own AS (PARTITION BY attempt ORDER BY step)) "
        f"WHERE step BETWEEN {first} AND {last}"
    )
    cells.add(connection.sql(query).to_arrow_reader(BATCH_ROWS))
    return _picture(STEPS, (row,), first, last, width, cells)


def _picture(kind: str, rows: tuple[PictureRow, ...], first: int, last: int, width: int, cells: PictureCells) -> Picture:
    return Picture(
        kind=kind, rows=rows, first_step=first, last_step=last, width=width, least=cells.least, greatest=cells.greatest,
        mean=cells.mean, last=cells.last, nans=cells.nans, infs=cells.infs, steps=cells.steps,
    )  # fmt: skip
