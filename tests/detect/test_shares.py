"""Saturation, precision, attention, updates and experts: their faults, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.detect import (
    AttentionCollapse,
    DeadExpert,
    DominantExpert,
    ExpertImbalance,
    KurtosisSpike,
    PrecisionLoss,
    Saturation,
    Threshold,
    UpdateRatio,
)
from sentinel.errors import ConfigError

NUM_STEPS = 500
STEP = np.arange(NUM_STEPS)


def ramp(begin: int, end: int) -> np.ndarray:
    """0 before `begin`, 1 from `end` on, straight between them."""
    return np.clip((STEP - begin) / (end - begin), 0.0, 1.0)


@pytest.fixture
def share(rng):
    """Shares around 0.4, as of a ReLU, of six series."""
    return np.clip(0.4 + 0.03 * rng.standard_normal((NUM_STEPS, 6)), 0.0, 1.0)


@pytest.fixture
def positive(rng):
    return np.exp(0.1 * rng.standard_normal((NUM_STEPS, 6)))


# -- saturation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [1, 100])
def test_units_that_saturate_or_die_are_told(share, follow, over):
    share[:, 2] += (0.97 - 0.4) * ramp(250, 250 + over)
    share = np.clip(share, 0.0, 1.0)

    scores = follow(Saturation(), share)

    assert (scores[250 : 252 + over, 2] >= 1.0).any()
    assert (scores[:250] < 1.0).all() and (np.delete(scores, 2, axis=1) < 1.0).all()


def test_sparsity_that_a_layer_grows_into_is_followed(share, follow):
    share[:, 2] = 0.5 + 0.4 * ramp(0, 500) + 0.01 * np.sin(STEP)

    assert (follow(Saturation(), share) < 1.0).all()


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_what_is_all_alive_or_all_flat_from_the_start_is_its_nature(share, follow, level):
    share[:, 2] = level

    assert (follow(Saturation(), share) < 1.0).all()


def test_the_baseline_is_a_share_and_what_grew_is_above_it(share):
    detector = Saturation()
    state = detector.state(6)
    for point in share[:250]:
        detector.learn(point, state, np.zeros(6, dtype=bool))

    found = detector.score(np.full(6, 0.99), state)

    assert found.baseline == pytest.approx(0.4, abs=0.05) and (found.evidence["direction"] == 1).all()


# -- limits -----------------------------------------------------------------------------------------------------------


def test_one_element_that_overflows_is_told_at_once(follow):
    values = np.zeros((50, 3))
    values[30:, 1] = 1e-9

    scores = follow(PrecisionLoss(), values)

    assert (scores[30:, 1] >= 1.0).all() and scores[:30].max() == 0.0 and scores[:, [0, 2]].max() == 0.0


def test_underflow_has_a_limit_and_must_last(follow):
    values = np.full((50, 3), 0.2)
    values[20:22, 0] = values[20:, 1] = 0.9

    scores = follow(PrecisionLoss(limit=0.5, lasting=3), values)

    assert (scores[:, 0] < 1.0).all() and (scores[22:, 1] >= 1.0).all() and (scores[:22, 1] < 1.0).all()


@pytest.mark.parametrize(
    ("args", "value", "is_reported"),
    [
        ({"above": 5.0}, 5.1, True),
        ({"above": 5.0}, 5.0, False),
        ({"below": 0.5}, 0.4, True),
        ({"below": 0.5, "above": 2.0}, 1.0, False),
        ({"below": 0.5, "above": 2.0}, -3.0, True),
        ({"above": 5.0, "lasting": 12}, 9.0, False),
        ({"above": 5.0, "lasting": 10}, 9.0, True),
        ({"above": 5.0, "after": 11}, 9.0, False),
        ({"above": 5.0}, np.nan, False),
    ],
)
def test_a_threshold_is_what_its_user_says(follow, args, value, is_reported):
    values = np.ones((20, 1))
    values[10:] = value

    assert bool(follow(Threshold(**args), values)[-1, 0] >= 1.0) is is_reported


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [1, 150])
def test_entropy_that_collapses_and_logits_that_grow_are_told(positive, follow, over):
    entropy, logit = 3.0 * positive, 8.0 * positive
    entropy[:, 2] *= 0.05 ** ramp(250, 250 + over)
    logit[:, 2] *= 30.0 ** ramp(250, 250 + over)
    detector = AttentionCollapse()

    fallen = follow(detector.for_statistic("mean"), entropy)
    grown = follow(detector.for_statistic("max"), logit)

    for scores in (fallen, grown):
        assert (scores[250 : 252 + over, 2] >= 1.0).any()
        assert (scores[:250] < 1.0).all() and (np.delete(scores, 2, axis=1) < 1.0).all()


def test_heads_that_specialise_are_followed(positive, follow):
    entropy = 4.0 * positive * (0.35 + 0.65 * np.exp(-STEP / 120.0))[:, None]
    logit = positive * (0.3 + 18.0 * ramp(0, 400))[:, None]

    assert (follow(AttentionCollapse().for_statistic("mean"), entropy) < 1.0).all()
    assert (follow(AttentionCollapse().for_statistic("max"), logit) < 1.0).all()


# -- updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-4, 1e3, 0.0])
def test_one_update_too_small_or_too_large_is_told(positive, follow, factor):
    ratio = 1e-3 * positive * (0.5 + 0.5 * np.cos(np.pi * STEP / 700))[:, None]
    ratio[250:, 2] *= factor

    scores = follow(UpdateRatio(), ratio)

    assert (scores[250:290, 2] >= 1.0).all()
    assert (scores[:250] < 1.0).all() and (np.delete(scores, 2, axis=1) < 1.0).all()


def test_a_rate_far_too_high_for_all_is_told_too(positive, follow):
    ratio = 1e-3 * positive
    ratio[250:260] *= 1000.0

    scores = follow(UpdateRatio(), ratio)

    assert (scores[252:260] >= 1.0).all() and (scores[:252] < 1.0).all()


def test_a_rate_of_nothing_is_no_fault(positive, follow):
    ratio = 1e-3 * positive
    ratio[200:203] = ratio[-40:] = 0.0

    assert (follow(UpdateRatio(), ratio) < 1.0).all()


# -- experts ----------------------------------------------------------------------------------------------------------


def test_a_router_that_collapses_is_told(positive, follow):
    balance = 0.08 * positive
    balance[:, 2] += 2.0 * ramp(250, 300)

    scores = follow(ExpertImbalance(), balance)

    assert (scores[250:300, 2] >= 1.0).any()
    assert (scores[:250] < 1.0).all() and (np.delete(scores, 2, axis=1) < 1.0).all()


def test_imbalance_that_the_aux_loss_brings_down_is_no_fault(positive, follow):
    balance = positive * (0.1 + 1.5 * np.exp(-STEP / 60.0))[:, None]

    assert (follow(ExpertImbalance(), balance) < 1.0).all()


def test_one_expert_of_many_without_tokens_is_told_when_it_lasts(follow):
    inactive = np.zeros((NUM_STEPS, 3))
    inactive[250:, 1] = 1 / 64
    inactive[100:104, 2] = inactive[300:315, 2] = 1 / 64

    scores = follow(DeadExpert(), inactive)

    assert np.flatnonzero(scores[:, 1] >= 1.0)[0] == 269
    assert (scores[:, [0, 2]] < 1.0).all()


def test_many_experts_at_once_are_told_at_once(rng, follow):
    inactive = np.clip(rng.binomial(128, 0.1, (NUM_STEPS, 3)) / 128, 0, 1)
    inactive[250:, 1] = 0.6

    scores = follow(DeadExpert(), inactive)

    assert (scores[250:260, 1] >= 1.0).all()
    assert (scores[:250] < 1.0).all() and (scores[:, [0, 2]] < 1.0).all()


def test_what_a_young_router_did_and_came_back_from_is_no_news_soon_after_and_a_collapse_is(follow):
    """Eight experts: four are idle in steps 9 and 10, five in 17, four again from 22 on; from 300 on six are, for good."""
    num_idle = [0, 0, 0, 0, 1, 3, 3, 3, 3, 4, 4, 3, 3, 2, 2, 3, 2, 5, 5, 2, 3, 3, 4, 4, 4, 4, 2, 3, 4, 3, 3, 4, 4, 2]
    young = np.array(num_idle) / 8
    inactive = np.full((NUM_STEPS, 2), 0.125)
    inactive[: len(young)] = young[:, None]
    inactive[300:, 1] = 0.75

    scores = follow(DeadExpert(), inactive)

    assert np.flatnonzero(scores[:, 0] >= 1.0).tolist() == [9, 10]
    assert scores[300, 1] >= 1.0 and (scores[11:300, 1] < 1.0).all()


def test_a_young_router_that_began_with_idle_experts_is_still_told_when_it_collapses(follow):
    inactive = np.zeros((NUM_STEPS, 1))
    inactive[:3], inactive[12:] = 0.5, 0.75

    assert (follow(DeadExpert(), inactive)[12:16] >= 1.0).all()


@pytest.mark.parametrize("begin", [8, 9, 40])
def test_one_expert_that_gets_every_token_for_two_hundred_steps_is_told_in_a_young_run_too(rng, follow, begin):
    load = np.clip(0.5 + 0.1 * rng.standard_normal((NUM_STEPS, 3)), 0.2, 0.9)
    load[begin:, 1] = rng.uniform(0.985, 1.0, NUM_STEPS - begin)
    load[begin : begin + 90, 2] = 1.0

    scores = follow(DominantExpert(), load)

    assert np.flatnonzero(scores[:, 1] >= 1.0)[0] == begin + 199
    assert (scores[:, [0, 2]] < 1.0).all()


def test_a_router_that_prefers_one_expert_and_one_that_begins_with_it_are_no_collapse(rng, follow):
    load = np.ones((NUM_STEPS, 3))
    load[:, 1] = np.minimum(rng.uniform(0.8, 1.0, NUM_STEPS), 0.97)
    load[5:, 2] = np.maximum(1.0 - 0.02 * STEP[:-5], 0.3)

    assert (follow(DominantExpert(), load) < 1.0).all()


def test_experts_that_wake_up_in_the_first_steps_are_no_fault(follow):
    inactive = (0.7 * np.exp(-STEP / 10.0))[:, None] * (STEP < 60)[:, None]

    assert (follow(DeadExpert(), inactive) < 1.0).all()


# -- channels ---------------------------------------------------------------------------------------------------------


def test_a_channel_that_grows_at_once_is_told_and_features_that_emerge_are_not(positive, follow):
    kurtosis = 4.0 * positive * np.exp(3.0 * ramp(50, 450))[:, None]
    spike = kurtosis.copy()
    spike[250:253, 2] *= 12.0

    assert (follow(KurtosisSpike(), kurtosis) < 1.0).all()
    assert (follow(KurtosisSpike(), spike)[250:253, 2] >= 1.0).all()


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Threshold(), "above or below is needed"),
        (lambda: Threshold(above=1.0, below=2.0), "above must not be less"),
        (lambda: Threshold(above=1.0, lasting=0), "lasting"),
        (lambda: PrecisionLoss(limit=-0.1), "limit"),
        (lambda: UpdateRatio(limit=0.0), "limit"),
        (lambda: Saturation(k=0.0), "k must be above 0"),
        (lambda: AttentionCollapse(memory=0.0), "memory"),
        (lambda: ExpertImbalance(warmup=1), "warmup"),
        (lambda: DominantExpert(limit=1.0), "limit"),
        (lambda: DeadExpert(share=1.5), "share"),
        (lambda: DeadExpert(lasting=0), "lasting"),
    ],
)
def test_nonsense_is_refused(build, says):
    with pytest.raises(ConfigError, match=says):
        build()
