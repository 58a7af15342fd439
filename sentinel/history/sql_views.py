"""The views that questions see: plain names over the files of one run's history, put together as SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from sentinel.history.manifest import HistoryFile, Manifest
from sentinel.history.table_schemas import FOUND, SCHEMAS, STATISTICS, WIDTHS

ABOUT = ("name", "kind", "place", "dtype", "pp_stage", "vpp_stage", "depth", "site_pos", "num_elements")
"""Columns of a series beside its number."""
DERIVED = {
    "var": "std * std",
    "rms": "sqrt(mean * mean + std * std)",
    "norm": "sqrt(mean * mean + std * std) * sqrt(count)",
    "absmax": "greatest(abs(min), abs(max))",
}
"""Statistics that follow from those that are kept."""
Span: TypeAlias = tuple[int, int]
"""First and last step, both included."""


def quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def views_of(
    run: str, folder: str, manifest: Manifest, span: Span | None = None, *, as_parts: bool = False, young: str = ""
) -> dict[str, str]:
    """Return view -> SELECT, of one run. folder: what stands before the names of its files, without the slash.

    span: steps that will be asked for; None: all. Rows of other steps may lack, but of no bucket that has one of them.
    as_parts: of a bucket the rows as they lie, one or several, each with its own step, and without what is known of the
    series: for who puts them together in wider columns anyway. young: a table of the connection that has the newest files'
    steps in buckets already, and stands in the place of these files in `moments_W`; empty: none has.
    """
    whole, manifest = manifest, manifest if span is None else manifest.between(*span)
    name = f"{quoted(run)} AS run"
    series = _rows(folder, "series", [manifest.series] if manifest.series else [])
    about = ", ".join(f"s.{one}" for one in ABOUT)
    stands = _stands(manifest)
    moments = f"SELECT * FROM {_table(folder, 'moments', manifest.of('moments'))} WHERE {stands}"
    elements = "(count + nans + pos_infs + neg_infs)"
    views = {
        "series": f"SELECT {name}, * FROM {series}",
        "steps": f"SELECT {name}, * EXCLUDE (series, time), make_timestamp(CAST(time * 1e6 AS BIGINT)) AS time "
        f"FROM {_table(folder, 'steps', manifest.of('steps'))} WHERE {stands}",
        "moments": f"SELECT {name}, m.series, {about}, m.attempt, m.step, m.is_whole, m.count, m.nans, "
        f"m.pos_infs + m.neg_infs AS infs, m.pos_infs, m.neg_infs, m.zeros::DOUBLE / nullif({elements}, 0) AS zeros, "
        f"{', '.join(f'm.{one}' for one in STATISTICS)}, {', '.join(f'{sql} AS {one}' for one, sql in DERIVED.items())} "
        f"FROM ({moments}) m JOIN {series} s ON s.series = m.series WHERE s.kind <> 'scalar'",
        "scalars": f"SELECT {name}, m.series, m.attempt, m.step, s.name, m.mean AS value, m.nans, "
        f"m.pos_infs + m.neg_infs AS infs FROM ({moments}) m JOIN {series} s ON s.series = m.series WHERE s.kind = 'scalar'",
    }
    vectors = f"SELECT * FROM {_table(folder, 'vectors', manifest.of('vectors'))} WHERE {stands}"
    views["vectors"] = (
        f"SELECT {name}, v.series, s.name, s.kind, s.place, s.depth, s.site_pos, v.* EXCLUDE (series) FROM ({vectors}) v "
        f"JOIN {series} s ON s.series = v.series"
    )
    for table in FOUND:
        views[table] = f"SELECT {name}, * FROM {_table(folder, table, manifest.of(table))}"
    for width in WIDTHS:
        parts = _parts(folder, whole, width, span, young)
        if as_parts:
            views[f"moments_{width}"] = f"SELECT {name}, * FROM ({parts})"
            continue
        buckets = _merged(parts, width)
        views[f"moments_{width}"] = (
            f"SELECT {name}, b.series, {about}, b.* EXCLUDE (series) FROM ({buckets}) b "
            f"JOIN {series} s ON s.series = b.series"
        )
    return views


def _rows(folder: str, table: str, names: Sequence[str]) -> str:
    if not names:
        typed = ", ".join(f"NULL::{_type(str(field.type))} AS {field.name}" for field in SCHEMAS[table])
        return f"(SELECT {typed} WHERE false)"
    return f"read_parquet([{', '.join(quoted(f'{folder}/{one}') for one in names)}])"


def _table(folder: str, table: str, files: Sequence[HistoryFile]) -> str:
    return _rows(folder, table, [one.name for one in files])


def _type(arrow: str) -> str:
    if arrow.startswith("list<"):
        return _type(arrow.removesuffix(">").rpartition(" ")[2]) + "[]"
    return {"int32": "INTEGER", "int64": "BIGINT", "bool": "BOOLEAN", "double": "DOUBLE", "string": "VARCHAR"}[arrow]


def _stands(manifest: Manifest) -> str:
    """Return what is so of rows that no later attempt repeated."""
    firsts = sorted(manifest.attempts)
    parts = []
    for at, (attempt, _) in enumerate(firsts):
        later = [first for _, first in firsts[at + 1 :]]
        parts.append(f"(attempt = {attempt}" + (f" AND step < {min(later)})" if later else ")"))
    return "(" + " OR ".join(parts) + ")" if parts else "true"


def _parts(folder: str, manifest: Manifest, width: int, span: Span | None, table: str) -> str:
    """Return the rows that buckets of a width are made of: of merged files their buckets, of the newest ones the steps."""
    stands = _stands(manifest)
    if span is not None:
        # Here, where they reach the files: a condition on what is made of several rows does not.
        first, last = span[0] // width * width, span[1] // width * width + width - 1
        manifest, stands = manifest.between(first, last), f"{stands} AND step BETWEEN {first} AND {last}"
    made = [f"SELECT * FROM {_table(folder, f'moments_{width}', manifest.of(f'moments_{width}'))} WHERE {stands}"]
    if table:
        made.append(f"SELECT * FROM {table} WHERE {stands}")
    elif young := [one for one in manifest.of("moments") if one.level == 0]:
        single = ", ".join(
            f"(CASE WHEN {one} IS NULL THEN 0 ELSE 1 END)::BIGINT AS {one}_num, {one} AS {one}_min, {one} AS {one}_max, "
            f"{one} AS {one}_avg, {one} AS {one}_last"
            for one in STATISTICS
        )
        made.append(
            "SELECT series, attempt, step, step AS last_step, 1::BIGINT AS num_steps, nans, pos_infs + neg_infs AS infs, "
            f"(nans + pos_infs + neg_infs > 0)::BIGINT AS bad_steps, {single} "
            f"FROM {_table(folder, 'moments', young)} WHERE {stands}"
        )
    return " UNION ALL ".join(made)


def _merged(parts: str, width: int) -> str:
    """Return the buckets of a width: one row each."""
    merged = ", ".join(
        f"sum({one}_num)::BIGINT AS {one}_num, min({one}_min) AS {one}_min, max({one}_max) AS {one}_max, "
        f"sum({one}_avg * {one}_num) / nullif(sum({one}_num), 0) AS {one}_avg, "
        f"arg_max({one}_last, last_step) AS {one}_last"
        for one in STATISTICS
    )
    whole = "sum({0})::BIGINT AS {0}"
    counts = ", ".join(whole.format(one) for one in ("num_steps", "nans", "infs", "bad_steps"))
    return (
        f"SELECT series, attempt, step // {width} * {width} AS step, max(last_step) AS last_step, {counts}, {merged} "
        f"FROM ({parts}) GROUP BY 1, 2, 3"
    )
