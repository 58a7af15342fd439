"""`compat: msprobe` against what msProbe's own code said (benchmarks/rules_vs_msprobe.py --golden wrote it down)."""

import json
from pathlib import Path

import numpy as np
import pytest

from sentinel.detect import DETECTORS

GOLDEN = json.loads((Path(__file__).parent / "golden" / "msprobe_rules.json").read_text())
VALUES = np.array([[float.fromhex(one) for one in series] for series in GOLDEN["series"]]).T
EACH_CASE = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['rule']}-{case['threshold']}")


def judgements(case):
    arguments = {} if case["threshold"] is None else {"threshold": case["threshold"]}
    detector = DETECTORS[case["rule"]](compat="msprobe", **arguments)
    state = detector.state(VALUES.shape[1])
    found, history = np.zeros(VALUES.shape, bool), np.zeros(VALUES.shape)
    for at, point in enumerate(VALUES):
        scores = detector.score(point, state)
        found[at], history[at] = scores.score >= 1.0, scores.baseline
        detector.learn(point, state, found[at])
    return found, history


def test_the_streams_hold_everything_that_a_statistic_can_be():
    assert np.isnan(VALUES).any() and np.isposinf(VALUES).any() and np.isneginf(VALUES).any()
    assert (VALUES == 0.0).any() and (VALUES < 0.0).any()
    assert (np.abs(VALUES[VALUES != 0.0]) < 1e-300).any() and (np.abs(VALUES) > 1e300).any()


@EACH_CASE
def test_msprobes_own_verdicts(case):
    expected = np.array([[one == "1" for one in series] for series in case["alarms"]]).T
    assert 0 < expected.sum() < expected.size

    found, _ = judgements(case)

    assert np.array_equal(found, expected)


def test_msprobes_own_history_to_the_last_bit():
    case = next(case for case in GOLDEN["cases"] if "history" in case)
    expected = np.array([[float.fromhex(one) for one in series] for series in case["history"]]).T

    _, history = judgements(case)

    assert np.array_equal(history, expected, equal_nan=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_value_blinds_msprobes_formula_and_not_the_default(bad):
    values = np.exp(0.02 * np.random.default_rng(3).standard_normal(200))
    values[100], values[150] = bad, 50.0
    for arguments, expected in (({"compat": "msprobe", "threshold": 0.5}, False), ({}, True)):
        detector = DETECTORS["AnomalyTurbulence"](**arguments)
        state = detector.state(1)
        for point in values[:150]:
            scores = detector.score(np.array([point]), state)
            detector.learn(np.array([point]), state, scores.score >= 1.0)

        assert bool(detector.score(values[150:151], state).score[0] >= 1.0) is expected
