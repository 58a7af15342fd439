"""A detector of other people that fails: its rule is off, says so, and stays off; everything else goes on."""

import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.detect import DETECTORS, Scores
from sentinel.rules.engine import Engine
from sentinel.rules.schema import Match, Pack, Rule

TENSORS = [(f"layers.{at}.mlp", "wgrad") for at in range(4)]


class Own:
    """Anomalous above `limit`; fails as it is told from its `after`-th point on."""

    summary = "above a limit"
    statistics = ("norm",)

    def __init__(self, limit: float = 10.0, fails: str = "", after: int = 3) -> None:
        self.limit, self.fails, self.after = limit, fails, after

    def state(self, num_series):
        return {"points": np.zeros(num_series, np.int64)}

    def score(self, values, state):
        score = np.where(values > self.limit, 2.0, 0.0)
        if (state["points"] >= self.after).all():
            if self.fails == "raise":
                raise OverflowError("mine")
            if self.fails == "nan":
                score = score * np.nan
            if self.fails == "negative":
                score = score - 1.0
            if self.fails == "short":
                score = score[1:]
        return Scores.of(score, np.full(len(values), self.limit), direction=np.ones(len(values), np.int8))

    def learn(self, values, state, anomalous):
        if self.fails == "learn" and (state["points"] >= self.after).all():
            raise KeyError("gone")
        state["points"] += 1


def engine_of(fails):
    rules = tuple(
        Rule(name=name, detector=detector, match=Match(kind=("wgrad",)), severity=Severity.WARNING, args=args,
             episode_quiet_steps=0)
        for name, detector, args in (
            ("own", "Own", {"fails": fails}), ("ours", "Threshold", {"above": 10.0}),
        )
    )  # fmt: skip
    return Engine(Pack(rules=rules), detectors={**DETECTORS, "Own": Own})


def steps_told(engine, run, steps):
    told = {"own": [], "ours": []}
    for step in steps:
        for one in engine.judge(run.view(step, [1.0, 1.0, 50.0, 1.0])):
            told[one.rule].append(step)
    return told


@pytest.mark.parametrize("fails", ["raise", "nan", "negative", "short", "learn"])
def test_a_failing_detector_is_off_and_says_why(paper_run, fails):
    engine, run = engine_of(fails), paper_run(TENSORS)
    first = 4 if fails == "learn" else 3

    told = steps_told(engine, run, range(8))

    assert told == {"own": list(range(first)), "ours": list(range(8))}
    assert engine.num_rows_judged == 8 * len(TENSORS)
    (said,) = engine.blind_groups
    assert said.startswith('detector "Own" of rule "own" is off, because it failed: ')


def test_one_that_does_not_fail_is_heard(paper_run):
    engine, run = engine_of(""), paper_run(TENSORS)

    assert steps_told(engine, run, range(8)) == {"own": list(range(8)), "ours": list(range(8))}
    assert engine.blind_groups == []


def test_it_stays_off_after_a_restart(paper_run):
    run = paper_run(TENSORS)
    engine = engine_of("raise")
    steps_told(engine, run, range(5))

    # The detector that comes back is well; what it learned before is not whole.
    again = engine_of("raise")
    again._watches[0].detector._detector.fails = ""
    again.restore(engine.snapshot())

    assert steps_told(again, run, range(5, 8)) == {"own": [], "ours": [5, 6, 7]}
