"""Vectors of judged steps as rows of a history: histograms, and values for each head, expert or channel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sentinel.exports.series import MergedStep
from sentinel.history.step_rows import SeriesIds
from sentinel.history.table_schemas import SCHEMAS, Columns, in_order
from sentinel.messages import Vector, Vectors

MOST_BYTES = 2**26
"""Bytes of vectors whose steps are not judged yet; the oldest go. A bound on memory where a rank stays behind for long."""


class MeasuredVector(NamedTuple):
    """A vector of one rank in a judged step."""

    step: MergedStep
    rank: int
    vector: Vector


class UnjudgedVectors:
    """Keeps the vectors of steps until these are judged. Called by the loop."""

    def __init__(self) -> None:
        self._of_step: OrderedDict[int, dict[int, tuple[bytes, list[Vector]]]] = OrderedDict()
        """Step -> rank -> (its process, what it measured)."""
        self._num_bytes = 0

    def receive(self, step: int, rank: int, process: bytes, message: Vectors) -> None:
        """Take in what a rank measured in a step. Of two processes of a rank the newer one counts."""
        of_rank = self._of_step.setdefault(step, {})
        known, vectors = of_rank.get(rank, (process, []))
        if known != process:
            self._num_bytes -= _size(vectors)
            vectors = []
        of_rank[rank] = process, vectors
        vectors += message.items
        self._num_bytes += _size(message.items)
        while self._num_bytes > MOST_BYTES:
            _, gone = self._of_step.popitem(last=False)
            self._num_bytes -= sum(_size(one) for _, one in gone.values())

    def take(self, step: MergedStep) -> list[MeasuredVector]:
        """Return the vectors of a judged step, rank by rank, and keep them no longer."""
        of_rank = self._of_step.pop(step.step, {})
        self._num_bytes -= sum(_size(one) for _, one in of_rank.values())
        return [MeasuredVector(step, rank, one) for rank, (_, vectors) in sorted(of_rank.items()) for one in vectors]


def vector_rows(measured: Iterable[MeasuredVector], ids: SeriesIds) -> Columns:
    """Return the rows of the table `vectors`, in its order; without those of tensors that no descriptor has."""
    rows = list(_rows(measured, ids))
    found: Columns = {}
    for at, field in enumerate(SCHEMAS["vectors"]):
        found[field.name] = _column([row[at] for row in rows], field.type.to_pandas_dtype())
    return in_order("vectors", found)


def _rows(measured: Iterable[MeasuredVector], ids: SeriesIds) -> Iterator[tuple[object, ...]]:
    for step, rank, one in measured:
        series, _ = ids.of_layout(step.layout)
        at = int(step.layout.logical_of(rank, np.array([one.tensor], np.uint32))[0])
        values = _values(one)
        if at >= 0 and series[at] and values is not None:
            yield (
                int(series[at]), step.attempt, step.step, rank, one.micro_step, one.call_id, one.statistic, one.axis,
                list(one.shape), values, list(one.edges),
            )  # fmt: skip


def _values(one: Vector) -> list[float] | None:
    try:
        values: list[float] = np.frombuffer(one.values, np.dtype(one.dtype)).astype(np.float64).tolist()
    except (ValueError, TypeError):
        return None
    return values


def _column(values: Sequence[object], dtype: type) -> npt.NDArray[np.generic]:
    if dtype is np.object_:
        found = np.empty(len(values), object)
        found[:] = values
        return found
    return np.array(values, dtype)


def _size(vectors: Sequence[Vector]) -> int:
    return sum(len(one.values) + 200 for one in vectors)
