"""Which gradients of modules' inputs a rank measured by itself in a step, and found finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sentinel.record import Kind

if TYPE_CHECKING:
    from sentinel.ingest.merge import ClosedStep

_INPUT = Kind.DGRAD_IN.label


def clean_inputs(view: ClosedStep, rank: int) -> frozenset[str]:
    """Return the names of the modules the gradient of whose input a rank measured by itself, and all of it is finite.

    A module whose input is another's output has no such row: that gradient was measured once, under the other's name.
    """
    found, of_bad = _inputs(view, view.tensors_of(rank)), view.with_bad_rows()
    at = of_bad.bad_rows
    if not len(at):
        return found
    # Ranks rise along the rows.
    first, last = np.searchsorted(of_bad.row_rank[at], [rank, rank + 1])
    return found - _inputs(view, of_bad.row_logical[at[first:last]])


def _inputs(view: ClosedStep, logical: npt.NDArray[np.int32]) -> frozenset[str]:
    tensors = (view.tensors[at] for at in np.unique(logical).tolist() if at >= 0)
    return frozenset(one.name for one in tensors if one.kind == _INPUT)
