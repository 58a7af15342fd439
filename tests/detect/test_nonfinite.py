import math

import numpy as np
import pytest

from sentinel.detect import AnomalyNan, HiddenNan, NanStorm

from ..support.series import scores_of

VALUES = np.array([0.0, 1.0, -60.0, 50.0, math.nan, math.inf, -math.inf])


def flagged(detector, values):
    return (scores_of(detector, values) >= 1.0).tolist()


def fires(detector, values=VALUES):
    return (detector.score(np.asarray(values, dtype=np.float64), detector.state(len(values))).score >= 1.0).tolist()


@pytest.mark.parametrize(
    ("detector", "expected"),
    [
        (AnomalyNan(), [0, 0, 0, 0, 1, 1, 1]),
        (AnomalyNan(threshold=50.0), [0, 0, 1, 0, 1, 1, 1]),
        (AnomalyNan(threshold=0.0), [0, 1, 1, 1, 1, 1, 1]),
        (AnomalyNan(compat="msprobe"), [0, 0, 0, 0, 1, 0, 0]),
        (AnomalyNan(compat="msprobe", threshold=50.0), [0, 0, 1, 0, 1, 1, 1]),
    ],
)
def test_formulas(detector, expected):
    assert fires(detector) == [bool(one) for one in expected]


def test_three_nans_in_a_hundred_points_are_a_storm():
    values = [1.0] * 300
    for at in (10, 60, 109, 250):
        values[at] = math.nan

    found = flagged(NanStorm(), values)

    assert [at for at, fired in enumerate(found) if fired] == [109]


def test_nans_far_apart_are_no_storm():
    values = [math.nan if at % 60 == 0 else 1.0 for at in range(600)]

    assert not any(flagged(NanStorm(), values))


def test_a_sudden_exact_zero_is_a_hidden_nan(rng):
    values = [*(2.0 + 0.1 * rng.standard_normal(50)), 0.0]

    assert flagged(HiddenNan(), values) == [False] * 50 + [True]


def test_a_loss_that_stands_still_is_a_hidden_nan(rng):
    values = [*(2.0 + 0.1 * rng.standard_normal(50)), *[1.75] * 20]

    found = flagged(HiddenNan(), values)

    assert found.index(True) == 50 + 8


@pytest.mark.parametrize(
    ("rate", "floor"), [(0.4, 0.0), (0.7, 0.3), (0.9, 0.3), (0.97, 0.3), (0.9, -2.0)], ids=lambda value: str(value)
)
def test_a_loss_that_has_converged_stands_still_in_good_health(rate, floor):
    """Of full batches, by LBFGS or by gradient descent, in float32: it falls until nothing of it is left to change."""
    values = (floor + 0.6 * rate ** np.arange(1500)).astype(np.float32).astype(np.float64)
    values[values < floor + 4e-9] = floor + 4e-9

    assert not any(flagged(HiddenNan(), values))


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_a_loss_printed_with_few_digits_is_not(digits, rng):
    values = np.round(0.4 * np.exp(-np.arange(2000) / 300.0) + 0.003 * np.abs(rng.standard_normal(2000)), digits)

    assert not any(flagged(HiddenNan(), values))
