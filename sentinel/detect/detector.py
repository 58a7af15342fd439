"""SeriesDetector: the methods that the engine calls on every online detector, and the scores that it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from sentinel.detect.declaration import Declaration

State = dict[str, np.ndarray]
"""Named arrays, first axis the series. Owned by the engine: it grows, gathers and snapshots them."""


Explanation = tuple[np.ndarray, dict[str, np.ndarray]]
"""Baseline and evidence, see `Scores`."""


class Scores:
    """The score of one point of each series, 1.0 and more anomalous, with its baseline and evidence.

    Baseline and evidence are computed when they are first read, for hardly any step needs them: read them before `learn`.
    """

    __slots__ = ("_explain", "_explained", "score")

    def __init__(self, score: np.ndarray, explain: Callable[[], Explanation]) -> None:
        self.score = score
        """Shape [series], float64, finite, never negative; at least 1.0 is anomalous."""
        self._explain = explain
        self._explained: Explanation | None = None

    @classmethod
    def of(cls, score: np.ndarray, baseline: np.ndarray, **evidence: np.ndarray) -> Scores:
        """Return scores whose baseline and evidence are computed already."""
        return cls(score, lambda: (baseline, evidence))

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Return the scores of points that were judged in parts, which are explained alike."""
        if len(parts) == 1:
            return parts[0]

        def explained() -> Explanation:
            each = [one._explanation() for one in parts]
            evidence = {name: np.concatenate([one[name] for _, one in each]) for name in each[0][1]}
            return np.concatenate([baseline for baseline, _ in each]), evidence

        return cls(np.concatenate([one.score for one in parts]), explained)

    def _explanation(self) -> Explanation:
        if self._explained is None:
            self._explained = self._explain()
        return self._explained

    @property
    def baseline(self) -> np.ndarray:
        """Shape [series], float64, in the unit of the values; NaN where there is none (yet)."""
        return self._explanation()[0]

    @property
    def evidence(self) -> dict[str, np.ndarray]:
        """More, by name, shape [series]. `direction`: +1 above the baseline, -1 below, 0 neither.
        `corroborated`: bool, this point is certain without others that agree. `level`: what was judged, where it is no
        single point."""
        return self._explanation()[1]


@runtime_checkable
class SeriesDetector(Protocol):
    """Scores many series at once, online: constant memory a series, no clock, no I/O. Score before you learn.

    A detector is built from the `args` of its rule; its fields are those args, each documented. A state may hold a
    bool array `settled`: `learn` sets it for the series whose baseline moved to a lasting new level at this very point.
    A detector of another package is handed finite values alone, unless it declares `raw_values`: a series whose value is
    NaN or infinite sits the step out, scores 0.0 and keeps its state.
    """

    declares: ClassVar[Declaration]
    """What it is asked for and handed, and what its anomalies mean."""

    def state(self, num_series: int) -> State:
        """Return the state of series before their first point."""
        ...

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Return the scores of one new point of each series; changes nothing."""
        ...

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point of each series into the state, in place; `anomalous` marks what must not move a baseline."""
        ...


def grow(detector: SeriesDetector, state: State, num_series: int) -> State:
    """Return `state` with room for `num_series` series: old ones first and unchanged, new ones behind."""
    have = len(next(iter(state.values()))) if state else 0
    if have >= num_series:
        return state
    fresh = detector.state(num_series - have)
    return {name: np.concatenate([state[name], fresh[name]]) if have else fresh[name] for name in fresh}


def state_bytes(state: State) -> int:
    """Return the bytes a state holds, all series together."""
    return sum(array.nbytes for array in state.values())
