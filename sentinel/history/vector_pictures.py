"""Pictures of vectors in a history: the value of each expert, or of each head, over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.errors import ConfigError
from sentinel.history.pictures import MOST_NAME, asked_in_time
from sentinel.history.wanted import Wanted
from sentinel.known_words import nearest

if TYPE_CHECKING:
    import duckdb

AXES = ("expert", "head")
"""Axes of the vectors that are shown: one value for each of these."""
LOAD = "load"
"""Tokens of each expert: they add up over ranks, and what is shown of them is the share."""
MOST_LISTED = 500
"""Vectors that are listed."""
MOST_VALUES = 1024
"""Experts, or heads, that are shown; of more the first."""


class VectorChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A vector of which a history has some steps."""

    series: int
    name: str
    kind: str
    statistic: str
    axis: str
    ranks: tuple[int, ...]
    """That recorded it."""
    num_values: int
    """The most of one step."""
    first_step: int
    last_step: int


class VectorPicture(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of `width` steps from `first_step` on; arrays are [values, columns], NaN where nothing finite was measured."""

    choice: VectorChoice
    rank: int | None
    """Whose values they are; None: those of all ranks, added up."""
    first_step: int
    last_step: int
    width: int
    least: npt.NDArray[np.float64]
    greatest: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    """Of a load: the share of all tokens of the column."""
    bad: npt.NDArray[np.int64]
    """Values that were not finite."""
    last_above: npt.NDArray[np.int64]
    """[values] the newest step in which the value was above 0; -1: none."""


def vector_picture(
    run: str, run_dir: Path, wanted: Wanted, rank: int | None = None
) -> tuple[tuple[VectorChoice, ...], VectorPicture | None]:
    """Return what vectors of a kind there are, and a picture of the one that is wanted; None where there is none.

    wanted: its kind, its statistic (empty: the first), one number of a series (none: the first) and steps are asked.
    rank: whose values are shown; None: those of all ranks of a load, of anything else those of the lowest.

    ConfigError, with what there is, where it is another one.
    """
    with asked_in_time({run: run_dir}) as connection:
        choices = [one for one in _choices(connection) if one.kind == wanted.kind]
        if not choices:
            return (), None
        choice = _chosen(choices, wanted)
        if rank is not None and rank not in choice.ranks:
            known = ", ".join(map(str, choice.ranks[:20]))
            raise ConfigError(f"rank: expected one that recorded {choice.name}, got {rank}; known: {known}")
        whose = rank if rank is not None else None if choice.statistic == LOAD else choice.ranks[0]
        return tuple(choices), _picture(connection, choice, whose, wanted)


def _choices(connection: duckdb.DuckDBPyConnection) -> list[VectorChoice]:
    axes = ", ".join(f"'{one}'" for one in AXES)
    found = connection.execute(
        "SELECT series, left(any_value(name), ?), any_value(kind), statistic, axis, list_sort(list(DISTINCT rank)), "
        "max(len(values)), min(step), max(step) FROM vectors "
        f"WHERE axis IN ({axes}) GROUP BY series, statistic, axis "
        "ORDER BY any_value(kind), any_value(depth), any_value(site_pos), any_value(name), statistic LIMIT ?",
        [MOST_NAME, MOST_LISTED],
    ).fetchall()
    names = ("series", "name", "kind", "statistic", "axis", "ranks", "num_values", "first_step", "last_step")
    return [msgspec.convert(dict(zip(names, row, strict=True)), VectorChoice) for row in found]


def _chosen(choices: Sequence[VectorChoice], wanted: Wanted) -> VectorChoice:
    statistics = sorted({one.statistic for one in choices})
    if wanted.statistic and wanted.statistic not in statistics:
        near = nearest(wanted.statistic[:40], statistics)
        raise ConfigError(f'statistic: expected one of {", ".join(statistics)}, got "{wanted.statistic[:40]}"{near}')
    fitting = [one for one in choices if wanted.statistic in ("", one.statistic)]
    if not wanted.series:
        return fitting[0]
    for one in fitting:
        if one.series == wanted.series[0]:
            return one
    known = ", ".join(f"{one.series} ({one.name[:80]})" for one in fitting[:5])
    raise ConfigError(
        f"series: expected one that has {wanted.statistic or 'vectors'}, got {wanted.series[0]}; known: {known}"
    )


def _picture(connection: duckdb.DuckDBPyConnection, choice: VectorChoice, rank: int | None, wanted: Wanted) -> VectorPicture:
    first, last = max(choice.first_step, wanted.first_step), min(choice.last_step, wanted.last_step)
    num = max(1, min(choice.num_values, MOST_VALUES))
    which = "series = ? AND statistic = ? AND step BETWEEN ? AND ?" + ("" if rank is None else f" AND rank = {int(rank)}")
    asked: list[Any] = [choice.series, choice.statistic, first, last]
    [(num_steps,)] = connection.execute(f"SELECT count(DISTINCT step) FROM vectors WHERE {which}", asked).fetchall()
    span = max(0, last - first + 1)
    # A column is at least as wide as the steps between two that were measured.
    columns = max(1, min(wanted.columns, wanted.cells // num, num_steps or 1))
    width = max(1, -(-span // columns))
    cells = connection.execute(
        f"SELECT place, (step - {first}) // {width} AS col, min(value) AS least, max(value) AS greatest, avg(value) AS mean,"
        " sum(value) AS total, sum(is_bad)::BIGINT AS bad, max(CASE WHEN value > 0 THEN step END) AS above FROM ("
        "SELECT step, place, CASE WHEN isfinite(raw) THEN raw END AS value, (NOT isfinite(raw))::INTEGER AS is_bad FROM ("
        "SELECT step, unnest(values) AS raw, generate_subscripts(values, 1) - 1 AS place "
        f"FROM vectors WHERE {which})) WHERE place < {num} GROUP BY 1, 2",
        asked,
    ).fetchnumpy()
    num_columns = -(-span // width)
    place = cells["place"].astype(np.int64) * num_columns + cells["col"].astype(np.int64)

    def placed(name: str) -> npt.NDArray[np.float64]:
        made = np.full(num * num_columns, np.nan)
        made[place] = np.ma.filled(np.ma.asarray(cells[name], np.float64), np.nan)
        return made.reshape(num, num_columns)

    above = placed("above")
    totals = placed("total")
    mean = placed("mean")
    if choice.statistic == LOAD:
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = totals / np.nansum(totals, axis=0)
    bad = np.nan_to_num(placed("bad")).astype(np.int64)
    return VectorPicture(
        choice=choice, rank=rank, first_step=first, last_step=last, width=width,
        least=placed("least"), greatest=placed("greatest"), mean=mean, bad=bad,
        last_above=np.nan_to_num(np.fmax.reduce(above, axis=1, initial=np.nan), nan=-1.0).astype(np.int64),
    )  # fmt: skip
