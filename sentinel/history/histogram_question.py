"""A question for histograms: those that ranks recorded of a tensor at a step, a row each bin, from a run's spool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pyarrow as pa

from sentinel.aggregate import matches, nearest_names
from sentinel.errors import ConfigError
from sentinel.exports.recorded_vectors import RecordedVector, VectorReader
from sentinel.exports.series import TENSOR_KINDS, SeriesQuery
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


def answer(question: HistogramQuestion, runs: Mapping[str, Path]) -> pa.Table:
    """Return the bins of the histograms of some runs, by run, rank and kind: `SCHEMA`.

    Reads the spool, which keeps the newest steps alone. ConfigError where there is none of that name and step.
    """
    rows: list[dict[str, object]] = []
    reasons = []
    for run, directory in runs.items():
        found, reason = _of_run(question, directory)
        reasons.append(reason)
        for one in found:
            rows += [{"run": run, **row} for row in _bins(one)]
    if not rows:
        raise ConfigError(reasons[0])
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _of_run(question: HistogramQuestion, directory: Path) -> tuple[list[RecordedVector], str]:
    """Return the histograms of one run, and why there are none."""
    kinds = TENSOR_KINDS if question.kind is None else (question.kind,)
    query = SeriesQuery(names=(question.name,), kinds=kinds)
    if question.step is not None:
        query = msgspec.structs.replace(query, first_step=question.step, last_step=question.step)
    newest: list[RecordedVector] = []
    for one in _histograms(VectorReader(RunPaths.of(directory), query)):
        if newest and one.step > newest[0].step:
            newest = []
        if not newest or one.step == newest[0].step:
            newest.append(one)
    newest.sort(key=lambda one: (one.attempt, one.rank, one.tensor.kind, one.tensor.name, one.vector.micro_step))
    return newest, "" if newest else _why_none(question, directory, kinds)


def _histograms(reader: VectorReader) -> Iterator[RecordedVector]:
    for one in reader:
        if one.vector.statistic == HISTOGRAM and len(one.vector.edges) == len(one.values) + 1:
            yield one


def _why_none(question: HistogramQuestion, directory: Path, kinds: tuple[str, ...]) -> str:
    names: set[str] = set()
    steps: set[int] = set()
    for one in _histograms(VectorReader(RunPaths.of(directory), SeriesQuery(kinds=kinds))):
        names.add(one.tensor.name)
        if any(matches(question.name, name) for name in (one.tensor.name, *one.tensor.also)):
            steps.add(one.step)
    of_kind = "" if question.kind is None else f' of kind "{question.kind}"'
    where = f"histogram: {directory}: "
    if steps and question.step is not None:
        near = sorted(sorted(steps, key=lambda one: abs(one - (question.step or 0)))[:MOST_STEPS_NAMED])
        return f'{where}"{question.name}"{of_kind} has none at step {question.step}; near it: {", ".join(map(str, near))}'
    if names:
        near_names = ", ".join(f'"{one}"' for one in nearest_names([question.name], names))
        return f'{where}none is of a tensor "{question.name}"{of_kind}; nearest: {near_names}'
    return (
        f"{where}the spool holds none{of_kind}; the trainer records them where its configuration says "
        "probes: {wgrad: {histogram: true}}, and the spool keeps those of the newest steps; series(...) works without"
    )


def _bins(one: RecordedVector) -> Iterator[dict[str, object]]:
    edges = one.vector.edges
    for at, count in enumerate(one.values):
        yield {
            "attempt": one.attempt,
            "step": one.step,
            "rank": one.rank,
            "kind": one.tensor.kind,
            "name": one.tensor.name,
            "micro_step": one.vector.micro_step,
            "bin": at,
            "low": edges[at],
            "high": edges[at + 1],
            "count": int(count),
        }
