"""A detector of other people that fails: its rule is off, says so, and stays off; everything else goes on."""

import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.detect import DETECTORS, Declaration, Scores
from sentinel.detect.group import GroupDetector
from sentinel.rules.engine import Engine
from sentinel.rules.guarded_detector import guarded
from sentinel.rules.language.loader import read_pack
from sentinel.rules.language.schema import Match, Pack, Rule

TENSORS = [(f"layers.{at}.mlp", "wgrad") for at in range(4)]


class Own:
    """Anomalous above `limit`; fails as it is told from its `after`-th point on."""

    declares = Declaration(summary="above a limit")

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


def steps_reported(engine, run, steps):
    reported = {"own": [], "ours": []}
    for step in steps:
        for one in engine.judge(run.view(step, [1.0, 1.0, 50.0, 1.0])):
            reported[one.rule].append(step)
    return reported


@pytest.mark.parametrize("fails", ["raise", "nan", "negative", "short", "bare", "exit", "writes", "learn", "more", "cut"])
def test_a_failing_detector_is_off_and_says_why(paper_run, fails):
    engine, run = engine_of(fails), paper_run(TENSORS)
    first = 4 if fails in ("learn", "more", "cut") else 3

    reported = steps_reported(engine, run, range(8))

    assert reported == {"own": list(range(first)), "ours": list(range(8))}
    assert engine.num_rows_judged == 8 * len(TENSORS)
    (said,) = engine.blind_groups
    assert said.startswith('detector "Own" of rule "own" is off, because it failed: ')


@pytest.mark.parametrize("does", ["", "casts"])
def test_one_that_does_not_fail_is_heard(paper_run, does):
    engine, run = engine_of(does), paper_run(TENSORS)

    assert steps_reported(engine, run, range(8)) == {"own": list(range(8)), "ours": list(range(8))}
    assert engine.blind_groups == []
    assert engine._watches[0].state["points"].dtype == np.int64 and (engine._watches[0].state["points"] == 8).all()


def test_it_stays_off_after_a_restart(paper_run):
    run = paper_run(TENSORS)
    engine = engine_of("raise")
    steps_reported(engine, run, range(5))

    # The detector that comes back is well; what it learned before is not whole.
    again = engine_of("raise")
    again._watches[0].detector._detector.fails = ""
    again.restore(engine.snapshot())

    assert steps_reported(again, run, range(5, 8)) == {"own": [], "ours": [5, 6, 7]}


class Mean:
    """How far a value lies from the mean of those before: of a NaN it makes a NaN, and a mean that stays one."""

    declares = Declaration(summary="far from its mean")

    def state(self, num_series):
        return {"sum": np.zeros(num_series), "num": np.zeros(num_series, np.int64)}

    def score(self, values, state):
        mean = state["sum"] / np.maximum(state["num"], 1)
        score = np.where(state["num"] > 0, np.abs(values - mean) / 10.0, 0.0)
        return Scores.of(score, mean, direction=np.ones(len(values), np.int8))

    def learn(self, values, state, anomalous):
        state["sum"] = state["sum"] + values
        state["num"] += 1


class Greedy(Mean):
    declares = Declaration(summary="the same, of any value", raw_values=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_switches_nothing_off(paper_run, bad):
    rule = Rule(name="own", detector="Mean", match=Match(kind=("wgrad",)), severity=Severity.WARNING, episode_quiet_steps=0)
    engine, run = Engine(Pack(rules=(rule,)), detectors={**DETECTORS, "Mean": Mean}), paper_run(TENSORS)
    reported = {}
    for step, values in enumerate([[1.0] * 4, [1.0, bad, 1.0, 50.0], [bad] * 4, [1.0, 50.0, 1.0, 1.0]]):
        reported[step] = [one.tag_name for one in engine.judge(run.view(step, values))]

    assert reported == {0: [], 1: ["layers.3.mlp"], 2: [], 3: ["layers.1.mlp", "layers.3.mlp"]}
    assert engine.blind_groups == []
    state = engine._watches[0].state
    assert np.isfinite(state["sum"]).all() and state["num"].tolist() == [3, 2, 3, 3]


def test_a_detector_that_asks_for_values_that_are_not_finite_is_handed_them():
    asked, plain = guarded(Greedy(), "Greedy"), guarded(Mean(), "Mean")
    values = np.array([1.0, np.nan, np.inf])

    for detector in (asked, plain):
        state = detector.state(3)
        detector.score(values, state)
        detector.learn(values, state, np.zeros(3, np.bool_))
        assert detector.problem == ""
        assert np.isfinite(state["sum"]).all() == (detector is plain)
        assert state["num"].tolist() == ([1, 1, 1] if detector is asked else [1, 0, 0])


def test_finite_neighbours_of_a_nan_are_judged_as_if_it_were_not_there():
    rng = np.random.default_rng(3)
    steps = rng.normal(5.0, 20.0, (40, 6))
    steps[rng.random(steps.shape) < 0.2] = np.nan
    steps[7] = np.nan
    many = guarded(Mean(), "Mean")
    state = many.state(6)
    alone = [guarded(Mean(), "Mean") for _ in range(6)]
    states = [one.state(1) for one in alone]

    for values in steps:
        scores = many.score(values, state)
        for at, one in enumerate(alone):
            if np.isfinite(values[at]):
                assert one.score(values[at : at + 1], states[at]).score[0] == scores.score[at]
                one.learn(values[at : at + 1], states[at], scores.score[at : at + 1] >= 1.0)
            else:
                assert scores.score[at] == 0.0 and np.isnan(scores.baseline[at])
        many.learn(values, state, scores.score >= 1.0)

    assert state["num"].tolist() == [int(one["num"][0]) for one in states] and not many.problem


class Limit:
    """Keeps no state, so that it judges each rank's own row."""

    declares = Declaration(summary="a norm above 10")

    def state(self, num_series):
        return {}

    def score(self, values, state):
        return Scores.of(values / 10.0, np.full(len(values), 10.0))

    def learn(self, values, state, anomalous):
        pass


def test_a_detector_without_a_state_is_asked_about_the_rows_of_each_rank(paper_run):
    rule = Rule(name="own", detector="Limit", match=Match(kind=("wgrad",)), severity=Severity.WARNING)
    engine, run = Engine(Pack(rules=(rule,)), detectors={**DETECTORS, "Limit": Limit}), paper_run(TENSORS)

    (reported,) = engine.judge(run.view(0, [1.0, 30.0, 1.0, 1.0]))

    assert (reported.tag_name, reported.rank, reported.statistic, reported.baseline) == ("layers.1.mlp", 0, "norm", 10.0)
    assert reported.value == pytest.approx(30.0, rel=1e-3) and reported.score == pytest.approx(3.0, rel=1e-3)


class Peers:
    """Compares the value of ranks with their group's mean."""

    declares = Declaration(summary="compares", statistics=("value",), over="peers")

    def state(self, num_members):
        return {"num": np.zeros(num_members, np.int64)}

    def score(self, points, group, state):
        return Scores.of(
            np.abs(points["value"] - points["value"].mean()), np.zeros(len(group)), is_sure=np.ones(len(group), bool)
        )

    def learn(self, points, group, state, anomalous):
        state["num"] += 1


def test_a_member_without_a_finite_value_is_not_compared():
    found, group = guarded(Peers(), "Peers"), np.zeros(4, np.int64)
    state = found.state(4)
    for value in ([1.0, np.nan, 3.0, np.inf], [np.nan] * 4):
        points = {"value": np.array(value), "is_own": np.ones(4, np.bool_)}
        scores = found.score(points, group, state)
        found.learn(points, group, state, scores.score >= 1.0)
        assert scores.evidence["is_sure"].tolist() == np.isfinite(value).tolist()

    assert found.problem == "" and state["num"].tolist() == [1, 0, 1, 0]


class Group:
    """Compares ranks, and fails."""

    declares = Declaration(summary="compares", statistics=("step_s",), over="ranks")

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

    assert isinstance(found, GroupDetector) and "ZeroDivisionError: mine (" in found.problem
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
