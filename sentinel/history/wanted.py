"""Wanted: what a picture of a history is to show; apart from what makes it, so that a daemon loads that when it is asked."""

from __future__ import annotations

import msgspec

STEPS = "steps"
"""The kind of what a step itself has: `seconds`, from the end of the step before it to its own, and `elapsed`."""
ANY_TENSORS = ""
"""The kind of whoever leaves it to the history: the first of `TENSOR_KINDS` that it has, else the first of all."""
TENSOR_KINDS = ("wgrad", "activation", "dgrad", "param")
"""Kinds of tensors, the one that is shown first before the others (chosen)."""
SECONDS = "seconds"
ELAPSED = "elapsed"
"""Seconds from the end of the first step that the history has to a step's own, pauses and restarts among them."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a picture is to show."""

    kind: str
    """A kind of tensors, `ANY_TENSORS`, `scalar`, or `steps`."""
    statistic: str
    """One of `OF_BUCKETS`; of scalars `value`, of steps `seconds` or `elapsed`."""
    names: tuple[str, ...] = ("*",)
    """Globs of tensors or scalars."""
    series: tuple[int, ...] = ()
    """Numbers of single series, as `PictureRow.series` has them; empty: whatever the globs match."""
    first_step: int = 0
    last_step: int = 2**62
    columns: int = 1000
    """Most columns."""
    rows: int = 1000
    """Most rows; where there are more series, neighbours share one."""
    cells: int = 400_000
    """Most cells: where there are many rows, columns are fewer."""
