from __future__ import annotations

import numpy as np

from sentinel.detect import Drift, Plateau


def judge(detector, values):
    """Feed [points, series]; return flags and settled of that shape."""
    state = detector.state(values.shape[1])
    flagged, settled = np.zeros(values.shape, dtype=bool), np.zeros(values.shape, dtype=bool)
    for row, point in enumerate(values):
        found = detector.score(point, state)
        flagged[row] = found.score >= 1.0
        assert (found.evidence["corroborated"] == flagged[row]).all()
        detector.learn(point, state, flagged[row])
        if "settled" in state:
            settled[row] = state["settled"]
    return flagged, settled


def decaying(rng, points=3000, noise=0.02, series=4):
    at = np.arange(points)[:, None]
    return (2.0 + 8.0 * (1.0 + at / 20.0) ** -0.7) * np.exp(noise * rng.standard_normal((points, series)))


def test_a_slow_divergence_is_called_before_it_is_15_percent_above_its_best(rng):
    noise, rate = np.repeat([0.001, 0.02, 0.05], 3), np.tile([3e-4, 1e-3, 3e-3], 3)
    smooth = decaying(rng, points=2200, noise=0.0, series=9)
    smooth *= np.exp(rate * np.maximum(np.arange(2200) - 1500, 0)[:, None])

    flagged, _ = judge(Drift(), smooth * np.exp(noise * rng.standard_normal(smooth.shape)))

    assert not flagged[:1500].any()
    for column in range(9):
        called = int(np.flatnonzero(flagged[:, column])[0])
        assert smooth[called, column] / smooth[:called, column].min() < 1.15


def test_a_decay_spikes_and_a_small_step_up_are_no_drift(rng):
    loss = decaying(rng)
    loss[700] *= 5.0
    loss[1200:1206] *= 1.8
    loss[2000:] *= 1.02

    flagged, _ = judge(Drift(), loss)
    doubled, _ = judge(Drift(), np.concatenate([loss, 1.3 * loss[-300:]]))

    assert not flagged.any() and flagged.size == 12_000
    assert doubled[3000:].any(axis=0).all()


def test_a_new_level_settles_and_one_that_climbs_on_does_not(rng):
    level, climb = decaying(rng), decaying(rng)
    level[1500:] *= 1.3
    climb[1500:] *= np.exp(2e-3 * np.arange(1500))[:, None]

    flagged, settled = judge(Drift(), level)
    still, never = judge(Drift(), climb)

    assert (settled.sum(axis=0) == 1).all()
    assert flagged[1500:2200].any(axis=0).all() and not flagged[2400:].any()
    assert still[-1].all() and not never.any()


def test_both_sides(rng):
    norm = np.exp(0.05 * rng.standard_normal((2500, 2)))
    norm[1500:, 0] *= np.exp(-1e-3 * np.arange(1000))
    norm[1500:, 1] *= np.exp(1e-3 * np.arange(1000))

    both, _ = judge(Drift(sides="both"), norm)
    up, _ = judge(Drift(), norm)

    assert not both[:1500].any()
    assert both[1500:].any(axis=0).tolist() == [True, True]
    assert up.any(axis=0).tolist() == [False, True]


def test_what_began_anew_is_measured_anew(rng):
    loss = decaying(rng)
    resumed = np.concatenate([loss[:1500], loss[150:600]])
    detector = Drift()
    state, flagged = detector.state(4), []
    for row, point in enumerate(resumed):
        if row == 1500:
            detector.rearm(state)
        bad = detector.score(point, state).score >= 1.0
        detector.learn(point, state, bad)
        flagged.append(bad)
    kept, _ = judge(Drift(), resumed)

    assert kept[1500:].any(axis=0).all(), "the case is one"
    assert not np.array(flagged).any()


def test_a_plateau_is_half_of_a_life_without_improvement(rng):
    loss = decaying(rng, 3000)
    loss[1000:, :2] = 3.0 * np.exp(0.02 * rng.standard_normal((2000, 2)))
    loss[:, 2:] *= ((np.arange(3000) + 1.0) ** -0.05)[:, None]

    said, _ = judge(Plateau(patience=600), loss)

    first = said.argmax(axis=0)
    assert said.any(axis=0).tolist() == [True, True, False, False] and said[:, 2:].size == 6000
    assert (first[:2] > 1500).all() and (first[:2] < 2600).all()


def test_a_loss_below_zero_or_near_it_drifts_too(rng):
    loss = -5.0 + 0.02 * rng.standard_normal((2000, 1))
    loss[1500:] += 0.002 * np.arange(500)[:, None]

    flagged, _ = judge(Drift(), loss)

    assert not flagged[:1500].any() and flagged[1500:].any()
