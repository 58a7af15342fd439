"""Excursions that recur are no news, nor what one batch may do to a young or a scattered loss; what stands out still is."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Pack
from sentinel.rules.watches.recurring import OFTEN, RECALL_STEPS, Recurring


def reported_of(paper_run, losses, names=("loss",)):
    """The steps and severities of what is told of losses [steps] or [steps, names]."""
    run = paper_run([("layers.0", "param")])
    engine, found = Engine(Pack(rules=(load_pack().rule("loss-spike"),))), []
    for step, values in enumerate(np.reshape(losses, (len(losses), -1)).tolist()):
        found += engine.judge(run.view(step, scalars=dict(zip(names, values, strict=True))))
    return [(a.step, a.severity) for a in found if a.event == "onset" and a.severity is not Severity.INFO]


def test_an_excursion_is_known_after_as_many_of_its_height_lately():
    known, step, heights = Recurring(), 0, []
    for _ in range(OFTEN + 5):
        step += 5
        heights.append(known.is_known(0, step, 2.0, 1))
        known.see(0, step, 2.0)

    assert heights == [False] * OFTEN + [True] * 5
    assert not known.is_known(0, step + 5, 20.0, 1)
    assert not known.is_known(1, step + 5, 2.0, 1)
    assert not known.is_known(0, step + 5 + RECALL_STEPS, 2.0, 1)


@pytest.mark.parametrize("seed", range(4))
def test_tasks_that_alternate_wake_nobody(paper_run, seed):
    rng = np.random.default_rng(seed)
    t = np.arange(600)
    easy = 0.05 + 2.3 * np.exp(-t / 40.0)
    losses = np.where(t % 5 == 4, 2.5, easy) * np.exp(0.08 * rng.standard_normal(600))

    assert reported_of(paper_run, losses) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_classifier_with_rare_mistakes_is_told_of_at_most_once(paper_run, seed):
    rng = np.random.default_rng(seed)
    t = np.arange(1200)
    wrong = rng.binomial(32, 0.01, 1200) * (0.2 + 0.05 * rng.standard_normal(1200)).clip(0.1)
    losses = (0.01 + 2.3 * np.exp(-t / 30.0)) * np.exp(0.2 * rng.standard_normal(1200)) + wrong

    assert len(reported_of(paper_run, losses)) <= 1


def test_a_loss_that_is_mostly_zero_wakes_nobody_by_one_batch(paper_run, rng):
    t = np.arange(900)
    share = np.exp(-t / 150.0)
    losses = np.where(rng.random(900) < share, rng.exponential(0.1, 900) * (0.2 + share), 0.0)
    losses[:40] += 0.3

    assert reported_of(paper_run, losses) == []


@pytest.mark.parametrize("step", [120, 500])
def test_one_batch_that_stands_far_out_is_told_young_or_old(paper_run, rng, step):
    losses = (2.0 + 6.0 * np.exp(-np.arange(700) / 40.0)) * np.exp(0.02 * rng.standard_normal(700))
    losses[step] *= 4.0

    assert reported_of(paper_run, losses) == [(step, Severity.CRITICAL)]


def test_a_mature_loss_of_little_noise_is_told_by_one_batch(paper_run, rng):
    losses = (2.0 + 6.0 * np.exp(-np.arange(700) / 40.0)) * np.exp(0.02 * rng.standard_normal(700))
    losses[500] *= 1.25

    assert reported_of(paper_run, losses) == [(500, Severity.WARNING)]


def test_a_young_loss_that_stays_high_is_told(paper_run, rng):
    losses = (0.05 + 2.3 * np.exp(-np.arange(200) / 20.0)) * np.exp(0.1 * rng.standard_normal(200))
    losses[110:] *= 8.0

    reported = reported_of(paper_run, losses)

    assert reported
    assert reported[0][0] <= 113
    assert reported[-1][1] is Severity.CRITICAL


def test_recurring_excursions_hide_neither_one_far_above_them_nor_a_jump_as_high(paper_run, rng):
    t = np.arange(900)
    losses = (2.0 + 6.0 * np.exp(-t / 40.0)) * np.exp(0.02 * rng.standard_normal(900))
    losses[(t >= 300) & (t % 12 == 0)] *= 1.6
    losses[500] *= 12.0
    losses[700:] *= 1.6

    steps = [step for step, _ in reported_of(paper_run, losses)]

    assert steps[0] == 300
    assert 500 in steps
    assert [step for step in steps if 340 < step < 500 or 500 < step < 700] == []
    assert any(700 <= step <= 712 for step in steps)


def test_a_side_of_a_game_that_rises_as_the_other_falls_wakes_nobody(paper_run, rng):
    one, other = (1.0 * np.exp(0.03 * rng.standard_normal(300)) for _ in range(2))
    one[200:206], other[200:206] = one[200:206] * 1.6, other[200:206] * 0.7

    assert reported_of(paper_run, np.stack([one, other], 1), ("G/loss", "D/loss")) == []
    assert reported_of(paper_run, one)
    assert reported_of(paper_run, np.stack([one, other], 1), ("lm_loss", "aux_loss"))


def test_what_recurred_is_kept_in_a_snapshot():
    known = Recurring()
    for step in (10, 20, 30):
        known.see(3, step, 1.0)
    again = Recurring()
    again.take_dict(known.to_dict())

    assert again.is_known(3, 40, 1.0, 1)
    assert again.lasting_steps(3, 40, 1, 3) == known.lasting_steps(3, 40, 1, 3) > 3
