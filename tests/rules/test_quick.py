"""The quick way of scalar rules leaves the very bits that numpy leaves, and gives way where anything is anomalous."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.detect import AnomalyNan, AnomalyTurbulence, GradNormSpike, HiddenNan, LossSpike, NanStorm
from sentinel.detect.drift import Drift, Plateau
from sentinel.native import quick as native
from sentinel.rules.quick import quick_of

DETECTORS = {
    "drift": Drift(memory=8, warmup=40, threshold=10.0),
    "drift both": Drift(memory=8, warmup=40, threshold=10.0, sides="both", settle_after=20),
    "plateau": Plateau(memory=8, warmup=40, patience=60),
    "hidden": HiddenNan(repeats=3),
    "turbulence": AnomalyTurbulence(domain="log"),
    "turbulence linear": AnomalyTurbulence(domain="linear", sides="up", warmup=5),
    "storm": NanStorm(count=2),
    "nan": AnomalyNan(),
    "loss": LossSpike(),
    "norm": GradNormSpike(),
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


@pytest.mark.skipif(not native.calls, reason="the C library was not built")
@pytest.mark.parametrize("name", DETECTORS)
def test_the_quick_way_leaves_the_same_bits(name):
    detector = DETECTORS[name]
    quick, values = quick_of(detector), stream(420)
    assert quick is not None
    fast, slow = detector.state(3), detector.state(3)
    num_quick = num_anomalous = 0
    with np.errstate(all="ignore"):
        for at, point in enumerate(values):
            anomalous = detector.score(point, slow).score >= 1.0
            detector.learn(point, slow, anomalous)
            if quick.take(point.copy(), fast):
                assert not anomalous.any(), at
                num_quick += 1
            else:
                # What only asks whether all is well leaves a single NaN to numpy, anomalous or not.
                assert anomalous.any() or not np.isfinite(point).all(), at
                assert (detector.score(point, fast).score >= 1.0).tolist() == anomalous.tolist(), at
                detector.learn(point, fast, anomalous)
                num_anomalous += 1
            for array in slow:
                np.testing.assert_array_equal(fast[array], slow[array], f"{array} at {at}")
    assert num_quick > 60 and num_anomalous > 0


def test_what_may_differ_has_no_quick_way():
    class Mine(LossSpike):
        def score(self, values, state):
            return super().score(values, state)

    assert quick_of(Mine()) is None
    assert quick_of(AnomalyTurbulence(compat="msprobe")) is None
    assert quick_of(AnomalyNan(threshold=3.0)) is None
