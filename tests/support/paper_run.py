"""A run on paper: descriptors, layouts and step views without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import EMPTY
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, Kind
from sentinel.step_view import RankStep
from sentinel.version import VERSION


class PaperRun:
    """Ranks that all hold the same tensors; `view` makes a closed step of norms and scalars."""

    def __init__(
        self, tensors: Sequence[tuple[str, str]], num_ranks: int = 1, placements: Mapping[str, str] | None = None,
        num_elements: int = 100,
    ):  # fmt: skip
        self.tensors = list(tensors)
        self.num_ranks = num_ranks
        infos = tuple(
            TensorInfo(id=at, name=name, kind=kind, shape=(num_elements,), site_pos=at, placements=dict(placements or {}))
            for at, (name, kind) in enumerate(tensors)
        )
        self.descriptors = {
            rank: Descriptor(
                version=VERSION,
                place=Place(rank=rank, world_size=num_ranks, dp_rank=rank, dp_size=num_ranks),
                chunks=(ChunkInfo(vpp_stage=0, depth=0),),
                tensors=infos,
                row_fields=(),
                row_bytes=ROW_DTYPE.itemsize,
            )
            for rank in range(num_ranks)
        }
        self.layout = ModelLayout(self.descriptors)

    def rows(self, norms: Sequence[float], kurtosis: Sequence[float] | None = None) -> np.ndarray:
        """Return one rank's rows: 100 elements of mean 0 each, with these norms and kurtoses."""
        n = len(self.tensors)
        rows = np.zeros(n, ROW_DTYPE)
        for name in EMPTY.dtype.names:
            rows[name] = EMPTY[name]
        norms = np.asarray(norms, dtype=np.float64)
        rows["tensor"] = np.arange(n)
        rows["kind"] = [int(Kind.of(kind)) for _, kind in self.tensors]
        rows["micro_step"], rows["call_id"], rows["num_folded"] = 0, np.arange(n), 1
        rows["bad_call_id"], rows["max_call_id"] = NONE_ID, np.arange(n)
        rows["bad_micro_step"] = -1
        rows["count"], rows["m2"] = 100, norms**2
        rows["m4"] = (3.0 if kurtosis is None else np.asarray(kurtosis)) * norms**4 / 100
        rows["min"], rows["max"] = -norms, norms
        return rows

    def view(
        self,
        step: int,
        norms: Any = None,
        *,
        kurtosis: Any = None,
        scalars: Mapping[str, Any] | None = None,
        attempt: int = 0,
        change: Callable[[int, np.ndarray], None] | None = None,
        is_skipped: bool = False,
        keep: Sequence[int] | None = None,
    ) -> ClosedStep:
        """Return a step. norms: [tensors], the same on each rank; scalars: name -> value, or list by rank.

        change: called with each rank and its rows, which it may alter; keep: indices of the tensors that are there.
        """
        parts = []
        for rank, descriptor in self.descriptors.items():
            rows = self.rows(np.ones(len(self.tensors)) if norms is None else norms, kurtosis)
            if change is not None:
                change(rank, rows)
            if keep is not None:
                rows = rows[list(keep)]
            logged = {k: v[rank] if isinstance(v, list) else v for k, v in (scalars or {}).items()}
            end = EndStep(step=step, num_rows=len(rows), num_calls=len(rows), scalars=logged, is_skipped=is_skipped)
            parts.append(RankStep(rank=rank, descriptor=descriptor, rows=rows, end_step=end, time=1000.0 + step))
        return ClosedStep(run="paper", attempt=attempt, step=step, layout=self.layout, parts=parts)


def plant_nan(rows: np.ndarray, at: int, *, num: int = 3, micro_step: int = 0, call_id: int | None = None) -> None:
    """Turn `num` elements of row `at` into NaN, as a kernel and a fold would report it."""
    rows["num_nan"][at] = num
    rows["count"][at] -= num
    rows["bad_micro_step"][at] = micro_step
    rows["bad_call_id"][at] = rows["call_id"][at] if call_id is None else call_id
