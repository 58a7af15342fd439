"""The rows that each rank recorded, before shards, copies and micro-steps are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.aggregate import matches
from sentinel.exports.series import SCALAR, SeriesQuery
from sentinel.kinds import is_of_kind
from sentinel.messages import TensorInfo
from sentinel.moments import Moments
from sentinel.record import NONE_ID

if TYPE_CHECKING:
    from sentinel.step_view import Layout, StepView

RANK_COLUMNS = (
    "attempt", "step", "time", "is_skipped", "rank", "kind", "name", "vpp_stage", "micro_step", "num_folded", "call_id",
    "num_elements",
)  # fmt: skip
"""Columns of a table of rows before its statistics. micro_step -1: of no micro-batch, or folded over several."""


class RankSeries(msgspec.Struct, frozen=True):
    """One tensor of one rank."""

    name: str
    """Canonical name of the tensor."""
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class RankStepRows:
    """The rows of one step as its ranks recorded them, without the view; picklable."""

    attempt: int
    step: int
    time: float
    is_skipped: bool
    layout: Layout
    parts: tuple[tuple[int, str, npt.NDArray[np.void]], ...]
    """(rank, first 8 hex digits of its incarnation, [rows] ROW_DTYPE)."""
    scalars: dict[str, float]

    @classmethod
    def of(cls, view: StepView) -> RankStepRows:
        """Return the rows of a view."""
        parts = tuple((part.rank, part.incarnation.hex()[:8], part.rows) for part in view.parts)
        scalars = {name: one.mean for name, one in view.scalars.items()}
        return cls(view.attempt, view.step, view.time, view.is_skipped, view.layout, parts, scalars)


@dataclass(frozen=True, slots=True)
class RankPoints:
    """The rows of one rank and step that a query selects."""

    rank: int
    incarnation: str
    series: list[RankSeries]
    """[rows]"""
    rows: npt.NDArray[np.void]
    """[rows] ROW_DTYPE."""

    @property
    def moments(self) -> Moments:
        """[rows]"""
        return Moments.from_rows(self.rows)


class RankPicker:
    """Selects rows of ranks by a query, step after step."""

    def __init__(self, query: SeriesQuery) -> None:
        self.query = query
        self._layout: Layout | None = None
        self._series: dict[int, list[RankSeries | None]] = {}

    def points(self, step: RankStepRows) -> list[RankPoints]:
        """Return the rows of the tensors that the query selects, rank by rank."""
        if step.layout is not self._layout:
            self._layout, self._series = step.layout, {}
        found = []
        for rank, incarnation, rows in step.parts:
            of_id = self._series.get(rank)
            if of_id is None:
                of_id = self._series[rank] = self._of_rank(step.layout, rank)
            series = [of_id[tensor] if tensor < len(of_id) else None for tensor in rows["tensor"].tolist()]
            taken = [at for at, one in enumerate(series) if one is not None]
            kept = [one for one in series if one is not None]
            found.append(RankPoints(rank, incarnation, kept, rows if len(taken) == len(rows) else rows[taken]))
        return found

    def _of_rank(self, layout: Layout, rank: int) -> list[RankSeries | None]:
        infos = layout.descriptors[rank].tensors
        found: list[RankSeries | None] = [None] * (max((info.id for info in infos), default=-1) + 1)
        logical = layout.logical_of(rank, np.array([info.id for info in infos], np.uint32))
        for info, at in zip(infos, logical.tolist(), strict=True):
            if at < 0 or info.is_part or not is_of_kind(info.kind, info.border, self.query.kinds):
                continue
            tensor = layout.tensors[at]
            called = (tensor.name, *tensor.also)
            if any(matches(glob, name) for glob in self.query.names for name in called):
                found[info.id] = RankSeries(tensor.name, info)
        return found

    def scalars(self, step: RankStepRows) -> dict[str, float]:
        """Return name -> logged value that the query selects: the mean over the ranks that report it."""
        if SCALAR not in self.query.kinds:
            return {}
        return {name: value for name, value in step.scalars.items() if any(matches(glob, name) for glob in self.query.names)}


def rank_rows_of(step: RankStepRows, points: RankPoints, statistics: Sequence[str]) -> list[tuple[object, ...]]:
    """Return one row of a table for each recorded one: `RANK_COLUMNS` and the statistics."""
    rows, moments = points.rows, points.moments
    columns = [moments.statistic(name).tolist() for name in statistics]
    calls = [None if call == NONE_ID else call for call in rows["call_id"].tolist()]
    table = zip(
        points.series, rows["micro_step"].tolist(), rows["num_folded"].tolist(), calls, moments.num_elements().tolist(),
        zip(*columns, strict=True) if columns else [()] * len(rows), strict=True,
    )  # fmt: skip
    lead = (step.attempt, step.step, step.time, step.is_skipped, points.rank)
    return [
        (*lead, one.info.kind, one.name, one.info.chunk, micro, folded, call, size, *values)
        for one, micro, folded, call, size, values in table
    ]
