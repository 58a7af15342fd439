"""A question for traces: the small pictures of tensors that ranks made, a row each, from the rings of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sentinel.aggregate import matches, nearest_names
from sentinel.errors import ConfigError
from sentinel.history.answer_table import AnswerTable
from sentinel.history.plots import plot_picture
from sentinel.known_words import nearest
from sentinel.trace import TracedStep, TracedTensor, TracePath, TraceRings, read_traces

SCHEMA = pa.schema(
    [
        pa.field("run", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("attempt", "step", "rank")),
        *(pa.field(name, pa.string()) for name in ("kind", "name")),
        *(pa.field(name, pa.int64()) for name in ("micro_step", "chunk")),
        *(pa.field(name, pa.string()) for name in ("dtype", "compressor", "part")),
        *(pa.field(name, pa.list_(pa.int64())) for name in ("tensor_shape", "shape")),
        pa.field("values", pa.list_(pa.float64())),
    ]
)
"""Of an answer. `dtype` and `tensor_shape` are the tensor's on that rank, `shape` the picture's; `values` row by row."""
MOST_BYTES = 512 * 2**20
"""Bytes of numbers in one answer; a bound on memory, 512 MiB."""


class TraceQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which pictures are wanted."""

    name: str = "*"
    """Of a tensor on its rank, or a glob of such; empty: the tokens that the model was given, and no other."""
    kind: str | None = None
    """None: all kinds."""
    steps: tuple[int | None, int | None] = (None, None)
    """First and last, both included."""
    rank: int | None = None
    """None: all."""


class TraceTable(AnswerTable):
    """Pictures, a row each; `arrays()` gives them as numpy has them."""

    def arrays(self) -> list[npt.NDArray[np.float64]]:
        """Return the picture of each row, in its shape: float64, NaN and infinities included."""
        rows = self.to_arrow()
        values, shapes = rows.column("values"), rows.column("shape").to_pylist()
        return [
            np.asarray(one.values.to_numpy(zero_copy_only=False), np.float64).reshape(shape)
            for one, shape in zip(values, shapes, strict=True)
        ]


def answer(question: TraceQuestion, runs: Mapping[str, Path]) -> TraceTable:
    """Return the pictures of some runs, by run, step, rank and in the order in which they were made: `SCHEMA`.

    Of a step that a later attempt repeated, the later one counts. ConfigError where there is none of that name, step and
    rank, and where they are more than `MOST_BYTES`.
    """
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    problems: list[str] = []
    reasons: list[str] = []
    num_bytes = 0
    for run, directory in runs.items():
        seen: dict[tuple[str, str], None] = {}
        wanted = _wanted(question, directory)
        for step in read_traces(wanted, problems):
            for row, values in _pictures(question, step, seen):
                num_bytes += 8 * values.size
                if num_bytes > MOST_BYTES:
                    raise ConfigError(
                        f"traces: the pictures have more than {MOST_BYTES >> 20} MiB; name fewer by name, steps or rank"
                    )
                for column, value in (("run", run), ("values", values.ravel()), *row.items()):
                    columns[column].append(value)
        reasons.append(_why_none(question, directory, bool(wanted), [*seen]))
    if not columns["run"]:
        raise ConfigError("; ".join([reasons[0], *problems[:1]]) if reasons else "traces: no run was opened")
    said = f"{len(problems)} of the files could not be read: {problems[0]}" if problems else ""
    rows = pa.table({name: pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names})
    return TraceTable(rows, plot_picture, said)


def _wanted(question: TraceQuestion, directory: Path) -> list[TracePath]:
    """Return the files to read, in the order of step and rank."""
    first, last = question.steps
    newest = {
        (one.step, one.rank): one
        for one in TraceRings(directory).paths(question.rank)
        if (first is None or one.step >= first) and (last is None or one.step <= last)
    }
    return [newest[key] for key in sorted(newest)]


def _pictures(
    question: TraceQuestion, step: TracedStep, seen: dict[tuple[str, str], None]
) -> Iterator[tuple[dict[str, Any], npt.NDArray[np.float64]]]:
    head = step.head
    for key, one in head.tensors.items():
        seen[one.kind, one.name] = None
        if not _is_wanted(question, one):
            continue
        for part in ("", *one.parts):
            values = step.tensors.get(f"{key}:{part}" if part else key)
            if values is not None:
                yield {
                    "attempt": head.attempt, "step": head.step, "rank": head.rank, "kind": one.kind, "name": one.name,
                    "micro_step": one.micro_step, "chunk": one.chunk, "dtype": one.dtype, "compressor": one.compressor.name,
                    "part": part, "tensor_shape": list(one.shape), "shape": list(values.shape),
                }, values.astype(np.float64)  # fmt: skip


def _is_wanted(question: TraceQuestion, one: TracedTensor) -> bool:
    return (question.kind is None or one.kind == question.kind) and matches(question.name, one.name)


def _why_none(question: TraceQuestion, directory: Path, are_files: bool, seen: list[tuple[str, str]]) -> str:
    where = f"traces: {directory}: "
    if not are_files:
        there = TraceRings(directory).paths()
        if not there:
            return (
                f"{where}no rank has traced anything; sentinel trace RUN --targets MODULE asks a run that trains for some, "
                "where its configuration says allow_commands: [..., TraceTensors]"
            )
        steps, ranks = sorted({one.step for one in there}), sorted({one.rank for one in there})
        return (
            f"{where}expected steps and a rank that the rings hold, {len(steps)} steps from {steps[0]} to {steps[-1]} of "
            f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}, got steps {question.steps} of rank "
            f"{'any' if question.rank is None else question.rank}"
        )
    kinds = sorted({kind for kind, _ in seen})
    if question.kind is not None and question.kind not in kinds:
        return f'{where}none is of kind "{question.kind}"{nearest(question.kind, kinds)}; there are: {", ".join(kinds)}'
    near = ", ".join(f'"{one}"' for one in nearest_names([question.name], [name for _, name in seen]))
    return f'{where}none is of a tensor "{question.name}"; nearest: {near}'
