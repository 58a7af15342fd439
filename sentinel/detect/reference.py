"""A scalar beside its sisters: what a run has for itself once the data that all of them saw is taken out.

Of 36 public runs on the same data nearly every excursion recurs at the same step in all: it is the batch. Against their
median a loss keeps 0.1 to 0.2 % of noise instead of 2.7 %, so that a rise of 2 % shows.
"""

from __future__ import annotations

import msgspec
import numpy as np

from sentinel.detect import rolling
from sentinel.detect.detector import State
from sentinel.detect.windowed import RollingMedian

CLOSE_K = 4.5
"""Robust deviations of the residual that are normal, with many sisters; with n of them 1 + 1/n times that, for the median
of few is no quieter than one. Chosen on the sister logs of ../shared/trainlogs, as the two below."""
CLOSE_FLOOR = 0.012
"""Relative rise above the sisters that is always normal."""
UNREST = 2.0
"""And so many times what one sister in ten shows at this very step: some batches divide even sisters."""
GAIN = 0.5
"""Share of the run's own noise that the residual may have: what is no quieter comes from other data, and says nothing."""


class Beside:
    """The state of one rule's scalars beside their sisters. Vectorised over scalars; score before learn, as detectors do."""

    def __init__(self, detector: RollingMedian) -> None:
        self._own = detector
        self.residual: State = detector.state(0)
        self.sisters: State = detector.state(0)

    def grow(self, num_series: int) -> None:
        """Make room for so many scalars."""
        for state in (self.residual, self.sisters):
            have = len(state["unit"])
            if have < num_series:
                fresh = self._own.state(num_series - have)
                for name in fresh:
                    state[name] = np.concatenate([state[name], fresh[name]])

    def judge(
        self, slot: int, value: float, own_spread: float, median: float, unrest: float, num_runs: int
    ) -> tuple[float, float, float]:
        """Score one scalar's point and take it in; return (score, baseline, how far the sisters moved).

        own_spread: robust deviation of the run's own residuals. median, unrest, num_runs: of the sisters at this step.
        The score is 0.0 where nothing can be said; the third is in units of the rule's own score.
        """
        sisters = {name: array[slot : slot + 1] for name, array in self.sisters.items()}
        point = np.array([median])
        moved = self._own.score(point, sisters).score
        self._own.learn(point, sisters, moved >= 1.0)
        if not (value > 0.0 and median > 0.0 and np.isfinite(value) and np.isfinite(median)):
            return 0.0, median, float(moved[0])
        close = msgspec.structs.replace(self._own, k=CLOSE_K * (1.0 + 1.0 / max(num_runs, 1)), floor=CLOSE_FLOOR)
        residual = {name: array[slot : slot + 1] for name, array in self.residual.items()}
        ratio = np.array([value / median])
        found = close.score(ratio, residual)
        score = float(found.score[0])
        usual = float(found.baseline[0])
        if score >= 1.0 and unrest > 0.0:
            score = min(score, float(np.log(ratio[0] / usual)) / (UNREST * unrest))
        if rolling.spread(residual)[0] > GAIN * own_spread:
            score = 0.0
        close.learn(ratio, residual, np.array([score >= 1.0]))
        return score, usual * median, float(moved[0])

    def to_dict(self) -> dict[str, dict[str, list[object]]]:
        """Return everything that changes, for a snapshot."""
        return {
            which: {n: [a.dtype.str, list(a.shape), np.ascontiguousarray(a).tobytes()] for n, a in state.items()}
            for which, state in (("residual", self.residual), ("sisters", self.sisters))
        }

    def take_dict(self, data: dict[str, dict[str, list[object]]]) -> None:
        """Take back what `to_dict` gave."""
        for which, state in (("residual", self.residual), ("sisters", self.sisters)):
            for name, (dtype, shape, raw) in data[which].items():
                state[name] = np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()  # type: ignore[call-overload]
