"""What dies, after an incarnation: gradients that are all zero, weights that stand still; and what only looks so."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.detect import DeadTensor
from sentinel.errors import ConfigError

from ..support.series import first_anomalous


@pytest.fixture
def norms(rng):
    return np.exp(np.cumsum(0.001 * rng.standard_normal((200, 6)), axis=0))


def test_a_gradient_of_nothing_is_told_at_its_third_step(norms, follow):
    norms[100:, 3] = 0.0

    scores = follow(DeadTensor(), norms)

    assert first_anomalous(scores[:, 3]) == 102 and (scores[102:, 3] >= 1.0).all()
    assert (np.delete(scores, 3, axis=1) == 0.0).all()


def test_a_weight_that_stands_still_is_told_at_its_tenth_step(norms, follow):
    norms[100:, 3] = norms[99, 3]

    scores = follow(DeadTensor(), norms)

    assert first_anomalous(scores[:, 3]) == 109
    assert (np.delete(scores, 3, axis=1) == 0.0).all()


def test_what_it_says(norms):
    detector, state = DeadTensor(), DeadTensor().state(6)
    norms[100:, 3] = 0.0
    for point in norms[:102]:
        detector.learn(point, state, detector.score(point, state).score >= 1.0)

    found = detector.score(norms[102], state)

    assert found.baseline[3] == norms[99, 3] and found.evidence["direction"][3] == -1


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda v: v.__setitem__((slice(None), 3), 0.0), id="zero from the start"),
        pytest.param(lambda v: v.__setitem__((slice(None), 3), 1.0), id="frozen from the start"),
        pytest.param(lambda v: v.__setitem__((slice(0, 60), 3), 0.0), id="zero for a while at first"),
        pytest.param(lambda v: v.__setitem__((slice(100, 130),), v[99]), id="nothing stepped: accumulation, skipped steps"),
        pytest.param(lambda v: v.__setitem__((slice(100, 102), 3), 0.0), id="two steps without tokens"),
        pytest.param(lambda v: v.__setitem__((slice(100, 109), 3), v[99, 3]), id="nine steps below its last digit"),
        pytest.param(lambda v: v.__setitem__((slice(100, 140), 3), np.nan), id="not measured, or NaN"),
    ],
)
def test_what_is_not_dead(norms, follow, spoil):
    spoil(norms)
    control = norms.copy()
    control[150:, 5] = 0.0

    assert (follow(DeadTensor(), norms) < 1.0).all()
    assert (follow(DeadTensor(), control)[:, 5] >= 1.0).any()


def test_what_was_still_and_went_on_needs_four_times_as_long(norms, follow):
    norms[50:52, 3] = 0.0
    norms[100:, 3] = 0.0

    assert first_anomalous(follow(DeadTensor(), norms)[:, 3]) == 107


def test_a_weight_in_bf16_whose_rate_falls_stands_still_longer_and_longer(rng, follow):
    """Its updates round to nothing ever more often: no fault of this weight."""
    exact = 1.0 + np.cumsum(3e-3 * np.exp(-np.arange(600) / 150.0))
    values = np.stack([np.round(exact * 256.0) / 256.0, 1.0 + 1e-6 * np.cumsum(rng.random(600))], axis=1)

    scores = follow(DeadTensor(), values)

    assert (np.diff(values[:, 0]) == 0.0).mean() > 0.5, "the control"
    assert (scores[:300] < 1.0).all()


@pytest.mark.parametrize("name", ["zero_steps", "unchanged_steps", "after"])
@pytest.mark.parametrize("value", [0, -1, 10**6])
def test_nonsense_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        DeadTensor(**{name: value})
