"""One battery over all detectors: what each of them owes the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sentinel.detect import DETECTORS, grow
from sentinel.errors import ConfigError
from sentinel.testing.battery import BATTERY, DetectorUnderTest
from sentinel.testing.battery import feed as run

NEEDED: dict[str, dict[str, Any]] = {"Threshold": {"above": 50.0}}
"""Arguments that a detector must be given."""
CASES: dict[str, Any] = {
    **{name: cls(**NEEDED.get(name, {})) for name, cls in DETECTORS.items() if cls.declares.over == "series"},
    "AnomalyNan threshold": DETECTORS["AnomalyNan"](threshold=50.0),
    "AnomalyNan msprobe": DETECTORS["AnomalyNan"](compat="msprobe", threshold=1e9),
    "AnomalyTurbulence msprobe": DETECTORS["AnomalyTurbulence"](compat="msprobe", threshold=0.5),
    "AnomalyTurbulence common": DETECTORS["AnomalyTurbulence"](common=True),
    "AnomalyTurbulence linear": DETECTORS["AnomalyTurbulence"](domain="linear"),
    "AttentionCollapse": DETECTORS["AttentionCollapse"](quantity="entropy"),
    "AttentionCollapse max_logit": DETECTORS["AttentionCollapse"](quantity="max_logit"),
}
ABSOLUTE = (
    "AnomalyNan",
    "NanStorm",
    "HiddenNan",
    "DeadTensor",
    "DeadExpert",
    "Threshold",
    "PrecisionLoss",
    "SameBatch",
    "DominantExpert",
)
"""Detectors of states, which no new level excuses."""
SLOW = ("Drift", "Plateau")
"""What they tell of takes longer than a battery: tests/detect/test_drift.py."""
WITH_BASELINE = [name for name in CASES if name.split()[0] not in (*ABSOLUTE, *SLOW)]
# msProbe's own formula learns what it flags, and NaN too (its records are in golden/msprobe_rules.json).
SHIFTING = [name for name in WITH_BASELINE if "msprobe" not in name]
DEAF_TO_NAN = [*WITH_BASELINE, *SLOW, *(name for name in CASES if name in ABSOLUTE[3:])]
TOGETHER = ("VanishingGradient", "UpdateRatio", "DeadTensor")
"""Detectors that hold the series of a step against one another: what all do is nobody's own."""
JUMPS = {"VanishingGradient": 1e-3, "ExplodingTensor": 100.0, "AttentionCollapse": 1.0 / 30.0, "UpdateRatio": 100.0}
"""A lasting change that is beyond doubt, where it is not thirty times as much."""
AT = np.arange(600.0)
"""Steps of a run with a schedule."""


def in_its_unit(name: str, values: np.ndarray) -> np.ndarray:
    """Return positive values as a detector may meet them: a kurtosis is at least 1, a share between 0 and 1."""
    if name == "Saturation":
        return values / (1.0 + values)
    return 1e-6 * values if name == "UpdateRatio" else values


@pytest.fixture(params=list(CASES))
def detector(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


@pytest.mark.parametrize(
    "check",
    [*BATTERY[:2], *(pytest.param(check, marks=pytest.mark.slow) for check in BATTERY[2:])],
    ids=lambda check: check.__name__,
)
def test_what_every_detector_owes(detector, check):
    is_alone = type(detector).__name__ not in TOGETHER and not getattr(detector, "common", False)

    check(DetectorUnderTest(detector, is_alone=is_alone, has_raw_values=True))


@pytest.mark.slow
def test_growing_leaves_old_series_alone_and_new_ones_are_as_good_as_new(detector):
    values = DetectorUnderTest(detector, has_raw_values=True).values()
    state = detector.state(5)
    run(detector, values[:100, :5], state)
    scores, _, _ = run(detector, values[100:], grow(detector, state, 12))
    whole = detector.state(12)
    run(detector, np.concatenate([values[:100, :5], np.full((100, 7), np.nan)], axis=1), whole)
    expected, _, _ = run(detector, values[100:], whole)

    # Series that were never seen are as good as new ones; but NaN is a point to those that count them.
    assert np.array_equal(scores[:, :5], expected[:, :5])
    assert type(detector).__name__ == "NanStorm" or getattr(detector, "compat", "") or np.array_equal(scores, expected)


@pytest.mark.slow
def test_constant_series_never_fires(detector):
    limit = {"AnomalyNan": getattr(detector, "threshold", None), "Threshold": 50.0, "PrecisionLoss": 0.0}
    most = limit.get(type(detector).__name__)
    levels = [one for one in (0.0, 1e-30, 1e-3, 1.0, 7.25, 1e30) if most is None or one <= most]
    # What each detector makes of series one by one it makes of all at once; these hold them against one another.
    is_together = type(detector).__name__ in TOGETHER or getattr(detector, "common", False)
    for together in [[one] for one in levels] if is_together else [levels]:
        scores, _, _ = run(detector, np.full((400, 3 * len(together)), np.repeat(together, 3)))

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
    values[150] = np.nan
    values[151] = np.inf
    values[170] *= JUMPS.get(name, 50.0)

    scores, _, _ = run(CASES[name], in_its_unit(name, values))

    assert (scores[170] >= 1.0).all()


@pytest.mark.parametrize("name", SHIFTING)
def test_the_baseline_does_not_learn_what_it_flags(name, rng):
    values = 10.0 * np.exp(0.02 * rng.standard_normal((180, 2)))
    values[150:160] *= JUMPS.get(name, 40.0)

    scores, settled, _ = run(CASES[name], in_its_unit(name, values))

    assert (scores[:150] < 1.0).all()
    assert (scores[150:160] >= 1.0).all()
    assert (scores[160:] < 1.0).all()
    assert not settled.any()


@pytest.mark.parametrize("name", SHIFTING)
def test_level_shift_fires_once(name, rng):
    values = 10.0 * np.exp(0.02 * rng.standard_normal((400, 3)))
    values[150:] *= JUMPS.get(name, 30.0)
    last = 149 + CASES[name].settle_after

    scores, settled, _ = run(CASES[name], in_its_unit(name, values))
    flagged = scores >= 1.0

    assert flagged[150:last].all()
    assert settled[last].all() and settled.sum() == 3
    assert not flagged[:150].any() and not flagged[last + 1 :].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIFTING)
def test_healthy_series_stay_silent(name, healthy, healthy_kinds):
    """A lone excursion in ten thousand of heavy-tailed noise is allowed: it is `info`, and never lasts."""
    heavy = {"laplace": 1e-3, "student_t3": 5e-3, "pareto": 1e-2, "chi": 1e-4}
    if (
        not CASES[name].vectorised("mean").peaks
        if hasattr(CASES[name], "vectorised")
        else name in ("UpdateRatio", "Saturation")
    ):
        # Slow references do not wait for the largest peak to be passed by half.
        heavy |= {"wide": 1e-4, "autoregressive": 1e-4}
    if "linear" in name:
        # On a linear scale what is normal in logarithms is heavy-tailed.
        heavy |= {"wide": 1e-2, "laplace": 1e-2, "autoregressive": 1e-3}
    each = 8 if CASES[name].declares.statistics == ("value",) else 100
    values = np.concatenate([healthy(kind, 1000, each) for kind in healthy_kinds], axis=1)
    values = 1.0 + values if name == "KurtosisSpike" else in_its_unit(name, values)

    scores, settled, _ = run(CASES[name], values)
    flagged = scores >= 1.0

    for at, kind in enumerate(healthy_kinds):
        assert flagged[:, at * each : (at + 1) * each].mean() <= heavy.get(kind, 0.0), kind
    assert not (flagged[2:] & flagged[1:-1] & flagged[:-2]).any()
    assert not settled.any()


SCHEDULES: dict[str, np.ndarray] = {
    "warm-up, cosine to nothing": np.minimum((AT + 1) / 60, 1.0) * (1e-5 + 0.5 * (1.0 + np.cos(np.pi * AT / len(AT)))),
    "warm-up, stable, down": np.minimum((AT + 1) / 60, 1.0) * np.minimum(1.0, 5.0 * (1.0 - AT / len(AT)) + 1e-4),
    "steps": 0.1 ** (AT // 200),
    "restarts": 1e-4 + 0.5 * (1.0 + np.cos(np.pi * (AT % 150) / 150)),
    "twice the batch": np.where(AT < 300, 1.0, 0.5),
    "ten times the batch": np.where(AT < 300, 1.0, 0.1),
}
"""What happens to all tensors of a healthy run alike."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_what_all_series_do_is_nobodys_fault(name, rng):
    alike = np.concatenate([SCHEDULES[one] for one in ("warm-up, cosine to nothing", "restarts", "ten times the batch")])
    values = alike[:, None] * np.exp(0.1 * rng.standard_normal((len(alike), 10)) + rng.standard_normal(10))
    values[-150:, 3] *= 0.0 if name == "DeadTensor" else 1e-4

    scores, _, _ = run(CASES[name], in_its_unit(name, values))

    assert (scores[-150:, 3] >= 1.0).any(), "the control"
    assert (scores[:-150] < 1.0).all() and (np.delete(scores, 3, axis=1) < 1.0).all()


@pytest.mark.parametrize("name", [name for name in SHIFTING if name not in ("AttentionCollapse", *TOGETHER)])
def test_a_schedule_is_one_level_shift_at_most_each_time_it_jumps(name, rng):
    """A tensor that follows the rate itself: a jump is told once, a slope never."""
    jumps = {"steps": 3, "restarts": 4, "twice the batch": 1, "ten times the batch": 1}
    if CASES[name].settle_after == 20:
        jumps |= {one: 2 for one in SCHEDULES if one.startswith("warm-up")}  # where the rate vanishes
    alike = np.stack([SCHEDULES[one] for one in SCHEDULES for _ in range(4)], axis=1)
    values = alike * 10.0 * np.exp(0.05 * rng.standard_normal(alike.shape))

    scores, _, _ = run(CASES[name], in_its_unit(name, values))
    flagged = scores >= 1.0
    # An episode ends after twenty quiet points.
    onsets = sum(flagged[at] & ~flagged[max(0, at - 20) : at].any(axis=0) for at in range(len(AT)))

    for number, schedule in enumerate(SCHEDULES):
        assert (onsets[4 * number : 4 * number + 4] <= jumps.get(schedule, 0)).all(), schedule


WITH_LIMIT = ("KurtosisSpike", "ExpertImbalance", "AttentionCollapse max_logit", "Saturation")
SCALED = [name for name in SHIFTING if name not in WITH_LIMIT]
"""Those without a limit in the unit of the values."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCALED, "DeadTensor"])
def test_the_unit_of_the_values_is_of_no_account(name, rng):
    values = 1e-3 * np.exp(0.1 * rng.standard_normal((260, 6)))
    values[200:] *= np.array([1.0, 50.0, 1e-4, 3.0, 0.5, 1.0])
    if name == "DeadTensor":
        values[200:, 0] = 0.0

    scores, _, _ = run(CASES[name], in_its_unit(name, values))
    scaled, _, _ = run(CASES[name], in_its_unit(name, 1024.0 * values))

    assert (scores[200:] >= 1.0).any()
    assert np.array_equal(scores >= 1.0, scaled >= 1.0)
    assert scores == pytest.approx(scaled, rel=1e-2, abs=1e-2)


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
        ("Drift", {"threshold": 0.0}, "threshold"),
        ("Drift", {"warmup": 8}, "warmup"),
        ("Plateau", {"share": 1.0}, "share"),
        ("AnomalyNan", {"threshold": -5.0}, "threshold"),
    ],
)
def test_nonsense_is_refused_when_built(name, args, says):
    with pytest.raises(ConfigError, match=says):
        DETECTORS[name](**args)
