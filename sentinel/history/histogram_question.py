"""A question for histograms: those that ranks recorded of a tensor at a step, a row each bin.

Read from a run's spool, and of a run in a store from its history.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from sentinel.aggregate import matches, nearest_names
from sentinel.errors import ConfigError
from sentinel.exports.recorded_vectors import RecordedVector, VectorReader
from sentinel.exports.series import TENSOR_KINDS, SeriesQuery
from sentinel.history.questions import asking
from sentinel.history.remote_run import RemoteRun, RunPlace
from sentinel.history.sql_views import quoted
from sentinel.store.run_paths import RunPaths

SCHEMA = pa.schema(
    [
        pa.field("run", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("attempt", "step", "rank")),
        *(pa.field(name, pa.string()) for name in ("kind", "name")),
        *(pa.field(name, pa.int64()) for name in ("micro_step", "bin")),
        *(pa.field(name, pa.float64()) for name in ("low", "high")),
        pa.field("count", pa.int64()),
    ]
)
"""Of an answer. `micro_step` -1: added up over those of the step."""
HISTOGRAM = "histogram"
MOST_STEPS_NAMED = 8


class HistogramQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which histograms are wanted."""

    name: str
    """Of a tensor, or a glob of such."""
    step: int | None = None
    """None: the newest step that has one."""
    kind: str | None = None
    """None: all kinds."""


class RecordedHistogram(NamedTuple):
    """One histogram, with its name."""

    attempt: int
    step: int
    rank: int
    kind: str
    name: str
    micro_step: int
    edges: Sequence[float]
    values: Sequence[float]


def answer(question: HistogramQuestion, runs: Mapping[str, RunPlace]) -> pa.Table:
    """Return the bins of the histograms of some runs, by run, rank and kind: `SCHEMA`.

    Reads the spool, which keeps the newest steps alone; of a run in a store its history. ConfigError where there is none of
    that name and step.
    """
    query = _query(question)
    rows: list[dict[str, object]] = []
    reasons = []
    for run, place in runs.items():
        found, reason = _of_store(question, place) if isinstance(place, RemoteRun) else _of_run(question, query, place)
        reasons.append(reason)
        for one in sorted(found, key=lambda one: (one.attempt, one.rank, one.kind, one.name, one.micro_step)):
            rows += [{"run": run, **row} for row in _bins(one)]
    if not rows:
        raise ConfigError(reasons[0])
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _query(question: HistogramQuestion) -> SeriesQuery:
    """Return what is read of a spool. ConfigError for a kind that nobody knows."""
    kinds = TENSOR_KINDS if question.kind is None else (question.kind,)
    query = SeriesQuery(names=(question.name,), kinds=kinds)
    if question.step is not None:
        query = msgspec.structs.replace(query, first_step=question.step, last_step=question.step)
    return query


def _of_run(question: HistogramQuestion, query: SeriesQuery, directory: Path) -> tuple[list[RecordedHistogram], str]:
    """Return the histograms of one run, and why there are none."""
    newest: list[RecordedHistogram] = []
    for one in _histograms(VectorReader(RunPaths.of(directory), query)):
        if newest and one.step > newest[0].step:
            newest = []
        if not newest or one.step == newest[0].step:
            newest.append(
                RecordedHistogram(
                    one.attempt,
                    one.step,
                    one.rank,
                    one.tensor.kind,
                    one.tensor.name,
                    one.vector.micro_step,
                    one.vector.edges,
                    one.values,
                )
            )
    return newest, "" if newest else _why_none(question, directory, query.kinds)


def _histograms(reader: VectorReader) -> Iterator[RecordedVector]:
    for one in reader:
        if one.vector.statistic == HISTOGRAM and len(one.vector.edges) == len(one.values) + 1:
            yield one


def _of_store(question: HistogramQuestion, run: RemoteRun) -> tuple[list[RecordedHistogram], str]:
    """Return the histograms of one run in a store, and why there are none."""
    of_kind = "" if question.kind is None else f" AND kind = {quoted(question.kind)}"
    with asking({run.name: run}) as connection:
        held = connection.execute(
            f"SELECT name, step FROM vectors WHERE statistic = '{HISTOGRAM}' AND len(edges) = len(values) + 1{of_kind} "
            "GROUP BY ALL"
        ).fetchall()
        names = sorted({name for name, _ in held})
        meant = {name for name in names if matches(question.name, name)}
        steps = {step for name, step in held if name in meant}
        step = max(steps, default=-1) if question.step is None else question.step
        if step not in steps:
            return [], _said_none(question, str(run), names, steps) or f"histogram: {run}: its history holds none"
        rows: list[tuple[Any, ...]] = connection.execute(
            f"SELECT attempt, step, rank, kind, name, micro_step, edges, values FROM vectors WHERE step = {step} AND "
            f"statistic = '{HISTOGRAM}' AND len(edges) = len(values) + 1{of_kind} "
            f"AND name IN ({', '.join(map(quoted, sorted(meant)))})"
        ).fetchall()
    return [RecordedHistogram(*row) for row in rows], ""


def _why_none(question: HistogramQuestion, directory: Path, kinds: tuple[str, ...]) -> str:
    names: set[str] = set()
    steps: set[int] = set()
    for one in _histograms(VectorReader(RunPaths.of(directory), SeriesQuery(kinds=kinds))):
        names.add(one.tensor.name)
        if any(matches(question.name, name) for name in (one.tensor.name, *one.tensor.also)):
            steps.add(one.step)
    of_kind = "" if question.kind is None else f' of kind "{question.kind}"'
    return _said_none(question, str(directory), names, steps) or (
        f"histogram: {directory}: the spool holds none{of_kind}; the trainer records them where its configuration says "
        "probes: {wgrad: {histogram: true}}, and the spool keeps those of the newest steps; series(...) works without"
    )


def _said_none(question: HistogramQuestion, place: str, names: Collection[str], steps: Collection[int]) -> str:
    """Return what there is in the place of what is wanted; empty: there are no histograms at all.

    names: of all tensors that have one; steps: that have one of the tensor that is meant.
    """
    of_kind = "" if question.kind is None else f' of kind "{question.kind}"'
    where = f"histogram: {place}: "
    if steps and question.step is not None:
        near = sorted(sorted(steps, key=lambda one: abs(one - (question.step or 0)))[:MOST_STEPS_NAMED])
        return f'{where}"{question.name}"{of_kind} has none at step {question.step}; near it: {", ".join(map(str, near))}'
    if names:
        near_names = ", ".join(f'"{one}"' for one in nearest_names([question.name], names))
        return f'{where}none is of a tensor "{question.name}"{of_kind}; nearest: {near_names}'
    return ""


def _bins(one: RecordedHistogram) -> Iterator[dict[str, object]]:
    for at, count in enumerate(one.values):
        yield {
            "attempt": one.attempt,
            "step": one.step,
            "rank": one.rank,
            "kind": one.kind,
            "name": one.name,
            "micro_step": one.micro_step,
            "bin": at,
            "low": one.edges[at],
            "high": one.edges[at + 1],
            "count": int(count),
        }
