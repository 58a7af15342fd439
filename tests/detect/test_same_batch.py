"""A loss that glides where batches scattered it."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.detect import SameBatch
from sentinel.errors import ConfigError

from ..support.series import scores_of

STEPS, AT = 260, 200


def course(rng: np.random.Generator) -> np.ndarray:
    """A loss that falls, and scatters by 4 % about its course; now and then a spike."""
    loss = (2.0 + 3.0 * np.exp(-np.arange(STEPS) / 40.0)) * np.exp(0.04 * rng.standard_normal(STEPS))
    loss[rng.integers(0, STEPS, 4)] *= 2.0
    return loss


def test_one_batch_again_and_again_is_told_at_its_ninth_step(rng):
    loss = course(rng)
    loss[AT:] = loss[AT] * np.exp(-0.004 * np.arange(STEPS - AT))

    scores = scores_of(SameBatch(), loss)

    assert scores[:AT].max() < 1.0
    assert np.flatnonzero(scores >= 1.0)[0] == AT + SameBatch().lasting


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda loss: loss, id="as it is"),
        pytest.param(lambda loss: np.round(loss, 1), id="printed with few digits"),
        pytest.param(lambda loss: np.convolve(loss, np.ones(20) / 20, "valid"), id="smoothed before it is logged"),
        pytest.param(lambda loss: np.where(np.arange(STEPS) < AT, loss, loss[AT]), id="exactly repeated: HiddenNan's"),
    ],
)
def test_what_batches_scatter_is_silent(rng, make):
    for _ in range(20):
        values = make(course(rng))

        assert scores_of(SameBatch(), values).max() < 1.0


def test_what_a_share_and_a_count_must_be():
    for wrong in ({"share": 0.0}, {"share": 1.0}, {"lasting": 0}, {"warmup": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SameBatch(**wrong)
