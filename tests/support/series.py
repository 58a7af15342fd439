"""Series, and what a detector makes of them when it is driven as the engine drives it."""

from __future__ import annotations

from typing import Any

import numpy as np


def autoregressive(rng: np.random.Generator, points: int, phi: float) -> np.ndarray:
    """Return [points] of mean 0 and variance 1, each `phi` times the one before and noise."""
    out, last = np.empty(points), 0.0
    for at, noise in enumerate((rng.standard_normal(points) * np.sqrt(1.0 - phi * phi)).tolist()):
        last = phi * last + noise
        out[at] = last
    return out


def scores_of(detector: Any, values: Any) -> np.ndarray:
    """Return a score for each value, [points] or [points, series]: each point scored, then learned as the engine does."""
    values = np.asarray(values, dtype=np.float64)
    points = values.reshape(len(values), -1)
    state, scores = detector.state(points.shape[1]), np.zeros(points.shape)
    with np.errstate(all="ignore"):
        for at, point in enumerate(points):
            scores[at] = detector.score(point, state).score
            detector.learn(point, state, scores[at] >= 1.0)
    return scores.reshape(values.shape)


def first_anomalous(scores: np.ndarray) -> int:
    """Return the index of the first score that is anomalous; -1: none is."""
    flagged = np.flatnonzero(scores >= 1.0)
    return int(flagged[0]) if flagged.size else -1
