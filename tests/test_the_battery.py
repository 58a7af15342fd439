"""That the battery for detectors finds what is wrong: each check fails for a detector that owes just that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from sentinel.detect import Declaration, Scores
from sentinel.detect.detector import State
from sentinel.testing import battery
from sentinel.testing.battery import BATTERY, DetectorUnderTest


class Counts:
    """Scores nothing, counts points."""

    declares: ClassVar[Declaration] = Declaration(summary="nothing")

    def state(self, num_series: int) -> State:
        return {"points": np.zeros(num_series)}

    def score(self, values: np.ndarray, state: State) -> Scores:
        return Scores.of(np.zeros(len(values)), state["points"].copy())

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        state["points"] += 1


class Negative(Counts):
    def score(self, values: np.ndarray, state: State) -> Scores:
        return Scores.of(-np.ones(len(values)), values)


class Forgetful(Counts):
    def __init__(self) -> None:
        self.calls = 0

    def score(self, values: np.ndarray, state: State) -> Scores:
        self.calls += 1
        return Scores.of(np.full(len(values), float(self.calls)), values)


class Large(Counts):
    def state(self, num_series: int) -> State:
        return {"points": np.zeros((num_series, 100))}


class Sociable(Counts):
    def score(self, values: np.ndarray, state: State) -> Scores:
        return Scores.of(np.full(len(values), float(len(values))), values)


class Hasty(Counts):
    def score(self, values: np.ndarray, state: State) -> Scores:
        state["points"] += 1
        return super().score(values, state)


class Shapeless:
    declares: ClassVar[Declaration] = Declaration(summary="nothing")


@pytest.mark.parametrize(
    ("wrong", "check", "says"),
    [
        (Shapeless, battery.keeps_the_contract, "needs state, score and learn"),
        (Negative, battery.scores_are_finite_and_not_negative, "negative"),
        (Hasty, battery.scores_are_finite_and_not_negative, "only learn"),
        (Forgetful, battery.replays_identically, "the second time"),
        (Large, battery.memory_is_bounded, "800 bytes a series"),
        (Sociable, battery.series_are_independent, "beside others"),
        (Forgetful, battery.goes_on_from_a_snapshot, "outside the state"),
        (Sociable, battery.growing_leaves_old_series_alone, "joined later"),
    ],
)
def test_a_detector_that_owes_it_is_found(
    wrong: Callable[[], Any], check: Callable[[DetectorUnderTest], None], says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        check(DetectorUnderTest(wrong()))


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_one_that_owes_nothing_passes(check: Callable[[DetectorUnderTest], None]) -> None:
    check(DetectorUnderTest(Counts()))
