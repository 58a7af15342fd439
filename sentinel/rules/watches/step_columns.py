"""StepColumns: the statistics of one step's tensors, each formed once, for all watches that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sentinel.moments import raw_statistic

if TYPE_CHECKING:
    from sentinel.step_view import StepView


class StepColumns:
    """The statistics of one step, each formed when the first watch asks for it."""

    def __init__(self, view: StepView) -> None:
        self._view = view
        self._clean: dict[str, np.ndarray] = {}
        self._raw: dict[str, np.ndarray] = {}

    def clean(self, statistic: str) -> np.ndarray:
        """Return the statistic, NaN for tensors with any non-finite element: what is left of them is no sample."""
        if statistic not in self._clean:
            values = np.asarray(self._view.moments.statistic(statistic), dtype=np.float64)
            if self._view.is_bad.any():
                values = values.copy()
                values[self._view.is_bad] = np.nan
            scale = missing_scale(self._view) if statistic == "norm" else None
            if scale is not None:
                values = values * scale
            self._clean[statistic] = values
        return self._clean[statistic]

    def raw(self, statistic: str) -> np.ndarray:
        """Return the statistic as torch would give it, NaN and infinities in it."""
        if statistic not in self._raw:
            self._raw[statistic] = raw_statistic(self._view.stats, statistic)
        return self._raw[statistic]


def missing_scale(view: StepView) -> np.ndarray | None:
    """Return by tensor what its norm must be multiplied by for the ranks that a step closed without; None: none is missing.

    Shards are taken to be alike; a tensor of which each rank holds a copy is whole with any of them.
    """
    if len(view.parts) >= len(view.places):
        return None
    share = view.layout.held_share(frozenset(part.rank for part in view.parts))
    return np.asarray(1.0 / np.sqrt(share))
