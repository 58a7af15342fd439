"""msProbe's turbulence rule, exactly: its history mean, its comparison, and what it makes of NaN and infinities.

Source: msProbe 26.2, `BaseWriterWithAD._update_tag2scalars` (monitor/data_writers.py) and `AnomalyTurbulence.apply`
(core/monitor/anomaly_processor.py), checked against that code by benchmarks/rules_vs_msprobe.py. Its sums are not
rearranged: the order of float additions changes the last bit.
"""

from __future__ import annotations

import numpy as np

from sentinel.detect.detector import Scores, State
from sentinel.detect.vectorised import JUST_BELOW_ONE

DECAY = 0.99
"""Weight of the past in the history mean."""


def state(num_series: int) -> State:
    """Return the state of series without a history, 9 bytes each."""
    return {"history": np.zeros(num_series), "seen": np.zeros(num_series, dtype=bool)}


def score(values: np.ndarray, state: State, threshold: float) -> Scores:
    """Score one point a series: at least 1.0 exactly where abs(x) > history * (1 + threshold).

    The first point is its own history. A history that holds a NaN or an infinity exceeds nothing any more.
    """
    size = np.abs(values)
    history = np.where(state["seen"], state["history"], size)
    limit = history * (1.0 + threshold)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.nan_to_num(np.minimum(size / limit, 1e300), nan=0.0)
        within = np.where(size <= limit, np.minimum(ratio, JUST_BELOW_ONE), 0.0)
        found = np.where(size > limit, np.maximum(ratio, 1.0), within)
    return Scores.of(found, history, direction=(found >= 1.0).astype(np.int8))


def learn(values: np.ndarray, state: State) -> None:
    """Take one point of each series in, of any value: msProbe's history learns flagged points, NaN and infinities too."""
    size = np.abs(values)
    history = np.where(state["seen"], state["history"], size)
    with np.errstate(invalid="ignore", over="ignore"):
        state["history"][:] = DECAY * history + (1.0 - DECAY) * size
    state["seen"][:] = True
