"""The rows of a plain log as closed steps of one rank that measures no tensor: what the judge of a live run sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cached_property
from statistics import median_low

import numpy as np

from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.logs.rows import Log
from sentinel.messages import Descriptor, EndStep
from sentinel.place import Place
from sentinel.record import ROW_DTYPE
from sentinel.step_view import RankStep, Scalar
from sentinel.version import VERSION

_RANK = 0
LOT_ROWS = 4096
"""Rows that are made Python objects at once; a bound on memory."""
RECENT_GAPS = 9
"""Newest gaps between rows whose median is the log's stride, in steps: up to four odd ones (a lost row, an evaluation)
change nothing."""
_OF_A_STEP = ("scalars", "ended")
"""What of a step depends on more than its tensors, of which there are none."""


def log_views(log: Log, run: str) -> Iterator[ClosedStep]:
    """Yield a step for each row, in order: its scalars, and nothing of the rows behind it. run: the name it is judged by."""
    descriptor = Descriptor(
        version=VERSION, place=Place(), chunks=(), tensors=(), row_fields=(), row_bytes=ROW_DTYPE.itemsize
    )
    layout = ModelLayout({_RANK: descriptor})
    rows = np.zeros(0, ROW_DTYPE)
    like = ClosedStep(run=run, attempt=0, step=0, layout=layout, parts=[])
    # What holds of all steps without tensors is formed once: most of a step's time would go there.
    for name, attribute in vars(ClosedStep).items():
        if isinstance(attribute, cached_property) and name not in _OF_A_STEP:
            getattr(like, name)
    shared = {**vars(like), "ended": frozenset({_RANK})}
    gaps: deque[int] = deque(maxlen=RECENT_GAPS)
    before: tuple[int, int] | None = None
    for step, attempt, given in _given(log):
        if before is not None and before[1] == attempt and step > before[0]:
            gaps.append(step - before[0])
        before = step, attempt
        end = EndStep(step=step, num_rows=0, num_calls=0, scalars=given)
        view = object.__new__(ClosedStep)
        view.__dict__.update(shared)
        view.attempt, view.step, view.stride = attempt, step, median_low(gaps) if gaps else 1
        view.parts = [RankStep(rank=_RANK, descriptor=descriptor, rows=rows, end_step=end, time=0.0)]
        view.__dict__["scalars"] = {name: Scalar(value, {_RANK: value}) for name, value in given.items()}
        yield view


def _given(log: Log) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield (step, attempt, channel -> number) of each row; in lots, for objects take ten times the memory of arrays."""
    channels = sorted(log.columns)
    for first in range(0, log.num_rows, LOT_ROWS):
        lot = slice(first, first + LOT_ROWS)
        values = np.column_stack([log.columns[channel][lot] for channel in channels]).tolist()
        present = np.column_stack([log.present[channel][lot] for channel in channels])
        is_full = np.all(present, axis=1).tolist()
        for row, (step, attempt) in enumerate(zip(log.steps[lot].tolist(), log.attempts[lot].tolist(), strict=True)):
            given = dict(zip(channels, values[row], strict=True))
            if not is_full[row]:
                given = {channel: given[channel] for channel, is_held in zip(channels, present[row], strict=True) if is_held}
            yield step, attempt, given
