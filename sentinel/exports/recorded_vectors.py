"""Vectors of a run in the order of the spool: histograms, and values for each head, expert or channel."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.aggregate import matches
from sentinel.exports.series import SeriesQuery
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.ingest.model_layout import ModelLayout
from sentinel.messages import Descriptor, EndStep, Vector, Vectors
from sentinel.step_view import LogicalTensor
from sentinel.store.run_paths import RunPaths

VECTOR_COLUMNS = (
    "attempt", "step", "time", "rank", "kind", "name", "vpp_stage", "micro_step", "call_id", "statistic", "axis", "shape",
    "values", "edges",
)  # fmt: skip
"""Columns of a table of vectors; `values` row by row, `edges` those of a histogram's bins."""


class RecordedVector(msgspec.Struct, frozen=True):
    """One vector, with its name."""

    attempt: int
    step: int
    time: float
    rank: int
    tensor: LogicalTensor
    vector: Vector
    values: list[float]

    def row(self) -> dict[str, object]:
        """Return column -> value."""
        vector = self.vector
        row = (
            self.attempt, self.step, self.time, self.rank, self.tensor.kind, self.tensor.name, self.tensor.vpp_stage,
            vector.micro_step, vector.call_id, vector.statistic, vector.axis, list(vector.shape), self.values,
            list(vector.edges),
        )  # fmt: skip
        return dict(zip(VECTOR_COLUMNS, row, strict=True))


class VectorReader:
    """Reads the vectors of a run. Of a step that was trained twice, those of the newest attempt."""

    def __init__(
        self, paths: RunPaths, query: SeriesQuery, attempt: int | None = None, times: tuple[float, float] | None = None
    ) -> None:
        self._paths = paths
        self._query = query
        self._attempt = attempt
        self._times = times
        self.num_broken = 0
        """Vectors whose values do not fill their shape, or of a tensor that no descriptor has."""
        self.names: set[str] = set()
        """Of the tensors that have vectors, whether they were asked for or not."""
        self.met: set[str] = set()
        """Globs that matched."""

    def __iter__(self) -> Iterator[RecordedVector]:
        """Yield the vectors."""
        newest: dict[tuple[int, int], int] = {}
        incarnations: dict[int, set[bytes]] = {}
        for record in self._records():
            incarnations.setdefault(record.incarnation.rank, set()).add(record.incarnation.id)
            if isinstance(record.message, EndStep):
                key = (record.incarnation.rank, record.message.step)
                newest[key] = max(newest.get(key, 0), record.incarnation.attempt or 0)
        has_resumed = any(len(one) > 1 for one in incarnations.values())
        descriptors: dict[int, Descriptor] = {}
        layout: ModelLayout | None = None
        for record in self._records():
            rank, step = record.incarnation.rank, record.frame.header.step
            descriptor = record.descriptor or record.incarnation.descriptor
            if not isinstance(record.message, Vectors) or descriptor is None:
                continue
            if descriptors.get(rank) is not descriptor:
                descriptors[rank], layout = descriptor, None
            attempt, time = record.incarnation.attempt or 0, record.frame.header.wall_ns / 1e9
            if not self._query.first_step <= step <= self._query.last_step:
                continue
            if self._times is not None and not self._times[0] <= time <= self._times[1]:
                continue
            if self._attempt is not None and attempt != self._attempt:
                continue
            if self._attempt is None and has_resumed and newest.get((rank, step), attempt) != attempt:
                continue
            if layout is None:
                layout = ModelLayout({**self._others(rank), **descriptors})
            yield from self._named(record, record.message, layout, attempt, step, time)

    def _records(self) -> Iterator[SpoolRecord]:
        follower = self._follower = RunFollower(self._paths.run_dir)
        while records := follower.poll(final=True):
            yield from records

    def _others(self, rank: int) -> dict[int, Descriptor]:
        """Return rank -> newest descriptor of the other ranks: layers are numbered over all of them."""
        return {
            incarnation.rank: incarnation.descriptor
            for incarnation in self._follower.incarnations.values()
            if incarnation.rank != rank and incarnation.descriptor is not None
        }

    def _named(
        self, record: SpoolRecord, message: Vectors, layout: ModelLayout, attempt: int, step: int, time: float
    ) -> Iterator[RecordedVector]:
        rank = record.incarnation.rank
        logical = layout.logical_of(rank, np.array([one.tensor for one in message.items], np.uint32))
        for vector, at in zip(message.items, logical.tolist(), strict=True):
            values = _values(vector)
            if at < 0 or values is None:
                self.num_broken += 1
                continue
            tensor = layout.tensors[at]
            called = (tensor.name, *tensor.also)
            if tensor.kind not in self._query.kinds:
                continue
            self.names.update(called)
            globs = [glob for glob in self._query.names if any(matches(glob, name) for name in called)]
            if globs:
                self.met.update(globs)
                yield RecordedVector(attempt, step, time, rank, tensor, vector, values.ravel().tolist())


def _values(vector: Vector) -> npt.NDArray[np.float64] | None:
    """Return a vector's values; None: its bytes do not fill its shape."""
    try:
        dtype = np.dtype(vector.dtype)
        if dtype.kind not in "iufb":
            return None
        return np.frombuffer(vector.values, dtype).reshape(vector.shape).astype(np.float64)
    except (ValueError, TypeError):
        return None
