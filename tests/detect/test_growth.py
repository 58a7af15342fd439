"""What fades or grows slowly: told long before it is nothing or infinite; what decays, converges or warms up is not."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.detect import AnomalyTurbulence, ExplodingTensor, VanishingGradient

from ..support.series import first_anomalous

NUM_STEPS = 900
STEP = np.arange(NUM_STEPS)


@pytest.fixture
def gradients(rng):
    """Norms of twelve gradients that fall as a run converges, each at a level of its own."""
    level = np.exp(2.0 * rng.standard_normal(12))
    fall = 0.1 + 0.9 * np.exp(-STEP / 150.0)
    return level * fall[:, None] * np.exp(0.15 * rng.standard_normal((NUM_STEPS, 12)))


@pytest.mark.parametrize("halved_every", [10, 25, 45])
def test_a_gradient_that_fades_is_told_before_it_is_nothing(gradients, follow, halved_every):
    gradients[:, 4] *= 0.5 ** (np.maximum(0, STEP - 300) / halved_every)

    scores = follow(VanishingGradient(), gradients)
    at = first_anomalous(scores[:, 4])

    assert 300 < at < 300 + 14 * halved_every, "2**14: a ten-thousandth"
    assert (np.delete(scores, 4, axis=1) < 1.0).all()
    flagged = scores[at : at + 2 * halved_every, 4] >= 1.0
    assert (flagged[2:] & flagged[1:-1] & flagged[:-2]).any(), "it lasts, so it is corroborated"


def test_what_fades_slowly_is_news_to_no_other_baseline(gradients, follow):
    """Why there is a slow reference at all."""
    gradients[:, 4] *= 0.5 ** (np.maximum(0, STEP - 300) / 45)

    assert (follow(AnomalyTurbulence(), gradients) < 1.0).all()


def test_a_run_that_converges_to_nothing_accuses_no_gradient(gradients, follow):
    gradients *= np.exp(-STEP / 40.0)[:, None]

    assert (follow(VanishingGradient(), gradients) < 1.0).all()


def test_three_gradients_alone_are_held_against_their_own_past(gradients, follow):
    few = gradients[:, :3].copy()
    few[400:] *= 1e-4

    scores = follow(VanishingGradient(), few)

    assert (scores[:400] < 1.0).all() and (scores[400] >= 1.0).all()


@pytest.mark.parametrize("doubled_every", [3, 10, 40])
def test_a_tensor_that_grows_is_told_long_before_it_overflows(rng, follow, doubled_every):
    values = np.exp(0.1 * rng.standard_normal((NUM_STEPS, 6)))
    values[:, 2] *= 2.0 ** (np.maximum(0, STEP - 300) / doubled_every)

    scores = follow(ExplodingTensor(), values)
    at = first_anomalous(scores[:, 2])

    # fp16 ends at 2**16.
    assert 300 < at < 300 + 10 * doubled_every
    assert (np.delete(scores, 2, axis=1) < 1.0).all()


def test_a_model_that_diverges_as_a_whole_is_told(rng, follow):
    values = np.exp(0.1 * rng.standard_normal((NUM_STEPS, 6))) * 2.0 ** (np.maximum(0, STEP - 300) / 10)[:, None]

    assert (follow(ExplodingTensor(), values)[330:400].max(axis=0) >= 1.0).all()


@pytest.mark.parametrize(
    "growth",
    [
        pytest.param(np.minimum(STEP / 200.0, 1.0) ** 2, id="a weight that begins at zero, with a warm-up"),
        pytest.param(np.sqrt(1.0 + STEP), id="random walk of a weight"),
        pytest.param(1.0 + 0.05 * STEP, id="linear growth without decay"),
        pytest.param(0.02 + 5.0 * (1.0 - np.exp(-STEP / 60.0)), id="logits of a head"),
        pytest.param(np.where(STEP < 450, 1.0, 8.0), id="eight times as many tokens"),
    ],
)
def test_healthy_growth_is_followed(rng, follow, growth):
    values = growth[:, None] * np.exp(0.05 * rng.standard_normal((NUM_STEPS, 4)))

    assert (follow(ExplodingTensor(), values) < 1.0).all()
