"""The battery for detectors of series: what each owes the engine, as checks that any test framework can run.

    @pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
    def test_what_a_detector_owes(check):
        check(DetectorUnderTest(MyDetector()))

Each check feeds values of every nastiness and raises AssertionError with what was owed. What a detector is meant to find no
battery knows: plant it, and look for it, in tests of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from sentinel.detect import SeriesDetector, grow, state_bytes
from sentinel.detect.detector import State

SEED = 11
NUM_SERIES = 12
SERIES_BYTES = 4096
"""Most bytes of state a series (of a detector for logged values; one for tensors owes 100, for there are thousands)."""
TENSOR_BYTES = 100


@dataclasses.dataclass(frozen=True)
class DetectorUnderTest:
    """A detector that is checked, and how."""

    detector: Any
    is_alone: bool = True
    """Whether a series is judged by itself; false: series of a step are held against one another."""
    has_raw_values: bool | None = None
    """Whether NaN and infinities are among the values; None: if it declares `raw_values`, as the engine hands them out."""

    def values(self, points: int = 200, num_series: int = NUM_SERIES) -> np.ndarray:
        """Return [points, series]: spikes, zeros, negatives, huge and tiny scales; NaN and infinities where due."""
        rng = np.random.default_rng(SEED)
        values = np.exp(rng.standard_normal((points, num_series))) * np.logspace(-30, 30, num_series)
        is_raw = self.detector.declares.raw_values if self.has_raw_values is None else self.has_raw_values
        for bad in (0.0, -1.0, 1e308, 5e-324, *((np.nan, np.inf, -np.inf) if is_raw else ())):
            values[rng.random(values.shape) < 0.01] = bad
        return values


def feed(detector: SeriesDetector, values: np.ndarray, state: State | None = None) -> tuple[np.ndarray, np.ndarray, State]:
    """Feed [points, series] as the engine does; return scores and settled, both of that shape, and the state.

    state: goes on from it, in place; None: a new one. AssertionError where `score` changes it.
    """
    state = detector.state(values.shape[1]) if state is None else state
    scores, settled = np.zeros(values.shape), np.zeros(values.shape, dtype=bool)
    with np.errstate(all="ignore"):
        for at, point in enumerate(values):
            before = {name: array.copy() for name, array in state.items()} if at % 8 == 0 else {}
            found = detector.score(point, state)
            scores[at] = found.score
            if before:
                _ = found.baseline, found.evidence
                assert _is_same(before, state), "score() changed the state: only learn() may"
            detector.learn(point, state, found.score >= 1.0)
            if "settled" in state:
                settled[at] = state["settled"]
    return scores, settled, state


def keeps_the_contract(subject: DetectorUnderTest) -> None:
    """It has state, score and learn, and says what it is and what it watches."""
    assert isinstance(subject.detector, SeriesDetector), "no SeriesDetector: it needs state, score and learn"
    assert subject.detector.declares.summary, "declares.summary is empty"
    assert subject.detector.declares.statistics, "declares.statistics is empty"


def scores_are_finite_and_not_negative(subject: DetectorUnderTest) -> None:
    """Whatever the values are."""
    scores, _, _ = feed(subject.detector, subject.values())

    assert np.isfinite(scores).all(), "a score is no number"
    assert (scores >= 0).all(), "a score is negative"


def replays_identically(subject: DetectorUnderTest) -> None:
    """The same values give the same scores and the same state, to the last bit: no clock, no chance."""
    values = subject.values()
    first, _, state = feed(subject.detector, values)
    again, _, state_again = feed(subject.detector, values)

    assert np.array_equal(first, again), "the same values were scored differently the second time"
    assert _is_same(state, state_again), "the same values left another state the second time"


def memory_is_bounded(subject: DetectorUnderTest) -> None:
    """The state of 400 points is as large as that of 40, and small."""
    _, _, early = feed(subject.detector, subject.values(points=40))
    _, _, late = feed(subject.detector, subject.values(points=400))
    most = SERIES_BYTES if subject.detector.declares.statistics == ("value",) else TENSOR_BYTES
    size = state_bytes(late) / NUM_SERIES

    assert state_bytes(early) == state_bytes(late), "the state grows with the points"
    assert size <= most, f"{size:.0f} bytes a series, at most {most}"


def series_are_independent(subject: DetectorUnderTest) -> None:
    """Their order does not matter, nor, where each is judged by itself, who else is there."""
    values = subject.values()
    order = np.random.default_rng(SEED).permutation(NUM_SERIES)
    straight, _, _ = feed(subject.detector, values)
    shuffled, _, _ = feed(subject.detector, values[:, order])

    assert np.array_equal(straight[:, order], shuffled), "the order of the series changes their scores"
    if subject.is_alone:
        fewer, _, _ = feed(subject.detector, values[:, :4])
        assert np.array_equal(straight[:, :4], fewer), "a series is scored differently beside others"


def goes_on_from_a_snapshot(subject: DetectorUnderTest) -> None:
    """From the bytes of its arrays it goes on as if nothing had been: a daemon is restarted."""
    values = subject.values()
    whole, _, _ = feed(subject.detector, values)
    _, _, state = feed(subject.detector, values[:150])
    copied = {name: np.frombuffer(one.tobytes(), one.dtype).reshape(one.shape).copy() for name, one in state.items()}
    rest, _, _ = feed(subject.detector, values[150:], copied)

    assert np.array_equal(whole[150:], rest), "it goes on differently from a snapshot: something is kept outside the state"


def growing_leaves_old_series_alone(subject: DetectorUnderTest) -> None:
    """Series that join later change nothing for those that are there."""
    values = subject.values()
    state = subject.detector.state(5)
    feed(subject.detector, values[:100, :5], state)
    scores, _, _ = feed(subject.detector, values[100:], grow(subject.detector, state, NUM_SERIES))
    expected, _, _ = feed(subject.detector, values[:, :5])

    if subject.is_alone:
        assert np.array_equal(scores[:, :5], expected[100:]), "series that joined later changed the scores of others"


def _is_same(first: State, other: State) -> bool:
    return all(np.array_equal(first[name], other[name], equal_nan=True) for name in first)


BATTERY: tuple[Callable[[DetectorUnderTest], None], ...] = (
    keeps_the_contract,
    scores_are_finite_and_not_negative,
    replays_identically,
    memory_is_bounded,
    series_are_independent,
    goes_on_from_a_snapshot,
    growing_leaves_old_series_alone,
)
"""What every detector with `over="series"` owes."""
