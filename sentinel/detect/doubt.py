"""Rises of a scalar that one batch may make: alone they are written down, and reported once they last or stand far out.

Of one point above its bound nobody can tell a bad batch from an ordinary one of a series whose noise is not known yet, or is
of a kind that no deviation describes. Five such kinds, each a matter of the state that was there before the point.
"""

from __future__ import annotations

import numpy as np

from sentinel.detect import rolling
from sentinel.detect.detector import State

TAILED = 4.0
"""Robust deviations from which the second largest residual says that the noise has a long tail: of 160 points of Gaussian
noise it stands near 2.5, in healthy mixtures of tasks and batches of few samples beyond 4."""

FEWEST = 32
"""Residuals from which a deviation counts as known. Smaller: the deviation of a few points makes an ordinary batch certain;
larger: the spikes of a young run stay doubtful for longer."""


def is_doubtful(p: rolling.RollingParameters, values: np.ndarray, rise: np.ndarray, state: State) -> np.ndarray:
    """Return for each series whether a point that is anomalous may as well be an ordinary batch: [series] bool.

    - Half of the window and more is exactly zero: a margin that most batches keep, and what one does not has no scale.
    - The series is so scattered that the rise is within the deviation's bound, and only beyond all residuals kept.
    - Of fewer residuals than `FEWEST` no deviation is known.
    - It is young, its memory of residuals never full yet, and the point lies below what it began with: of a loss in fall
      the batches that are not learnt yet fall last.
    - It is young, and its noise is known to have a long tail already.
    """
    marks = state["marks"].astype(np.float64)
    half = (marks[:, rolling.THREE] - marks[:, rolling.QUARTER]) * rolling.HALF_TO_SIGMA
    most = (marks[:, rolling.HIGH] - marks[:, rolling.LOW]) * rolling.MOST_TO_SIGMA
    sigma = np.maximum(half, most)
    is_unknown = (state["center"] == 0.0) | (state["kept"] < FEWEST)
    is_young = state["kept"] < p.memory
    has_tail = state["second"] >= TAILED * sigma
    # The unit was set by the median of the first points.
    began = state["unit"] / p.near_zero
    doubtful: np.ndarray = is_unknown | (rise <= p.k * sigma) | (is_young & ((values < began) | has_tail))
    return doubtful
