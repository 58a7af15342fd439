import importlib.util
from pathlib import Path

import numpy as np
import pytest

from sentinel.detect import GradNormSpike, LossSpike

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "detection.py"
LOGS = Path(__file__).parents[3] / "shared" / "trainlogs"


def feed(detector, values):
    state = detector.state(1)
    found = []
    for value in values:
        point = np.array([value], dtype=np.float64)
        score = detector.score(point, state).score
        detector.learn(point, state, score >= 1.0)
        found.append(bool(score[0] >= 1.0))
    return np.array(found)


def test_a_spike_of_a_decaying_loss_is_seen(rng):
    loss = (2.0 + 8.0 * np.exp(-np.arange(500) / 60.0)) * (1.0 + 0.01 * rng.standard_normal(500))
    loss[400] *= 1.5

    assert np.flatnonzero(feed(LossSpike(), loss)).tolist() == [400]


@pytest.mark.parametrize("offset", [-5.0, -0.1, 0.0])
def test_losses_below_zero_do_no_harm(offset, rng):
    loss = offset + 0.05 * rng.standard_normal(400)
    loss[300] += 4.0 + abs(offset)

    found = feed(LossSpike(), loss)

    assert np.flatnonzero(found).tolist() == [300]


def test_a_loss_that_ran_into_the_ground_may_double(rng):
    loss = 3.0 * np.exp(-np.arange(600) / 40.0) + 1e-4 * rng.random(600)

    assert not feed(LossSpike(), loss).any()


def test_a_divergence_is_no_new_level(rng):
    loss = 2.0 * (1.0 + 0.01 * rng.standard_normal(300))
    loss[150:] *= np.exp(np.arange(150) / 10.0)
    detector, settled = LossSpike(), 0
    state = detector.state(1)
    for value in loss:
        point = np.array([value])
        bad = detector.score(point, state).score >= 1.0
        detector.learn(point, state, bad)
        settled += int(state["settled"][0])

    assert bad[0]
    assert settled == 0


def test_one_certain_point_needs_no_company(rng):
    detector = LossSpike()
    state = detector.state(2)
    for value in 2.0 * (1.0 + 0.01 * rng.standard_normal(100)):
        point = np.array([value, value])
        detector.learn(point, state, np.zeros(2, dtype=bool))

    scores = detector.score(np.array([2.25, 9.0]), state)

    assert (scores.score >= 1.0).all()
    assert scores.evidence["corroborated"].tolist() == [False, True]


@pytest.mark.parametrize(("channel", "detector"), [("loss", LossSpike()), ("grad_norm", GradNormSpike())])
def test_labelled_logs(channel, detector):
    """weighted recall >= 0.95 at no more than 1 lenient false alarm in 10,000 rows, and 5 strict."""
    if not LOGS.is_dir():
        pytest.skip(f"needs labelled logs at {LOGS}")
    spec = importlib.util.spec_from_file_location("benchmark_detection", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)

    result = benchmark.score_detector(channel, detector, LOGS)

    assert result["weighted_recall"] >= 0.95
    assert result["per_10k_lenient"] <= 1.0
    assert result["per_10k_strict"] <= 5.0
    assert result["nan_caught"] == result["nan_events"]
