"""One battery over all detectors: what each of them owes the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sentinel.detect import DETECTORS, GroupDetector, SeriesDetector, grow, state_bytes
from sentinel.errors import ConfigError

CASES: dict[str, Any] = {
    **{
        name: cls()
        for name, cls in DETECTORS.items()
        if isinstance(cls(), SeriesDetector) and not isinstance(cls(), GroupDetector)
    },
    "AnomalyNan threshold": DETECTORS["AnomalyNan"](threshold=50.0),
    "AnomalyNan msprobe": DETECTORS["AnomalyNan"](compat="msprobe", threshold=1e9),
    "AnomalyTurbulence msprobe": DETECTORS["AnomalyTurbulence"](compat="msprobe", threshold=0.5),
    "AnomalyTurbulence linear": DETECTORS["AnomalyTurbulence"](domain="linear"),
}
WITH_BASELINE = [name for name in CASES if name.split()[0] not in ("AnomalyNan", "NanStorm", "HiddenNan")]
# msProbe's own formula learns what it flags, and NaN too (its records are in golden/msprobe_rules.json).
SHIFTING = [name for name in WITH_BASELINE if "msprobe" not in name]
SCALAR_BYTES, TENSOR_BYTES = 4096, 100


@pytest.fixture(params=list(CASES))
def detector(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


def run(
    detector: SeriesDetector, values: np.ndarray, state: dict[str, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Feed [points, series]; return scores [points, series], settled [points, series] and the state."""
    state = detector.state(values.shape[1]) if state is None else state
    scores, settled = np.zeros(values.shape), np.zeros(values.shape, dtype=bool)
    with np.errstate(all="ignore"):
        for at, point in enumerate(values):
            before = {name: array.copy() for name, array in state.items()}
            found = detector.score(point, state)
            scores[at] = found.score
            _ = found.baseline, found.evidence
            assert all(np.array_equal(before[name], state[name], equal_nan=True) for name in state), "score() learned"
            detector.learn(point, state, found.score >= 1.0)
            if "settled" in state:
                settled[at] = state["settled"]
    return scores, settled, state


def wild(rng: np.random.Generator, points: int = 300, series: int = 12) -> np.ndarray:
    """Values with every nastiness: spikes, zeros, negatives, NaN, infinities, huge and tiny scales."""
    values = np.exp(rng.standard_normal((points, series))) * np.logspace(-30, 30, series)
    for bad in (0.0, -1.0, np.nan, np.inf, -np.inf, 1e308, 5e-324):
        values[rng.random(values.shape) < 0.01] = bad
    return values


def test_is_a_series_detector(detector):
    assert isinstance(detector, SeriesDetector)
    assert detector.summary and detector.statistics


def test_scores_are_finite_and_not_negative(detector, rng):
    scores, _, _ = run(detector, wild(rng))

    assert np.isfinite(scores).all()
    assert (scores >= 0).all()


def test_replay_is_identical(detector, rng):
    values = wild(rng)

    first, _, state = run(detector, values)
    again, _, state_again = run(detector, values)

    assert np.array_equal(first, again)
    assert all(np.array_equal(state[name], state_again[name], equal_nan=True) for name in state)


def test_memory_is_bounded(detector, rng):
    _, _, early = run(detector, wild(rng, points=40))
    _, _, late = run(detector, wild(rng, points=400))

    assert state_bytes(early) == state_bytes(late)
    assert state_bytes(late) / 12 <= (SCALAR_BYTES if detector.statistics == ("value",) else TENSOR_BYTES)


def test_series_are_independent(detector, rng):
    values = wild(rng)
    order = rng.permutation(values.shape[1])

    straight, _, _ = run(detector, values)
    shuffled, _, _ = run(detector, values[:, order])

    assert np.array_equal(straight[:, order], shuffled)


def test_a_restored_state_goes_on_identically(detector, rng):
    values = wild(rng)

    whole, _, _ = run(detector, values)
    _, _, state = run(detector, values[:150])
    copied = {name: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape).copy() for name, a in state.items()}
    rest, _, _ = run(detector, values[150:], copied)

    assert np.array_equal(whole[150:], rest)


def test_growing_leaves_old_series_alone(detector, rng):
    values = wild(rng)
    state = detector.state(5)

    run(detector, values[:100, :5], state)
    grown = grow(detector, state, 12)
    scores, _, _ = run(detector, values[100:], grown)
    alone, _, _ = run(detector, values[:, :5])

    assert np.array_equal(scores[:, :5], alone[100:])


@pytest.mark.parametrize("level", [0.0, 1e-30, 1e-3, 1.0, 7.25, 1e30])
def test_constant_series_never_fires(detector, level):
    if getattr(detector, "threshold", None) is not None and level > 50.0:
        pytest.skip("past its absolute limit")

    scores, _, _ = run(detector, np.full((400, 3), level))

    assert (scores < 1.0).all()


@pytest.mark.parametrize("name", SHIFTING)
def test_nan_never_enters_a_baseline(name, rng):
    clean = np.exp(0.05 * rng.standard_normal((300, 4)))
    dirty = np.repeat(clean, 2, axis=0)
    dirty[1::2] = np.array([np.nan, np.inf, -np.inf, np.nan])

    _, _, without = run(CASES[name], clean)
    scores, _, with_bad = run(CASES[name], dirty)

    assert all(np.array_equal(without[key], with_bad[key], equal_nan=True) for key in without)
    assert (scores < 1.0).all(), "what is no number is for AnomalyNan to say"


@pytest.mark.parametrize("name", SHIFTING)
def test_a_spike_after_a_nan_is_seen(name, rng):
    values = 10.0 * np.exp(0.02 * rng.standard_normal((200, 2)))
    values[100] = np.nan
    values[101] = np.inf
    values[120] *= 50.0

    scores, _, _ = run(CASES[name], values)

    assert (scores[120] >= 1.0).all()


@pytest.mark.parametrize("name", SHIFTING)
def test_the_baseline_does_not_learn_what_it_flags(name, rng):
    values = 10.0 * np.exp(0.02 * rng.standard_normal((140, 2)))
    values[120:130] *= 40.0

    scores, settled, _ = run(CASES[name], values)

    assert (scores[120:130] >= 1.0).all()
    assert (scores[130:] < 1.0).all()
    assert not settled.any()


@pytest.mark.parametrize("name", SHIFTING)
def test_level_shift_fires_once(name, rng):
    values = 10.0 * np.exp(0.02 * rng.standard_normal((400, 3)))
    values[150:] *= 30.0

    scores, settled, _ = run(CASES[name], values)
    flagged = scores >= 1.0

    assert flagged[150:169].all()
    assert settled[169].all() and settled.sum() == 3
    assert not flagged[:150].any() and not flagged[170:].any()


@pytest.mark.parametrize("name", SHIFTING)
def test_healthy_series_stay_silent(name, healthy, healthy_name):
    """A lone excursion in ten thousand of heavy-tailed noise is allowed: it is `info`, and never lasts."""
    heavy = {"laplace": 1e-3, "student_t3": 5e-3, "pareto": 1e-2}
    if "linear" in name:
        # On a linear scale what is normal in logarithms is heavy-tailed.
        heavy |= {"wide": 1e-2, "laplace": 1e-2, "autoregressive": 1e-3}
    values = healthy(healthy_name, 1000, 8 if "Spike" in name and name != "KurtosisSpike" else 100)
    if name == "KurtosisSpike":
        values = 1.0 + values

    scores, settled, _ = run(CASES[name], values)
    flagged = scores >= 1.0

    assert flagged.mean() <= heavy.get(healthy_name, 1e-4 if healthy_name == "chi" else 0.0)
    assert not (flagged[2:] & flagged[1:-1] & flagged[:-2]).any()
    assert not settled.any()


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("AnomalyTurbulence", {"threshold": -1.0}, "threshold"),
        ("AnomalyTurbulence", {"warmup": 1}, "warmup"),
        ("KurtosisSpike", {"k": 0.0}, "k must be above 0"),
        ("LossSpike", {"window": 1}, "window"),
        ("LossSpike", {"floor": 0.0}, "floor"),
        ("GradNormSpike", {"settle_after": -1}, "settle_after"),
        ("NanStorm", {"count": 1}, "count"),
        ("NanStorm", {"window": 2}, "window"),
        ("HiddenNan", {"repeats": 0}, "repeats"),
        ("AnomalyNan", {"threshold": -5.0}, "threshold"),
    ],
)
def test_nonsense_is_refused_when_built(name, args, says):
    with pytest.raises(ConfigError, match=says):
        DETECTORS[name](**args)
