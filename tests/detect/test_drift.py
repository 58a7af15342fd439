from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sentinel.detect import Drift, Plateau, drift

from ..support.series import autoregressive


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


CASES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {}
"""What `Drift()` is shown side by side, a series each column: a row takes it no longer for a hundred series than for one."""


def shown(make):
    """Have what a function makes, [points, series], be judged beside all others."""
    CASES[make.__name__] = make
    return make


@pytest.fixture(scope="module")
def judged() -> Callable[..., tuple[np.ndarray, ...]]:
    """Return a function: a maker -> what it made, and its flags and settled, all [points, series]."""
    made = {name: make(np.random.default_rng(11)) for name, make in CASES.items()}
    longest = max(map(len, made.values()))
    # What has ended is NaN, which no series takes in.
    ended = [np.pad(one, ((0, longest - len(one)), (0, 0)), constant_values=np.nan) for one in made.values()]
    both = judge(Drift(), np.concatenate(ended, axis=1))
    borders = np.cumsum([0, *(one.shape[1] for one in ended)])
    at = {name: slice(borders[num], borders[num + 1]) for num, name in enumerate(made)}

    def found(make) -> tuple[np.ndarray, ...]:
        one = made[make.__name__]
        return one, *(each[: len(one), at[make.__name__]] for each in both)

    return found


def decaying(rng, points=3000, noise=0.02, series=4):
    at = np.arange(points)[:, None]
    return (2.0 + 8.0 * (1.0 + at / 20.0) ** -0.7) * np.exp(noise * rng.standard_normal((points, series)))


def slowly_diverging(rng):
    smooth = decaying(rng, points=2200, noise=0.0, series=9)
    return smooth * np.exp(np.tile([3e-4, 1e-3, 3e-3], 3) * np.maximum(np.arange(2200) - 1500, 0)[:, None])


@shown
def slow_divergences(rng):
    smooth = slowly_diverging(rng)
    return smooth * np.exp(np.repeat([0.001, 0.02, 0.05], 3) * rng.standard_normal(smooth.shape))


@pytest.mark.slow
def test_a_slow_divergence_is_called_before_it_is_15_percent_above_its_best(judged, rng):
    smooth = slowly_diverging(rng)
    _, flagged, _ = judged(slow_divergences)

    assert not flagged[:1500].any()
    for column in range(9):
        called = int(np.flatnonzero(flagged[:, column])[0])
        assert smooth[called, column] / smooth[:called, column].min() < 1.15


@shown
def spikes_and_a_small_step_up(rng):
    """And by a third in the end."""
    loss = decaying(rng)
    loss[700] *= 5.0
    loss[1200:1206] *= 1.8
    loss[2000:] *= 1.02
    return np.concatenate([loss, 1.3 * loss[-300:]])


@pytest.mark.slow
def test_a_decay_spikes_and_a_small_step_up_are_no_drift(judged):
    _, flagged, _ = judged(spikes_and_a_small_step_up)

    assert not flagged[:3000].any() and flagged[:3000].size == 12_000
    assert flagged[3000:].any(axis=0).all()


@shown
def new_levels(rng):
    """Four that stay, and four that climb on."""
    level, climb = decaying(rng), decaying(rng)
    level[1500:] *= 1.3
    climb[1500:] *= np.exp(2e-3 * np.arange(1500))[:, None]
    return np.concatenate([level, climb], axis=1)


@pytest.mark.slow
def test_a_new_level_settles_and_one_that_climbs_on_does_not(judged):
    _, all_flagged, all_settled = judged(new_levels)
    flagged, settled = all_flagged[:, :4], all_settled[:, :4]
    still, never = all_flagged[:, 4:], all_settled[:, 4:]

    assert (settled.sum(axis=0) == 1).all()
    assert flagged[1500:2200].any(axis=0).all() and not flagged[2400:].any()
    assert still[-1].all() and not never.any()


@shown
def down_and_up(rng):
    norm = np.exp(0.05 * rng.standard_normal((2500, 2)))
    norm[1500:, 0] *= np.exp(-1e-3 * np.arange(1000))
    norm[1500:, 1] *= np.exp(1e-3 * np.arange(1000))
    return norm


@pytest.mark.slow
def test_both_sides(judged):
    norm, up, _ = judged(down_and_up)
    both, _ = judge(Drift(sides="both"), norm)

    assert not both[:1500].any()
    assert both[1500:].any(axis=0).tolist() == [True, True]
    assert up.any(axis=0).tolist() == [False, True]


@shown
def resumed_from_an_old_checkpoint(rng):
    loss = decaying(rng)
    return np.concatenate([loss[:1500], loss[150:600]])


@pytest.mark.slow
def test_what_began_anew_is_measured_anew(judged):
    resumed, kept, _ = judged(resumed_from_an_old_checkpoint)
    detector = Drift()
    state, flagged = detector.state(4), []
    for row, point in enumerate(resumed):
        if row == 1500:
            detector.rearm(state)
        bad = detector.score(point, state).score >= 1.0
        detector.learn(point, state, bad)
        flagged.append(bad)

    assert kept[1500:].any(axis=0).all(), "the case is one"
    assert not np.array(flagged).any()


@pytest.mark.slow
def test_a_plateau_is_half_of_a_life_without_improvement(rng):
    loss = decaying(rng, 3000)
    loss[1000:, :2] = 3.0 * np.exp(0.02 * rng.standard_normal((2000, 2)))
    loss[:, 2:] *= ((np.arange(3000) + 1.0) ** -0.05)[:, None]

    said, _ = judge(Plateau(patience=600), loss)

    first = said.argmax(axis=0)
    assert said.any(axis=0).tolist() == [True, True, False, False] and said[:, 2:].size == 6000
    assert (first[:2] > 1500).all() and (first[:2] < 2600).all()


@shown
def below_zero(rng):
    loss = -5.0 + 0.02 * rng.standard_normal((2000, 1))
    loss[1500:] += 0.002 * np.arange(500)[:, None]
    return loss


@pytest.mark.slow
def test_a_loss_below_zero_or_near_it_drifts_too(judged):
    _, flagged, _ = judged(below_zero)

    assert not flagged[:1500].any() and flagged[1500:].any()


def reported(flagged):
    """Return how often a flag comes up after 256 points without one."""
    rows = np.flatnonzero(flagged)
    return len(rows[:1]) + int((np.diff(rows) > 256).sum())


def what_long_runs_do(rng, n):
    """Ordinary wander, epochs, waves."""
    t, noise = np.arange(n), 0.02 * rng.standard_normal((n, 7))
    level = 2.5 * (1.0 + t / 300.0) ** -0.1
    z = np.stack(
        [
            0.03 * autoregressive(rng, n, 0.999), 0.06 * autoregressive(rng, n, 0.999),
            0.05 * autoregressive(rng, n, 0.9999),
            -0.08 * (t % 3000) / 3000, -0.04 * (t % 700) / 700, 0.05 * np.sin(t / 900.0), np.zeros(n),
        ],
        axis=1,
    )  # fmt: skip
    return level[:, None] * np.exp(z + noise)


@shown
def a_long_run(rng):
    return what_long_runs_do(rng, 8000)


@pytest.mark.slow
@pytest.mark.parametrize("n", [8_000, pytest.param(56_000, marks=pytest.mark.long)])
def test_what_a_long_run_has_always_done_is_no_drift(n, judged, rng, monkeypatch):
    """Told once at most."""
    loss, flagged, _ = judged(a_long_run)
    if n > len(loss):
        loss = what_long_runs_do(rng, n)
        flagged, _ = judge(Drift(), loss)
    monkeypatch.setattr(drift, "REPORTED", 0.0)
    unmeasured, _ = judge(Drift(slack_wander=0.0, slack_walk=0.0), loss[:6000, 1:2])

    assert max(reported(flagged[:, at]) for at in range(7)) <= 1
    assert not flagged[:, 6].any()
    assert reported(unmeasured[:, 0]) > 3, "the case is one"


def slow_rises(rng, longest):
    n, begins, rows, wander = longest + 6000, 3000, np.array([1000, 3000, longest] * 2), [0.0] * 3 + [0.015] * 3
    t = np.arange(n)[:, None]
    z = np.stack([one * autoregressive(rng, n, 0.995) for one in wander], axis=1) + 0.02 * rng.standard_normal(
        (n, len(rows))
    )
    return 2.5 * (1.0 + t / 300.0) ** -0.1 * np.exp(z) * 3.0 ** np.clip((t - begins) / rows, 0.0, 1.0)


@shown
def some_slow_rises(rng):
    return slow_rises(rng, 3000)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [3000, pytest.param(10_000, marks=pytest.mark.long)])
def test_one_slow_rise_is_one_message(longest, judged, rng):
    """However long it climbs, on points that scatter and a level that wanders; where it stays, it settles once."""
    begins, rows, t = 3000, np.array([1000, 3000, longest] * 2), np.arange(longest + 6000)[:, None]
    _, flagged, settled = judged(some_slow_rises)
    if longest > 3000:
        flagged, settled = judge(Drift(), slow_rises(rng, longest))

    assert not flagged[:begins].any()
    assert [reported(flagged[:, at]) for at in range(len(rows))] == [1] * len(rows)
    assert settled[:, 0].sum() <= 1 and settled[:, 3].sum() <= 1 and not (settled & (t < begins + rows)).any()


@shown
def wandering_and_rising(rng):
    """Six old runs that wander, and the same with a rise."""
    n, begins = 12_500, 10_000
    wander = np.stack([0.03 * autoregressive(rng, n, 0.999) for _ in range(6)], axis=1)
    loss = 2.5 * np.exp(wander + 0.02 * rng.standard_normal((n, 6)))
    climbs = loss * 1.35 ** np.clip((np.arange(n) - begins) / 2000.0, 0.0, 1.0)[:, None]
    return np.concatenate([loss, climbs], axis=1)


@pytest.mark.slow
def test_a_rise_above_all_that_an_old_run_has_wandered_is_called(judged):
    """By chance a level might be led anywhere; how high it was in eight thousand rows says how far it is."""
    begins = 10_000
    _, both, _ = judged(wandering_and_rising)
    healthy, flagged = both[:, :6], both[:, 6:]

    assert flagged[begins:].any(axis=0).sum() >= 5
    assert not healthy[begins:].any()


@shown
def wandering_and_diverging(rng):
    n = 9000
    wander = np.stack([0.02 * autoregressive(rng, n, 0.999) for _ in range(4)], axis=1)
    loss = 2.5 * np.exp(wander + 0.02 * rng.standard_normal((n, 4)))
    loss[6000:] *= np.exp(5e-4 * np.arange(n - 6000))[:, None]
    return loss


@pytest.mark.slow
def test_a_run_that_wanders_is_still_told_of_a_divergence(judged):
    _, flagged, _ = judged(wandering_and_diverging)

    assert flagged[6000:7000].any(axis=0).all()


@shown
def mature_and_rising(rng):
    t = np.arange(10_500)[:, None]
    loss = 2.5 * (1.0 + t / 300.0) ** -0.1 * np.exp(np.array([0.002, 0.01, 0.02, 0.03]) * rng.standard_normal((len(t), 4)))
    return loss * 1.3 ** np.clip((t - 10_000) / 2000.0, 0.0, 1.0)


@pytest.mark.slow
def test_a_rise_by_a_third_over_two_thousand_rows_of_a_mature_run_is_called_in_its_first_quarter(judged):
    _, flagged, _ = judged(mature_and_rising)

    assert not flagged[:10_000].any()
    assert flagged[10_000:10_500].any(axis=0).all()


@shown
def walks(rng):
    n = 9000
    wander = np.stack([0.03 * autoregressive(rng, n, 0.999) for _ in range(24)], axis=1)
    return 2.5 * np.exp(wander + 0.02 * rng.standard_normal((n, 24)))


@pytest.mark.slow
def test_what_a_level_walks_by_chance_is_no_drift(judged):
    """How far a level is from its best after a thousand rows is known from how it turned down before, not from any rise."""
    loss, walked, _ = judged(walks)
    unwalked, _ = judge(Drift(slack_walk=0.0), loss)

    # Nearly all that is left is of the first two thousand rows, of which little is known.
    assert unwalked[2000:].any(axis=0).sum() > 8
    assert (walked[2000:].any(axis=0) & ~walked[:2000].any(axis=0)).sum() <= 3
    assert walked.any(axis=0).sum() <= 0.6 * unwalked.any(axis=0).sum()


@shown
def falling_fast(rng):
    """Two that fall, the same with a climb at 600, and with one at 3000."""
    t = np.arange(4000)[:, None]
    loss = np.concatenate([(1.0 + t / 30.0) ** -1.2, 1.0 + 10.0 * np.exp(-t / 400.0)], axis=1)
    loss *= np.exp(1e-4 * rng.standard_normal(loss.shape))
    climbs = [loss * 2.4 ** np.clip((t - begins) / 60.0, 0.0, 1.0) for begins in (600, 3000)]
    return np.concatenate([loss, *climbs], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("begins", [600, 3000])
def test_a_climb_on_a_loss_that_falls_fast_is_called_half_way(begins, judged):
    """A full batch: what the level lags behind a steep fall is no noise."""
    _, found, _ = judged(falling_fast)
    quiet, flagged = found[:, :2], found[:, 2:4] if begins == 600 else found[:, 4:]

    assert not quiet.any() and not flagged[:begins].any()
    assert flagged[begins : begins + 30].any(axis=0).all()
