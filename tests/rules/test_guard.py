"""A detector of other people that fails: its rule is off, says so, and stays off; everything else goes on."""

import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.detect import DETECTORS, Scores
from sentinel.detect.group import GroupDetector
from sentinel.rules.engine import Engine
from sentinel.rules.guard import guarded
from sentinel.rules.language.loader import read_pack
from sentinel.rules.language.schema import Match, Pack, Rule

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
            if self.fails == "bare":
                return score
            if self.fails == "exit":
                raise SystemExit(3)
            if self.fails == "writes":
                values[:] = 0.0
        return Scores.of(score, np.full(len(values), self.limit), direction=np.ones(len(values), np.int8))

    def learn(self, values, state, anomalous):
        if self.fails == "learn" and (state["points"] >= self.after).all():
            raise KeyError("gone")
        if self.fails == "more" and (state["points"] >= self.after).all():
            state["more"] = state["points"]
        if self.fails == "cut" and (state["points"] >= self.after).all():
            state["points"] = state["points"][1:]
        if self.fails == "casts":
            state["points"] = (state["points"] + 1).astype(np.float32)
            return
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


@pytest.mark.parametrize("fails", ["raise", "nan", "negative", "short", "bare", "exit", "writes", "learn", "more", "cut"])
def test_a_failing_detector_is_off_and_says_why(paper_run, fails):
    engine, run = engine_of(fails), paper_run(TENSORS)
    first = 4 if fails in ("learn", "more", "cut") else 3

    told = steps_told(engine, run, range(8))

    assert told == {"own": list(range(first)), "ours": list(range(8))}
    assert engine.num_rows_judged == 8 * len(TENSORS)
    (said,) = engine.blind_groups
    assert said.startswith('detector "Own" of rule "own" is off, because it failed: ')


@pytest.mark.parametrize("does", ["", "casts"])
def test_one_that_does_not_fail_is_heard(paper_run, does):
    engine, run = engine_of(does), paper_run(TENSORS)

    assert steps_told(engine, run, range(8)) == {"own": list(range(8)), "ours": list(range(8))}
    assert engine.blind_groups == []
    assert engine._watches[0].state["points"].dtype == np.int64 and (engine._watches[0].state["points"] == 8).all()


def test_it_stays_off_after_a_restart(paper_run):
    run = paper_run(TENSORS)
    engine = engine_of("raise")
    steps_told(engine, run, range(5))

    # The detector that comes back is well; what it learned before is not whole.
    again = engine_of("raise")
    again._watches[0].detector._detector.fails = ""
    again.restore(engine.snapshot())

    assert steps_told(again, run, range(5, 8)) == {"own": [], "ours": [5, 6, 7]}


class Group:
    """Compares ranks, and fails."""

    summary, statistics, over = "compares", ("step_s",), "ranks"

    def state(self, num_members):
        return {}

    def score(self, points, group, state):
        raise ZeroDivisionError("mine")

    def learn(self, points, group, state, anomalous):
        raise AssertionError("never reached")


def test_a_failing_group_detector_is_off_too():
    found = guarded(Group(), "Group")

    scores = found.score({"step_s": np.ones(3)}, np.zeros(3, np.int64), {})
    found.learn({"step_s": np.ones(3)}, np.zeros(3, np.int64), {}, scores.score >= 1)

    assert isinstance(found, GroupDetector) and found.problem.endswith("ZeroDivisionError: mine")
    assert scores.score.tolist() == [0.0] * 3 and not scores.evidence["is_sure"].any()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda num: [num], "a dict of named arrays"),
        (lambda num: {"a": np.zeros(2)}, "first axis"),
        (lambda num: 1 / 0, "Zero"),
    ],
)
def test_what_makes_no_state_is_refused_where_the_rule_stands(state, words, tmp_path):
    class Bad(Own):
        pass

    Bad.state = lambda self, num: state(num)
    (tmp_path / "a.yaml").write_text("rules:\n  - name: a\n    detector: Bad\n")

    _, problems = read_pack([tmp_path / "a.yaml"], detectors={**DETECTORS, "Bad": Bad})

    assert len(problems) == 1 and problems[0].line == 2 and words in problems[0].message
