"""The fast path of scalar rules leaves the very bits that numpy leaves, and gives way where anything is anomalous."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from sentinel.detect import AnomalyNan, AnomalyTurbulence, GradNormSpike, HiddenNan, LossSpike, NanStorm, SameBatch
from sentinel.detect.drift import Drift, Plateau
from sentinel.native import fast_rules as native
from sentinel.rules.watches.fast_path import FastPath, fast_path_of

DETECTORS = {
    "drift": Drift(memory=8, warmup=40, threshold=10.0),
    "drift both": Drift(memory=8, warmup=40, threshold=10.0, sides="both", settle_after=20),
    "drift, old": Drift(memory=4, warmup=32, threshold=6.0, settle_after=20),
    "plateau": Plateau(memory=8, warmup=40, patience=60),
    "hidden": HiddenNan(repeats=3),
    "turbulence": AnomalyTurbulence(domain="log"),
    "turbulence linear": AnomalyTurbulence(domain="linear", sides="up", warmup=5),
    "storm": NanStorm(count=2),
    "nan": AnomalyNan(),
    "loss": LossSpike(),
    "norm": GradNormSpike(),
    "batch": SameBatch(lasting=2, warmup=8),
}


def stream(num_steps: int) -> np.ndarray:
    """Three series: calm with spikes and shifts, falling with bad points, and one that repeats, rests and is zero."""
    rng = np.random.default_rng(4)
    steps = np.arange(num_steps)
    calm = 3.0 + 0.05 * rng.standard_normal(num_steps)
    calm[200:205] *= 4.0
    calm[300:] += 1.5
    falling = (2.0 + 3.0 * np.exp(-steps / 80.0)) * np.exp(0.02 * rng.standard_normal(num_steps))
    falling[[90, 91, 250]] = np.nan, np.inf, -np.inf
    falling[330:] *= 1.01 ** np.arange(num_steps - 330)
    still = 1.0 + 0.2 * rng.random(num_steps)
    still[120:124], still[180], still[260:] = still[120], 0.0, 0.7
    return np.stack([calm, falling, still], axis=1)


def take(fast_path: FastPath, values: np.ndarray, series: np.ndarray, state: dict[str, np.ndarray]) -> bool:
    """Take one point of each of these series in; False where any is anomalous."""
    rule, taken, at = native.FastRule(), np.zeros(1, np.bool_), np.arange(len(values), dtype=np.int32)
    kept = fast_path.describe(rule, state)
    rule.values, rule.series, rule.num = at.ctypes.data, series.ctypes.data, len(values)
    num_taken = native.step(ctypes.addressof(rule), 1, values.ctypes.data, taken.ctypes.data)
    assert kept and num_taken == taken[0]
    return bool(taken[0])


@pytest.mark.slow
@pytest.mark.skipif(native.step is None, reason="the C library was not built")
@pytest.mark.parametrize("name", DETECTORS)
def test_the_quick_way_leaves_the_same_bits(name):
    detector = DETECTORS[name]
    fast_path, values = fast_path_of(detector), stream(420)
    if name == "drift, old":
        # What a run has shown bounds where chance leads it from 64 blocks on, 1024 steps here; waves are chance to it.
        values = stream(1500) * np.exp(0.1 * np.sin(np.arange(1500) / 12.0))[:, None]
    assert fast_path is not None
    # The points come in another order than the series stand in, and one series has none.
    series = np.array([3, 0, 2], dtype=np.int32)
    fast, slow, untouched = detector.state(4), detector.state(3), detector.state(1)
    num_fast = num_anomalous = 0
    with np.errstate(all="ignore"):
        for at, point in enumerate(values):
            anomalous = detector.score(point, slow).score >= 1.0
            detector.learn(point, slow, anomalous)
            if take(fast_path, point.copy(), series, fast):
                assert not anomalous.any(), at
                num_fast += 1
            else:
                # What only asks whether all is well leaves a single NaN to numpy, anomalous or not.
                assert anomalous.any() or not np.isfinite(point).all(), at
                part = {name: array[series] for name, array in fast.items()}
                assert (detector.score(point, part).score >= 1.0).tolist() == anomalous.tolist(), at
                detector.learn(point, part, anomalous)
                for array in fast:
                    fast[array][series] = part[array]
                num_anomalous += 1
            for array in slow:
                assert fast[array][series].tobytes() == slow[array].tobytes(), f"{array} at {at}"
    for array in untouched:
        assert fast[array][1].tobytes() == untouched[array][0].tobytes()
    assert num_fast > 60 and num_anomalous > 0


def test_what_may_differ_has_no_quick_way():
    class Mine(LossSpike):
        def score(self, values, state):
            return super().score(values, state)

    assert fast_path_of(Mine()) is None
    assert fast_path_of(AnomalyTurbulence(compat="msprobe")) is None
    assert fast_path_of(AnomalyNan(threshold=3.0)) is None
