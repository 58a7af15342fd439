import json
import re
from pathlib import Path

import numpy as np
import pytest

from sentinel.detect import AnomalyTurbulence, KurtosisSpike

SAMPLES = Path(__file__).parents[3] / "shared" / "samples" / "msprobe" / "alert_nan_injected"


def feed(detector, values):
    values = np.asarray(values, dtype=np.float64)
    state = detector.state(values.shape[1])
    found, baselines = [], []
    with np.errstate(all="ignore"):
        for point in values:
            scores = detector.score(point, state)
            baselines.append(scores.baseline.copy())
            found.append(scores.score >= 1.0)
            detector.learn(point, state, found[-1])
    return np.array(found), np.array(baselines)


def test_msprobe_formula_against_a_slow_reference(rng):
    values = rng.standard_normal((200, 5)) * np.exp(rng.standard_normal((200, 5)))
    history, expected, means = np.abs(values[0]), [], []
    for at, point in enumerate(values):
        expected.append(np.abs(point) > (1.0 + 0.5) * history)
        means.append(history)
        history = 0.99 * history + (1.0 - 0.99) * np.abs(point) if at else history

    found, baselines = feed(AnomalyTurbulence(compat="msprobe", threshold=0.5), values)

    assert np.array_equal(found, np.array(expected))
    assert baselines == pytest.approx(np.array(means))


def test_msprobe_history_agrees_with_its_own_records():
    """Alarms of one tensor at consecutive steps pin the history: h' = 0.99 h + 0.01 |x|."""
    if not SAMPLES.is_dir():
        pytest.skip(f"needs msProbe's samples at {SAMPLES}")
    record = re.compile(
        r"Rule AnomalyTurbulence .*'(.*)', '(\w+)'\) at step (\d+), current value (\S+), history mean (\S+)\.$"
    )
    alarms = {}
    for one in json.loads((SAMPLES / "anomaly_detected/rank0/anomaly.json").read_text()).values():
        if (found := record.search(one["message"])) is not None:
            tag, statistic, step, value, history = found.groups()
            alarms[tag, statistic, int(step)] = float(value), float(history)
    pairs = [(alarms[t, s, n], alarms[t, s, n + 1]) for t, s, n in alarms if (t, s, n + 1) in alarms]
    pairs = [(now, later) for now, later in pairs if np.isfinite([*now, *later]).all()]

    assert len(pairs) > 50
    for (value, history), (_, next_history) in pairs:
        assert next_history == pytest.approx(0.99 * history + 0.01 * abs(value), rel=1e-9)


@pytest.mark.parametrize(("factor", "fires"), [(1.8, False), (3.0, True), (30.0, True), (1 / 3, True), (0.0, True)])
def test_default_is_two_sided_and_relative(factor, fires, rng):
    values = 4.0 * np.exp(0.03 * rng.standard_normal((100, 3)))
    values[80] *= factor

    found, baselines = feed(AnomalyTurbulence(), values)

    assert found[80].all() == fires
    assert not found[:80].any() and not found[81:].any()
    assert baselines[80] == pytest.approx(4.0, rel=0.1)


def test_a_mean_that_crosses_zero_is_judged_on_a_linear_scale(rng):
    values = 0.01 * rng.standard_normal((300, 4))
    values[250] = 0.5

    found, _ = feed(AnomalyTurbulence().for_statistic("mean"), values)

    assert found[250].all()
    assert found.sum() == 4


def test_an_expert_without_tokens_now_and_then_is_told_at_most_once(rng):
    values = np.exp(0.2 * rng.standard_normal((1000, 50))) * (rng.random((1000, 50)) > 0.1)

    found, _ = feed(AnomalyTurbulence(), values)

    assert (found.sum(axis=0) <= 3).all()


def test_gradients_of_a_zero_initialised_layer_start_quietly(rng):
    values = np.exp(0.1 * rng.standard_normal((200, 3)))
    values[:40] = 0.0

    found, _ = feed(AnomalyTurbulence(), values)

    assert not found.any()


def test_kurtosis_spikes_up_only_and_above_its_minimum(rng):
    values = 3.0 + 0.2 * np.abs(rng.standard_normal((200, 3)))
    values[100] = [15.0, 900.0, 1.1]

    found, _ = feed(KurtosisSpike(), values)

    assert found[100].tolist() == [False, True, False]
    assert found.sum() == 1


def test_zeros_that_settle_leave_the_level_what_it_was(rng):
    values = np.exp(0.1 * rng.standard_normal((300, 3)))
    values[100:150] = 0.0
    values[200, 1] = 30.0

    found, baselines = feed(AnomalyTurbulence(), values)

    assert found[100].all() and not found[120:150].any(), "told, then settled"
    assert not found[150:200].any(), "what comes back is no explosion above zero"
    assert (baselines[150:] > 0.5).all()
    assert np.argwhere(found[150:]).tolist() == [[50, 1]]
