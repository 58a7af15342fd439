"""Guarded: a detector of other people at work among ours; when it fails its rule falls silent and says so, no more."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from sentinel.detect import Scores, State

log = logging.getLogger("sentinel.rules")

FAILED = "guard.failed"
"""Array of the state: a rule that failed stays off after a restart, and in a replay, as it did live."""


class Guarded:
    """A series detector whose mistakes are its own.

    Its first exception, or scores that are no scores, switch it off for the series it was judging: nothing scores any more.
    Two threads never judge through one engine, so `problem` needs no lock.
    """

    def __init__(self, detector: Any, name: str) -> None:
        """name: what messages call it."""
        self._detector, self._name = detector, name
        self.summary = str(getattr(detector, "summary", ""))
        self.statistics = tuple(getattr(detector, "statistics", ("norm",)))
        self.problem = ""
        """Why it is off, in words; empty while it is well."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._detector, name)

    def for_statistic(self, statistic: str) -> Guarded:
        """Return the detector fitted to a statistic, guarded like this one."""
        fit = getattr(self._detector, "for_statistic", None)
        return self if fit is None else Guarded(fit(statistic), self._name)

    def state(self, num_series: int) -> State:
        """Return the detector's own arrays, and one that remembers a failure; none where it keeps none."""
        own = self._detector.state(num_series)
        return {**own, FAILED: np.zeros(num_series, dtype=bool)} if own else {}

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Return its scores; 0.0 throughout when it fails, or has failed."""
        if not self._is_off(state):
            try:
                scores = self._detector.score(values, state)
                found = np.asarray(scores.score, dtype=np.float64)
                if found.shape != values.shape:
                    raise ValueError(f"score() gave shape {found.shape} for {values.shape} values")
                if not np.isfinite(found).all() or (found < 0.0).any():
                    raise ValueError("score() gave a score that is negative or no number")
                baseline = np.asarray(scores.baseline, dtype=np.float64)
                return Scores.of(found, np.broadcast_to(baseline, values.shape), **scores.evidence)
            except Exception as error:  # a user's code may fail in any way
                self._fail(error, state)
        return Scores.of(np.zeros(values.shape), np.full(values.shape, np.nan), direction=np.zeros(values.shape, np.int8))

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Let it learn, unless it has failed."""
        if not self._is_off(state):
            try:
                self._detector.learn(values, state, anomalous)
            except Exception as error:  # as above
                self._fail(error, state)

    def _is_off(self, state: State) -> bool:
        return bool(state[FAILED].any()) if FAILED in state else bool(self.problem)

    def _fail(self, error: Exception, state: State) -> None:
        if FAILED in state:
            state[FAILED][:] = True
        if not self.problem:
            self.problem = f"{self._name} is off, because it failed: {type(error).__name__}: {error}"
            log.error("rules: %s", self.problem)
