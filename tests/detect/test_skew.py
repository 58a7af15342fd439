"""One rank away from its peers: named when it lasts; ranks that differ by nature, scatter, or are alone are not."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.detect import RankSkew

STEPS = 120


def losses(rng: np.random.Generator, num_ranks: int, noise: float = 0.05) -> np.ndarray:
    fall = 2.0 + 3.0 * np.exp(-np.arange(STEPS) / 40.0)
    return fall[:, None] * np.exp(noise * rng.standard_normal((STEPS, num_ranks)))


def follow(values: np.ndarray, detector: RankSkew | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and `is_sure` of ranks that are all each other's peers, [steps, ranks]."""
    detector = detector or RankSkew()
    state, group = detector.state(values.shape[1]), np.zeros(values.shape[1], dtype=np.int64)
    scores, sure = [], []
    for row in values:
        points = {"value": row}
        found = detector.score(points, group, state)
        scores.append(found.score)
        sure.append(found.evidence["is_sure"])
        detector.learn(points, group, state, found.score >= 1.0)
    return np.array(scores), np.array(sure)


@pytest.mark.parametrize("num_ranks", [3, 4, 8, 33])
@pytest.mark.parametrize("factor", [2.0, 1e6, 0.4, 0.0])
def test_the_rank_that_is_away_is_named_at_its_third_step(rng, num_ranks, factor):
    values = losses(rng, num_ranks)
    values[60:, 1] *= factor

    scores, sure = follow(values)

    assert np.flatnonzero(scores[:, 1] >= 1.0)[0] == 62 and (scores[62:75, 1] >= 1.0).all() and sure[62:, 1].all()
    assert (np.delete(scores, 1, axis=1) < 1.0).all()


def test_a_rank_now_above_and_now_below_its_peers_has_other_batches(rng):
    swings, leans = losses(rng, 4), losses(rng, 4)
    swings[60:, 1] *= np.where(np.arange(STEPS - 60) % 2, 2.0, 0.5)
    leans[60:, 1] *= 2.0

    assert (follow(swings)[0] < 1.0).all()
    assert (follow(leans)[0][:, 1] >= 1.0).any()


@pytest.mark.parametrize("at_once", [True, False])
def test_one_step_alone_is_news_unless_told_otherwise(rng, at_once):
    values = losses(rng, 4)
    values[60, 1] *= 9.0
    detector = RankSkew(at_once=at_once)
    state, group, alone = detector.state(4), np.zeros(4, dtype=np.int64), []
    for row in values:
        found = detector.score({"value": row}, group, state)
        alone.append(found.evidence["alone"])
        detector.learn({"value": row}, group, state, found.score >= 1.0)

    assert np.argwhere(np.array(alone) >= 1.0).tolist() == ([[60, 1]] if at_once else [])


def test_of_two_the_one_that_left_its_own_past_is_named(rng):
    values = losses(rng, 2)
    values[60:, 1] *= 3.0

    scores, sure = follow(values)

    assert (scores[62:70, 1] >= 1.0).all() and sure[62:70, 1].all() and (scores[:, 0] < 1.0).all()


def test_of_two_that_both_moved_nobody_is_sure(rng):
    values = losses(rng, 2)
    values[60:, 1] *= 3.0
    values[60:, 0] /= 3.0

    scores, sure = follow(values)

    assert (scores[62:70] >= 1.0).all() and not sure[62:70].any()


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda v: v.__imul__(np.r_[1.0, 1.6, 1.0, 0.8]), id="data that are harder on one rank"),
        pytest.param(lambda v: v.__setitem__(slice(60, None), v[60:] * 5.0), id="all ranks alike"),
        pytest.param(lambda v: v.__setitem__((slice(60, 62), 1), 50.0), id="two steps"),
        pytest.param(
            lambda v: v.__setitem__(slice(60, None), v[60:] * np.exp(np.random.default_rng(3).standard_normal((60, 4)))),
            id="a bad batch on every rank",
        ),
        pytest.param(lambda v: v.__setitem__((slice(60, None), 1), np.nan), id="NaN is for others to say"),
        pytest.param(lambda v: v.__setitem__(slice(None), v[:, :1]), id="a loss that is averaged before it is logged"),
        pytest.param(lambda v: v.__setitem__(slice(None), 0.0), id="nothing at all"),
    ],
)
def test_what_is_no_skew(rng, spoil):
    values = losses(rng, 4)
    spoil(values)

    scores, _ = follow(values)

    assert (scores < 1.0).all()


def test_a_rank_that_is_far_away_from_the_start_is_told_once_it_is_known(rng):
    values = losses(rng, 4)
    values[:, 2] *= 5.0

    scores, _ = follow(values)

    assert (scores[:20] < 1.0).all() and (scores[23:, 2] >= 1.0).all()


def test_a_difference_that_stays_is_the_ranks_usual_one(rng):
    values = losses(rng, 4, noise=0.02)
    values[60:, 2] *= 1.7

    scores, _ = follow(values, RankSkew(settle_after=20))

    assert (scores[62:79, 2] >= 1.0).all() and (scores[85:] < 1.0).all()


def test_losses_that_are_negative_or_reach_zero_compare_too(rng):
    values = -losses(rng, 4)
    values[60:, 1] *= -1.0

    scores, _ = follow(values)

    assert (scores[62:, 1] >= 1.0).all() and (np.delete(scores, 1, axis=1) < 1.0).all()
